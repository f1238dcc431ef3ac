"""Declaring a subcommand: the parts that all of them share."""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrel.config import Config

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace, Config], int]


def add_command(
    commands: "Subparsers",
    shared: argparse.ArgumentParser,
    name: str,
    run: Run,
    *,
    summary: str,
    description: str,
    examples: str,
    operand: tuple[str, str] | None = None,
    many: bool = False,
) -> argparse.ArgumentParser:
    """Add one subcommand that takes `key=value` overrides and at most one other word, in any order.

    operand: the other word's name and meaning; `many`: there may be several. examples: command lines without
    `kestrel`, one a line. `run` gets the parsed arguments, with the operand (or None) as `args.operand`, all of them as
    `args.operands` and the overrides as `args.overrides`, and the configuration; it returns the exit code.
    """
    shown = "\n".join(f"  kestrel {line}" for line in examples.strip().splitlines())
    dots = " ..." if many else ""
    before, meaning = ("", "") if operand is None else (f"[{operand[0]}{dots}] ", f"{operand[1]}; ")
    parser = commands.add_parser(
        name,
        usage=f"%(prog)s [options] {before}[key=value ...]",
        help=summary,
        description=textwrap.fill(description, 100),
        epilog=f"examples:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value" if operand is None else f"{operand[0]} key=value",
        help=f"{meaning}settings (see `kestrel config`)",
    )
    parser.set_defaults(run=run, parser=parser, takes_operand=operand is not None, takes_many=many)
    return parser


def suggest(args: argparse.Namespace, command: str) -> None:
    """Say on stderr what to run next, with the settings of this run."""
    print(f"next: kestrel {shlex.join([*shlex.split(command), *args.overrides])}", file=sys.stderr)
