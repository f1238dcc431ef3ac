"""From measurements to what people read: ratios with the name of their caliber, a table, JSON, metrics.

Calibers: `prefill` is computing the prompt alone; `ttft` runs from the request to the first text at the client, the
read of the restored KV included; `wall` is the whole request. A ratio is slow / fast of the same caliber.

A time to the first token is shown in pieces, which add up to it; see records.Parts for what they are made of.
"""

import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.bench.records import (
    BenchError,
    Cell,
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


@dataclass(frozen=True)
class Piece:
    """Some parts of a time to the first token under one name; `key` is its name among the metrics."""

    key: str
    name: str
    parts: tuple[str, ...]  # of records.Parts


_FIND = Piece("find", "lookup", ("find_ms", "open_ms"))
_WAIT = Piece("wait", "waiting for the disk", ("wait_ms",))
TTFT_PIECES = (
    _FIND,
    _WAIT,
    Piece("tail", "computing the prompt", ("matmul_ms", "attention_ms")),
    Piece("first_token", "first token", ("head_ms", "client_ms")),
    Piece("rest", "the rest", ("queue_ms", "rest_ms")),
)
COLD_PIECES = (
    Piece("matmul", "matrix products", ("matmul_ms",)),
    Piece("attention", "attention", ("attention_ms",)),
    Piece("head", "scores of the first token", ("head_ms",)),
    _FIND,
    _WAIT,
    Piece("rest", "the rest", ("queue_ms", "rest_ms", "client_ms")),
)
PART_NAMES = {
    "find_ms": "lookup",
    "open_ms": "opening the artifacts",
    "wait_ms": "waiting for the disk",
    "matmul_ms": "matrix products",
    "attention_ms": "attention",
    "head_ms": "scores of the first token",
    "client_ms": "to the client and back",
    "queue_ms": "waiting for the engine",
    "rest_ms": "embedding, bookkeeping",
}

QUIET = 0.15  # share of the processors that other work may take before the report warns


@dataclass(frozen=True)
class CellReport:
    """The three runs of one cell, and what they amount to.

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
        """Short name, as in dvc.yaml: model, length and type of KV."""
        return f"{self.model}-{self.context_tokens}-{self.kv}"


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


def pieces_ms(parts: Mapping[str, float], pieces: Sequence[Piece]) -> list[float]:
    """The time of each piece; between them the pieces name every part once, so they add up to the whole."""
    return [sum(parts[name] for name in piece.parts) for piece in pieces]


def load_cell(place: Cell) -> tuple[CellReport, Machine]:
    """The report of the cell whose records lie there, and the machine that measured it. Raises BenchError."""
    records = place.records
    first = load_record(FirstPrompt, place.first)
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


def build_report(cells: Sequence[Cell]) -> Report:
    """The report of all cells. Raises BenchError."""
    loaded = [load_cell(cell) for cell in cells]
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
            **_pieces("restored_ttft", cell.restored, TTFT_PIECES),
            **_pieces("cold_ttft", cell.cold, COLD_PIECES),
            "cold_bytes_written": cell.cold.bytes_written,
            "restored_bytes_read": cell.restored.bytes_read,
            "restored_bytes_written": cell.restored.bytes_written,
            "cached_tokens": cell.restored.cached_tokens,
            "identical_text": cell.identical_text,
            "fact_recalled": cell.fact_recalled,
        }
        for cell in report.contexts
    }


def _pieces(name: str, run: Run, pieces: Sequence[Piece]) -> dict[str, float]:
    times = pieces_ms(vars(run.parts), pieces)
    return {f"{name}_{piece.key}_ms": round(time, 3) for piece, time in zip(pieces, times, strict=True)}


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
    """Write report.json, calibers.csv, report.md and metrics/, a file a cell, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("report.json", json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"),
        ("calibers.csv", calibers_csv(report)),
        ("report.md", markdown(report)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    if (folder / "metrics").exists():
        shutil.rmtree(folder / "metrics")  # cells of an earlier matrix would be shown beside these
    (folder / "metrics").mkdir()
    for name, numbers in metrics(report).items():
        (folder / "metrics" / f"{name}.json").write_text(
            json.dumps(numbers, indent=1) + "\n", encoding="utf-8"
        )


def markdown(report: Report) -> str:
    """The tables, readable as plain text too."""
    machine = report.machine
    parts = [
        "# Restart experiment",
        f"{machine.cpu}, {machine.cores} cores ({machine.instructions}), {gibibytes(machine.memory_bytes)}; "
        f"{machine.os}.\n"
        f"Kestrel {machine.kestrel}, Python {machine.python}, onnxruntime {machine.onnxruntime}, "
        f"numba {machine.numba}; disk reads {machine.disk_read_mb_s:,.0f} MB/s, "
        f"writes {machine.disk_write_mb_s:,.0f} MB/s.",
    ]
    if len(report.contexts) > 1:
        parts += ["## All cells", _summary(report.contexts)]
    for cell in report.contexts:
        parts += [_heading(cell), _table(cell), _parts_table(cell), _remarks(cell)]
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
    return _aligned(rows)


def _parts_table(cell: CellReport) -> str:
    """Where the time to the first token went; the parts add up to it."""
    runs = (cell.cold, cell.restored, cell.control)
    rows: list[tuple[str, ...]] = [("of the TTFT", "S1 cold", "S2 restored", "control")]
    rows += [
        (name, *(duration(getattr(run.parts, part)) for run in runs)) for part, name in PART_NAMES.items()
    ]
    return _aligned(rows)


def _summary(cells: Sequence[CellReport]) -> str:
    """One line a cell: cold / restored, and the bytes of its turns."""
    titles = ("prefill", "TTFT", "wall", "TTFT cold", "TTFT restored", "S1 wrote", "S2 read", "S2 wrote")
    rows: list[tuple[str, ...]] = [("cold / restored", *titles)]
    for cell in cells:
        cold, restored = cell.cold, cell.restored
        times = [duration(run.ttft_ms) for run in (cold, restored)]
        sizes = [
            megabytes(size) for size in (cold.bytes_written, restored.bytes_read, restored.bytes_written)
        ]
        rows.append((cell.name, *(ratio(cell.speedup[caliber]) for caliber in CALIBERS), *times, *sizes))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as text; the first row is its head."""
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
            f"- namespace {cell.namespace}, numerics probe {cell.numerics[:16]}",
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
