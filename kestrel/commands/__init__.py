"""The subcommands of `kestrel`, one module each: `add_parser` declares it, `run` does it."""
