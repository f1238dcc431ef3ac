"""The whole restart experiment for one configuration, without DVC: what `kestrel bench` runs."""

import importlib.util
from pathlib import Path

from kestrel.bench.chart import draw_breakdown, draw_report
from kestrel.bench.experiment import (
    prepare_model,
    restore_session,
    run_control,
    run_first_session,
    write_first_prompt,
)
from kestrel.bench.page import render_page
from kestrel.bench.records import cell_of
from kestrel.bench.report import Report, build_report, check_report, markdown, save_report
from kestrel.config import Config
from kestrel.log import Log
from kestrel.models.fetch import resolve_model

OUT = Path("artifacts/bench/ad-hoc")


def log_line(text: str) -> None:
    """Write a line of progress to standard output at once."""
    print(f"[BENCH] {text}", flush=True)


def run(config: Config, out: Path = OUT, log: Log = log_line) -> Report:
    """Run the experiment into `out`, print its table, and return the report.

    The folder below `out` named after model, context length and type of KV is emptied of KV first; no other store is
    touched. Raises BenchError, after everything is written, when nothing was restored or the texts differ.
    """
    _, name = resolve_model(config.model)
    cell = cell_of(out, name, config.bench.context_tokens, config.engine.kv)
    prepare_model(config, out / "records" / f"{name}.json", log)
    write_first_prompt(config, cell, log)
    run_first_session(config, cell, log)
    restore_session(config, cell, log)
    run_control(config, cell, log)
    report = build_report([cell])
    save_report(report, out)
    (out / "report.html").write_text(render_page(report, []), encoding="utf-8")
    written = "report.html, report.md, report.json"
    if importlib.util.find_spec("matplotlib") is None:
        log("no chart: it needs matplotlib (pip install matplotlib)")
    else:
        draw_report(report, out / "report.png")
        draw_breakdown(report, out / "breakdown.png")
        written += ", report.png, breakdown.png"
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
