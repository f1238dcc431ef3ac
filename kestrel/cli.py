"""The command line: `kestrel COMMAND [options] [key=value …]`.

Every command takes Hydra overrides as trailing words. Results go to stdout, everything about the work itself to
stderr. Exit codes: 0 done, 1 an expected failure (one line, no traceback), 2 wrong usage, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from kestrel import __version__
from kestrel.commands import bench, config, doctor, generate, kv, serve, top
from kestrel.commands.words import split_words
from kestrel.config import load_config
from kestrel.errors import KestrelError

DESCRIPTION = """\
Serve language models on CPUs and keep what a prefill computes as a build artifact: restart, move to another
board or come back next week, and only the new part of a prompt is computed."""

EPILOG = """\
Settings are words at the end of any command: GROUP=OPTION picks a file of conf/GROUP, KEY=VALUE changes one key.
`kestrel config` shows all of them.

examples:
  kestrel generate --chat "Why is the sky blue?"
  kestrel serve model.path=/models/Qwen3-0.6B-Q8_0.gguf server.port=9000
  kestrel kv ls
  kestrel doctor

next: kestrel serve"""

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
CLOSED_PIPE = 141  # 128 + SIGPIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. Imports nothing heavy, so that `--help` answers at once."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,  # may stand before or after the command; a default would undo the former
        help="show the traceback of an error",
    )
    parser = argparse.ArgumentParser(
        prog="kestrel",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"kestrel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, top, generate, bench, doctor, kv, config):
        command.add_parser(commands, shared)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argv: the words after `kestrel`; None means `sys.argv[1:]`."""
    parser = build_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args, later_words = parser.parse_known_args(words)
    _refuse_unknown_options(args, later_words)
    args.overrides, operands = split_words([*args.words, *later_words])
    if len(operands) > args.takes_operand and not args.takes_many:
        args.parser.error(f"unexpected word {operands[-1]!r}; settings have the form key=value")
    args.operand = operands[0] if operands else None
    args.operands = operands
    try:
        code: int = args.run(args, load_config(args.overrides))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output is gone, as with `kestrel kv ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except (KestrelError, OSError) as error:
        if getattr(args, "debug", False):
            raise
        print(f"kestrel: error: {error}", file=sys.stderr)
        return 1


def _refuse_unknown_options(args: argparse.Namespace, words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("-") and len(word) > 1 and not any(char.isspace() for char in word):
            args.parser.error(f"unknown option {word}; see `{args.parser.prog} --help`")
