"""`kestrel doctor`: whether Kestrel works on this machine, and how well."""

import argparse
import dataclasses
import itertools
from typing import TYPE_CHECKING

from kestrel.commands.parsers import add_command, suggest
from kestrel.commands.progress import Working
from kestrel.commands.texts import ignore_line, print_json
from kestrel.config import Config

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers

MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        shared,
        "doctor",
        run,
        summary="check this machine: versions, kernels, exactness, store, disk",
        description="Check this machine: versions, CPU and kernels, whether results are exact, the store and the disk "
        "below it. Exit code 1 if something fails. With --exact: compute a prompt in every way a server may come to "
        "compute it, with both KV dtypes, and compare all bits.",
        examples="""
doctor
doctor --exact
doctor --json
doctor model.path=/models/Qwen3-0.6B-Q8_0.gguf cache.root=/data/kv
""",
    )
    parser.add_argument(
        "--exact", action="store_true", help="try every guarantee on this model and CPU (a minute)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config) -> int:
    """Print one finding a line as it is made; exit code 1 if any of them is a failure."""
    from kestrel.doctor import examine, guarantees

    findings = []
    rest = examine(config, ignore_line)
    if args.exact:
        rest = itertools.chain(rest, guarantees(config))
    while True:
        with Working("checking"):
            finding = next(rest, None)
        if finding is None:
            break
        findings.append(finding)
        if not args.json:
            print(f"{MARKS[finding.verdict]}  {finding.topic:<10} {finding.text}", flush=True)
    failed = [finding.topic for finding in findings if finding.verdict == "fail"]
    if args.json:
        print_json({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]})
    elif failed:
        print(f"\nfailed: {', '.join(failed)}")
    else:
        print("\nall is well")
        suggest(args, "serve")
    return 1 if failed else 0
