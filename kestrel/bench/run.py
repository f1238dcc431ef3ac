"""The whole restart experiment for one configuration, without DVC: what `kestrel bench` runs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from kestrel.bench.chart import draw_report
from kestrel.bench.experiment import (
    Cell,
    prepare_model,
    restore_session,
    run_control,
    run_first_session,
    write_first_prompt,
)
from kestrel.bench.report import Report, build_report, check_report, markdown, save_report
from kestrel.config import Config
from kestrel.models.fetch import resolve_model

OUT = Path("artifacts/bench/ad-hoc")

Log = Callable[[str], None]


def log_line(text: str) -> None:
    """Write a line of progress to standard output at once."""
    print(f"[BENCH] {text}", flush=True)


def run(config: Config, out: Path = OUT, log: Log = log_line) -> Report:
    """Run the experiment into `out`, print its table, and return the report.

    The folder below `out` named after the model and the context length is emptied of KV first; no other store is
    touched. Raises BenchError, after everything is written, when nothing was restored or the texts differ.
    """
    _, name = resolve_model(config.model)
    cell_name = f"{name}-{config.bench.context_tokens}"
    cell = Cell(records=out / "records" / cell_name, scratch=out / "stores" / cell_name)
    prepare_model(config, out / "records" / f"{name}.json", log)
    write_first_prompt(config, cell, log)
    run_first_session(config, cell, log)
    restore_session(config, cell, log)
    run_control(config, cell, log)
    report = build_report([cell.records])
    save_report(report, out)
    written = "report.md, report.json"
    if importlib.util.find_spec("matplotlib") is None:
        log("no chart: it needs matplotlib (pip install 'kestrel[plots]')")
    else:
        draw_report(report, out / "report.png")
        written += ", report.png"
    print(f"\n{markdown(report)}")
    print(f"{out}: {written}; servers' logs and stores in {cell.scratch}\n")
    check_report(report)
    other = 1024 if config.bench.context_tokens != 1024 else 2044
    print(
        "Try next:\n"
        f"  kestrel kv ls cache.root={cell.store}   # the artifacts that were restored\n"
        f"  kestrel bench bench.context_tokens={other}   # the gain grows with the context\n"
        "  kestrel serve   # then open http://127.0.0.1:8080"
    )
    return report
