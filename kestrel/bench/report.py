"""From measurements to what people read: ratios with the name of their caliber, a table, JSON, metrics.

Calibers: `prefill` is computing the prompt alone; `ttft` runs from the request to the first text at the client, the
read of the restored KV included; `wall` is the whole request. A ratio is slow / fast of the same caliber.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.bench.records import (
    BenchError,
    FirstPrompt,
    Machine,
    Measurement,
    PageList,
    Run,
    SecondPrompt,
    load_record,
)

CALIBERS = ("prefill", "ttft", "wall")
CALIBER_NAMES = {"prefill": "prefill", "ttft": "TTFT", "wall": "wall"}

QUIET = 0.15  # share of the processors that other work may take before the report warns


@dataclass(frozen=True)
class CellReport:
    """The three runs of one model at one context length, and what they amount to.

    speedup: cold / restored. speedup_over_control: control / restored; both runs have the same prompt. A caliber
    without a ratio (the faster time is 0) is None.
    """

    model: str
    context_tokens: int
    weights: str
    kv: str
    namespace: str
    numerics: str
    cold: Run
    restored: Run
    control: Run
    speedup: dict[str, float | None]
    speedup_over_control: dict[str, float | None]
    identical_text: bool
    fact_recalled: bool
    question: str
    follow_up_question: str
    expected: str

    @property
    def name(self) -> str:
        """Short name, as in dvc.yaml: model and length."""
        return f"{self.model}-{self.context_tokens}"


@dataclass(frozen=True)
class Report:
    """All cells of an experiment, measured on one machine."""

    machine: Machine
    contexts: tuple[CellReport, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, as report.json holds it."""
        return dataclasses.asdict(self)


def milliseconds(run: Run, caliber: str) -> float:
    """The time of a run in one caliber."""
    times: dict[str, float] = {"prefill": run.prefill_ms, "ttft": run.ttft_ms, "wall": run.wall_ms}
    return times[caliber]


def ratios(slow: Run, fast: Run) -> dict[str, float | None]:
    """slow / fast in every caliber, to two decimals; None where the fast time is 0."""
    return {
        caliber: round(milliseconds(slow, caliber) / milliseconds(fast, caliber), 2)
        if milliseconds(fast, caliber)
        else None
        for caliber in CALIBERS
    }


def load_cell(records: Path) -> tuple[CellReport, Machine]:
    """The report of the cell whose records lie in a folder, and the machine that measured it. Raises BenchError."""
    first = load_record(FirstPrompt, records / "first.json")
    second = load_record(SecondPrompt, records / "second.json")
    pages = load_record(PageList, records / "pages.json")
    cold, restored, control = (
        load_record(Measurement, records / name) for name in ("cold.json", "restored.json", "control.json")
    )
    machine = one_machine([cold.machine, restored.machine, control.machine])
    if cold.run.text != second.answer:
        raise BenchError(
            f"{records}: the first answer and the prompt that continues it are of two experiments; "
            "measure again: dvc repro --force"
        )
    cell = CellReport(
        model=cold.model,
        context_tokens=cold.context_tokens,
        weights=cold.weights,
        kv=cold.kv,
        namespace=pages.namespace,
        numerics=pages.numerics,
        cold=cold.run,
        restored=restored.run,
        control=control.run,
        speedup=ratios(cold.run, restored.run),
        speedup_over_control=ratios(control.run, restored.run),
        identical_text=restored.run.text == control.run.text,
        fact_recalled=first.expected in restored.run.text,
        question=first.question,
        follow_up_question=first.follow_up_question,
        expected=first.expected,
    )
    return cell, machine


def one_machine(machines: Sequence[Machine]) -> Machine:
    """The machine that all measurements were made on, with the first one's disk. Raises BenchError if they differ."""
    first = machines[0]
    for other in machines[1:]:
        for field in dataclasses.fields(Machine):
            here, there = getattr(first, field.name), getattr(other, field.name)
            if here != there and not field.name.startswith("disk_"):
                raise BenchError(
                    f"the runs were measured on two machines ({field.name}: {here!r} and {there!r}), which says "
                    "nothing about a restart; measure again: dvc repro --force"
                )
    return first


def build_report(cells: Sequence[Path]) -> Report:
    """The report of all cells, given their folders of records. Raises BenchError."""
    loaded = [load_cell(records) for records in cells]
    machine = one_machine([machine for _, machine in loaded])
    return Report(machine, tuple(cell for cell, _ in loaded))


def failures(report: Report) -> list[str]:
    """What breaks Kestrel's promises, one sentence each; empty when all is well.

    A fact that was not recalled is no failure: it says something about the model, not about the store.
    """
    found = []
    for cell in report.contexts:
        if not cell.restored.cached_tokens:
            reason = cell.restored.miss_reason or "no reason given"
            found.append(f"{cell.name}: nothing was restored ({reason})")
        if not cell.identical_text:
            found.append(
                f"{cell.name}: the restored answer differs from the control's\n"
                f"  restored: {cell.restored.text!r}\n  control:  {cell.control.text!r}"
            )
    return found


def check_report(report: Report) -> None:
    """Raise BenchError when a promise is broken; to be called after everything is written."""
    broken = failures(report)
    if broken:
        raise BenchError(
            "the experiment failed\n"
            + "\n".join(broken)
            + "\nlook at: the servers' logs beside the stores, then "
            "kestrel doctor"
        )


def metrics(report: Report) -> dict[str, dict[str, Any]]:
    """The few numbers that `dvc metrics show` and `diff` are for, by cell."""
    return {
        cell.name: {
            **{f"speedup_{caliber}": cell.speedup[caliber] for caliber in CALIBERS},
            **{f"restored_{caliber}_ms": milliseconds(cell.restored, caliber) for caliber in CALIBERS},
            **{f"cold_{caliber}_ms": milliseconds(cell.cold, caliber) for caliber in CALIBERS},
            "cached_tokens": cell.restored.cached_tokens,
            "identical_text": cell.identical_text,
            "fact_recalled": cell.fact_recalled,
        }
        for cell in report.contexts
    }


def calibers_csv(report: Report) -> str:
    """One line per cell, caliber and run, for `dvc plots`; `bar` names the line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("bar", "cell", "caliber", "run", "milliseconds"))
    for cell in report.contexts:
        for caliber in CALIBERS:
            for name in ("cold", "control", "restored"):
                time, title = milliseconds(getattr(cell, name), caliber), CALIBER_NAMES[caliber]
                writer.writerow((f"{cell.name} {title} {name}", cell.name, title, name, time))
    return text.getvalue()


def save_report(report: Report, folder: Path) -> None:
    """Write report.json, metrics.json, calibers.csv and report.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("report.json", json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"),
        ("metrics.json", json.dumps(metrics(report), indent=1) + "\n"),
        ("calibers.csv", calibers_csv(report)),
        ("report.md", markdown(report)),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def markdown(report: Report) -> str:
    """The tables, readable as plain text too."""
    machine = report.machine
    parts = [
        "# Restart experiment",
        f"{machine.cpu}, {machine.cores} cores, {gibibytes(machine.memory_bytes)}; {machine.os}.\n"
        f"Kestrel {machine.kestrel}, Python {machine.python}, onnxruntime {machine.onnxruntime}, "
        f"numba {machine.numba}; disk reads {machine.disk_read_mb_s:,.0f} MB/s, "
        f"writes {machine.disk_write_mb_s:,.0f} MB/s.",
    ]
    for cell in report.contexts:
        parts += [_heading(cell), _table(cell), _remarks(cell)]
    return "\n\n".join(parts) + "\n"


def _heading(cell: CellReport) -> str:
    return f"## {cell.model}, {cell.context_tokens:,} tokens ({cell.weights} weights, {cell.kv} KV)"


def _table(cell: CellReport) -> str:
    rows = [
        (
            "caliber",
            f"S1 cold (n={cell.cold.computed_tokens:,})",
            f"S2 restored (n={cell.restored.computed_tokens:,})",
            "ratio",
            f"control, no store (n={cell.control.computed_tokens:,})",
            "ratio",
        )
    ]
    for caliber in CALIBERS:
        rows.append(
            (
                CALIBER_NAMES[caliber],
                duration(milliseconds(cell.cold, caliber)),
                duration(milliseconds(cell.restored, caliber)),
                ratio(cell.speedup[caliber]),
                duration(milliseconds(cell.control, caliber)),
                ratio(cell.speedup_over_control[caliber]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    rule = "| " + " | ".join(
        "-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + " |", *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.ljust(width) if column == 0 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(cells) + " |"


def _warnings(cell: CellReport) -> list[str]:
    """What a reader must know before believing the times."""
    busy = {"S1": cell.cold.busy, "S2": cell.restored.busy, "control": cell.control.busy}
    shares = [f"{share:.0%} before {name}" for name, share in busy.items() if share > QUIET]
    if not shares:
        return []
    return [f"- the machine was busy with other work ({', '.join(shares)}): measure again when it is quiet"]


def _remarks(cell: CellReport) -> str:
    restored, cold = cell.restored, cell.cold
    same = "the same text as the control's" if cell.identical_text else "NOT the control's text"
    recalled = "recalled" if cell.fact_recalled else f"not recalled (expected {cell.expected})"
    return "\n".join(
        [
            *_warnings(cell),
            f"- restored: {restored.cached_tokens:,} of {restored.prompt_tokens:,} tokens, "
            f"{megabytes(restored.bytes_read)} read in {duration(restored.restore_ms)}; "
            f"saved: {megabytes(cold.bytes_written)} by S1, {megabytes(restored.bytes_written)} by S2",
            f"- start of the server: {duration(cold.boot_ms)} (S1), {duration(restored.boot_ms)} (S2)",
            f"- “{cell.question}” — “{one_line(cold.text)}”",
            f"- “{cell.follow_up_question}” — “{one_line(restored.text)}”: {same}; the planted fact was {recalled}",
            f"- namespace {cell.namespace}",
        ]
    )


def one_line(text: str, most: int = 160) -> str:
    """An answer as a quotation: white space folded, a long one cut."""
    folded = " ".join(text.split())
    return folded if len(folded) <= most else folded[: most - 1] + "…"


def duration(value: float) -> str:
    """Milliseconds as people read them: `7.4 ms`, `41 ms`, `1.96 s`."""
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def ratio(value: float | None) -> str:
    """`23.6x`; three digits are as many as a measurement supports."""
    if value is None:
        return "–"
    return f"{value:.0f}x" if value >= 100 else f"{value:.1f}x"


def megabytes(value: int) -> str:
    """Bytes in units of 10^6, as disks are sold."""
    return f"{value / 1e6:,.1f} MB"


def gibibytes(value: int) -> str:
    """Bytes in units of 2^30, as memory is sold."""
    return f"{value / 2**30:.0f} GiB"
