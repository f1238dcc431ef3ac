"""`kestrel config`: the resolved configuration, and what each group offers."""

import argparse
import json
from typing import TYPE_CHECKING

from kestrel.commands.parsers import add_command
from kestrel.config import GROUPS, Config, group_options, packaged_config_dir, resolved_dict

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        shared,
        "config",
        run,
        summary="show the configuration that a command would use",
        description="Show the resolved configuration, with the options of every group.",
        examples="""
config
config cache=board server.port=9000
config --json model=qwen3-0.6b
""",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config) -> int:
    """Print the configuration as YAML (each group headed by its options) or JSON."""
    data = resolved_dict(config)
    if args.json:
        print(json.dumps(data, indent=2))
        return 0
    import yaml

    print(f"# Every key is explained in {packaged_config_dir()}/GROUP/*.yaml; sizes are shown in bytes.")
    for group in GROUPS:
        print(f"\n# {group}= {' | '.join(group_options(group))}")
        print(yaml.safe_dump({group: data[group]}, sort_keys=False, allow_unicode=True, width=110), end="")
    return 0
