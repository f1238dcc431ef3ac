"""The picture of a report: one row a cell, one panel a caliber, three bars a panel."""

from pathlib import Path
from typing import TYPE_CHECKING

from kestrel.bench.records import BenchError
from kestrel.bench.report import CALIBERS, CellReport, Report, duration, milliseconds, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1b2733"
FAINT = "#6b7885"
PAPER = "#ffffff"
RULE = "#e3e8ed"
COLOURS = {"cold": "#8fa3b5", "control": "#b9c5d0", "restored": "#e4572e"}
LABELS = {"cold": "cold start", "control": "no store", "restored": "restored"}
TITLES = {
    "prefill": "Prefill (in the server)",
    "ttft": "Time to first token (at the client)",
    "wall": "Whole request (at the client)",
}
_ROW_INCHES = 2.75
_HEAD_INCHES = 1.05
_FOOT_INCHES = 0.55


def draw_report(report: Report, path: Path) -> None:
    """Draw the report into a PNG file. Raises BenchError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("the chart needs matplotlib: pip install 'kestrel[plots]'") from error

    num_rows = len(report.contexts)
    height = _HEAD_INCHES + _ROW_INCHES * num_rows + _FOOT_INCHES
    figure = Figure(figsize=(12.0, height), dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    top = 1 - _HEAD_INCHES / height
    grid = figure.add_gridspec(
        num_rows,
        len(CALIBERS),
        left=0.085,
        right=0.985,
        top=top,
        bottom=_FOOT_INCHES / height,
        wspace=0.12,
        hspace=0.42,
    )
    figure.text(
        0.02, 1 - 0.32 / height, "After a restart, only the new part of the prompt is computed",
        color=INK, fontsize=16, fontweight="bold", va="center",
    )  # fmt: skip
    for row, cell in enumerate(report.contexts):
        panels = [figure.add_subplot(grid[row, column]) for column in range(len(CALIBERS))]
        for axes, caliber in zip(panels, CALIBERS, strict=True):
            _draw_panel(axes, cell, caliber, with_names=axes is panels[0])
        top_of_row = panels[0].get_position().y1
        figure.text(
            0.02, top_of_row + 0.42 / height, _cell_title(cell), color=FAINT, fontsize=10.5, va="center"
        )
    machine = report.machine
    figure.text(
        0.02, 0.2 / height,
        f"{machine.cpu}, {machine.cores} cores · Kestrel {machine.kestrel}, onnxruntime {machine.onnxruntime} · "
        "the server was killed with SIGKILL between the two prompts; artifacts were read from the disk",
        color=FAINT, fontsize=8.5, va="center",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _cell_title(cell: CellReport) -> str:
    same = (
        "same text as without the store"
        if cell.identical_text
        else "TEXT DIFFERS from the run without the store"
    )
    return (
        f"{cell.model}, {cell.weights} weights · {cell.restored.cached_tokens:,} of {cell.restored.prompt_tokens:,} "
        f"prompt tokens restored · {same}"
    )


def _draw_panel(axes: "Axes", cell: CellReport, caliber: str, with_names: bool) -> None:
    runs = {"restored": cell.restored, "control": cell.control, "cold": cell.cold}
    times = {name: milliseconds(run, caliber) for name, run in runs.items()}
    longest = max(times.values()) or 1.0
    for place, (name, value) in enumerate(times.items()):
        axes.barh(place, max(value, longest * 0.006), height=0.62, color=COLOURS[name])
        axes.text(
            value + longest * 0.025, place, duration(value), va="center", color=INK, fontsize=10,
            fontweight="bold" if name == "restored" else "normal",
        )  # fmt: skip
    figure_of_merit = axes.text(
        0, -1.12, ratio(cell.speedup[caliber]), va="center", color=COLOURS["restored"], fontsize=24,
        fontweight="bold",
    )  # fmt: skip
    axes.annotate(
        f"cold / restored\n{ratio(cell.speedup_over_control[caliber])} no store / restored",
        xy=(1, 0.5), xycoords=figure_of_merit, xytext=(9, 0), textcoords="offset points", va="center",
        color=FAINT, fontsize=9,
    )  # fmt: skip
    axes.set_title(TITLES[caliber], loc="left", color=INK, fontsize=10.5, pad=6)
    axes.set_xlim(0, longest * 1.22)
    axes.set_ylim(-1.6, 2.5)
    axes.set_yticks(range(3), [LABELS[name] for name in times] if with_names else [""] * 3)
    axes.tick_params(axis="y", length=0, colors=INK, labelsize=10)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set(color=RULE, bounds=(-0.5, 2.5))
