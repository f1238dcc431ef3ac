"""`kestrel serve`: the HTTP server."""

import argparse
from typing import TYPE_CHECKING

from kestrel.commands.parsers import add_command
from kestrel.config import Config

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    add_command(
        commands,
        shared,
        "serve",
        run,
        summary="start the HTTP server (OpenAI-compatible)",
        description="Start the HTTP server. It speaks OpenAI's completions and chat API and shows a page at /.",
        examples="""
serve
serve model.path=/models/Qwen3-0.6B-Q8_0.gguf server.port=9000
serve cache=board prefixes=assistant server.warm=true
serve cache=off
""",
    )


def run(args: argparse.Namespace, config: Config) -> int:
    """Serve until interrupted; what was computed by then is saved."""
    from kestrel.server.start import serve

    serve(config)
    return 0
