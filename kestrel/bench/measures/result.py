"""What a measure hands over: a table, targets, pictures and the machine; written as JSON, Markdown and PNG."""

import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kestrel.bench.machine import busy_share, describe_machine
from kestrel.bench.records import Machine
from kestrel.bench.report import QUIET
from kestrel.config import Config

Row = dict[str, Any]  # by Column.key; text, numbers or None
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Column:
    """One column of the table: the key in the rows, its head, and how a number of it is written."""

    key: str
    head: str
    form: str = "{}"

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of one cell; nothing where nothing was measured."""
        value = row.get(self.key)
        return "" if value is None else self.form.format(value)


@dataclass(frozen=True)
class Target:
    """What was aimed at, and what came out: `value` should be at most (or at least) `bound`."""

    what: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        """Whether it came out as aimed at."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'met' if self.is_met else 'MISSED'}: {self.what}: {self.value:.3g} (target {sign} {self.bound:g})"


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars: for every label one bar of each series; None leaves one out."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Lines:
    """A panel of curves over a common axis, both axes logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]


@dataclass(frozen=True)
class Spans:
    """A panel of lanes over time: (begin, end) of every piece of work, milliseconds."""

    title: str
    lanes: Mapping[str, Points]


Panel = Bars | Lines | Spans


@dataclass(frozen=True)
class Result:
    """All that one measure found.

    settings: what was run. busy: share of the processors that other work took just before and just after.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    columns: Sequence[Column]
    rows: Sequence[Row]
    targets: Sequence[Target]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()
    machine: Machine | None = None
    busy: tuple[float, float] | None = None

    def markdown(self) -> str:
        """The table, the targets and what a reader must know."""
        facts = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [f"# {self.title}", "", facts, "", *table_lines(self.columns, self.rows), ""]
        lines += [f"- {target}" for target in self.targets]
        lines += [f"- {note}" for note in self.notes]
        if self.machine is not None:
            lines.append(
                f"- {self.machine.cpu}, {self.machine.cores} cores, {self.machine.os}; Kestrel {self.machine.kestrel}, "
                f"onnxruntime {self.machine.onnxruntime}, numba {self.machine.numba}; disk "
                f"{self.machine.disk_read_mb_s:,.0f} MB/s read, {self.machine.disk_write_mb_s:,.0f} written"
            )
        if self.busy is not None:
            before, after = self.busy
            warning = ": NOT QUIET, believe the ratios at most" if max(self.busy) > QUIET else ""
            lines.append(
                f"- other work took {before:.0%} of the processors before, {after:.0%} after{warning}"
            )
        return "\n".join(lines) + "\n"


@dataclass
class Observation:
    """The machine around a measure: made before it; publishes what it found."""

    folder: Path
    machine: Machine = field(init=False)
    busy_before: float = field(init=False)

    def __post_init__(self) -> None:
        self.busy_before = busy_share()
        self.machine = describe_machine(self.folder)

    def publish(self, result: Result) -> Result:
        """Add the machine and how busy it was to a result, write it into the folder and print it."""
        whole = dataclasses.replace(result, machine=self.machine, busy=(self.busy_before, busy_share()))
        publish(whole, self.folder)
        return whole


def table_lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """A Markdown table whose source is aligned too; text to the left, numbers to the right."""
    table = [[column.head for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(3, *(len(line[n]) for line in table)) for n in range(len(columns))]
    is_text = [all(isinstance(row.get(column.key), str | None) for row in rows) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(cells, widths, is_text, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = " | ".join(
        "-" * width if text else "-" * (width - 1) + ":" for width, text in zip(widths, is_text, strict=True)
    )
    return [line(table[0]), f"| {rule} |", *(line(cells) for cells in table[1:])]


def common_settings(config: Config, name: str, full: bool) -> dict[str, Any]:
    """What every measure of a model says about its run."""
    return {
        "model": name,
        "weights": config.engine.weights,
        "kv": config.engine.kv,
        "threads": config.engine.threads or "all",
        "repeats": config.bench.repeats,
        "cases": "all" if full else "quick",
    }


def median(values: Sequence[float]) -> float:
    """The middle value, the mean of the two middle ones of an even number."""
    return statistics.median(values)


def publish(result: Result, out: Path) -> None:
    """Write result.json, result.md and, where matplotlib is installed, result.png below `out`; print the table."""
    out.mkdir(parents=True, exist_ok=True)
    record = dataclasses.asdict(result)
    record["targets"] = [{**dataclasses.asdict(target), "is_met": target.is_met} for target in result.targets]
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    (out / "result.json").write_text(text + "\n", encoding="utf-8")
    (out / "result.md").write_text(result.markdown(), encoding="utf-8")
    written = "result.md, result.json"
    if importlib.util.find_spec("matplotlib") is None:
        print("[BENCH] no picture: it needs matplotlib (pip install matplotlib)", flush=True)
    else:
        from kestrel.bench.measures.picture import draw

        draw(result, out / "result.png")
        written += ", result.png"
    print(f"\n{result.markdown()}\n{out}: {written}")
