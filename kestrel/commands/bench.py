"""`kestrel bench [MEASURE]`: the restart experiment, or one of the measures of speed, on this machine."""

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kestrel.commands.parsers import add_command
from kestrel.config import Config

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers


class Measure(NamedTuple):
    """A module with `run(config, out)`, or `run(config, out, full)` if it has cases that take long."""

    module: str
    meaning: str
    has_sizes: bool = True


MEASURES = {
    "restore": Measure(
        "measures.restore", "first token after a restart, against reading and computing the tail alone"
    ),
    "save": Measure("measures.save", "what saving costs the first turn, answers meanwhile, and bytes a turn"),
    "prefill": Measure("measures.prefill", "prompt tokens a second, and where the time goes"),
    "decode": Measure("measures.decode", "answer tokens a second at several contexts, float32 and int8 KV"),
    "speculate": Measure(
        "measures.speculate", "answers with drafts from the session's own text, and without"
    ),
    "attention": Measure("measures.attention", "the attention kernel beside onnxruntime's operator"),
    "peer": Measure("measures.peer", "prefill, decode, restart beside llama.cpp (pip install xllamacpp)"),
    "store": Measure("measures.store", "finding, opening and evicting among many artifacts"),
    "published": Measure("measures.published", "listing and DVC's commands among many published pages"),
    "startup": Measure("measures.startup", "process start to listening, imports, memory"),
    "serve": Measure("measures.serve", "a stream beside a long prompt, and streams side by side"),
    "worth": Measure("measures.worth", "a hit on a throttled disk: read it or compute it"),
    "quality": Measure("quality", "what int8 KV and quantised weights cost in quality", has_sizes=False),
}


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    listed = "\n".join(f"  {name:10} {measure.meaning}" for name, measure in MEASURES.items())
    parser = add_command(
        commands,
        shared,
        "bench",
        run,
        summary="measure a restart with and without the store, or one part of the speed",
        description="Without MEASURE: the restart experiment, a session, a kill, its continuation from the store, and "
        "a control without a store. Every speed-up is given with its caliber: prefill, TTFT or wall. With MEASURE: "
        "one part of the speed, as a table, JSON and a picture below artifacts/bench/MEASURE.",
        examples="""
bench
bench bench.context_tokens=4096
bench model=qwen3-0.6b-random engine=int4
bench restore
bench peer --full engine=int4
""",
        operand=("MEASURE", ", ".join(MEASURES)),
    )
    parser.epilog = f"measures:\n{listed}\n\n{parser.epilog}"
    parser.add_argument("--full", action="store_true", help="all cases of a measure, however long they take")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")


def run(args: argparse.Namespace, config: Config) -> int:
    """Run the experiment or the measure and print its table."""
    if args.operand is None:
        from kestrel.bench.run import OUT
        from kestrel.bench.run import run as run_bench

        if args.full:
            args.parser.error("--full belongs to a MEASURE; the restart experiment has one size")
        run_bench(config, args.out or OUT)
        return 0
    if args.operand not in MEASURES:
        args.parser.error(f"there is no measure {args.operand!r}; choose one of {', '.join(MEASURES)}")
    measure = MEASURES[args.operand]
    if args.full and not measure.has_sizes:
        args.parser.error(f"--full: {args.operand} has one size")
    out = args.out or Path("artifacts/bench") / args.operand
    sizes = {"full": args.full} if measure.has_sizes else {}
    importlib.import_module(f"kestrel.bench.{measure.module}").run(config, out, **sizes)
    return 0
