"""The pictures of a report: the three calibers of every cell, and the figures of the page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.bench.figures import DARK, Figure, figures
from kestrel.bench.records import BenchError, Machine
from kestrel.bench.report import CALIBERS, CellReport, Report, duration, milliseconds, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

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


_LINE_INCHES = 0.27  # of the breakdown: a bar, or the heading of a group
_TITLE_INCHES = 0.5
_KEY_INCHES = 0.24
_KEY_COLUMNS = 3


def draw_report(report: Report, path: Path) -> None:
    """Draw the calibers into a PNG file: one row a cell, three bars a panel. Raises BenchError without matplotlib."""
    num_rows = len(report.contexts)
    height = _HEAD_INCHES + _ROW_INCHES * num_rows + _FOOT_INCHES
    figure = _canvas(12.0, height)
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
    _sign(
        figure, report.machine,
        "the server was killed with SIGKILL between the two prompts; artifacts were read from the disk",
    )  # fmt: skip
    _save(figure, path)


def draw_breakdown(report: Report, path: Path) -> None:
    """Draw the figures of the page into a PNG file, in two columns. Raises BenchError without matplotlib."""
    speedups, first_tokens, restored, cold, nbytes = figures(report.as_json())
    columns = [[speedups, nbytes], [first_tokens, restored, cold]]
    tallest = max(sum(map(_inches, column)) for column in columns)
    width, height = 14.0, _HEAD_INCHES + tallest + _FOOT_INCHES
    canvas = _canvas(width, height)
    models = " and ".join(sorted({f"{cell.model} ({cell.weights} weights)" for cell in report.contexts}))
    canvas.text(
        0.02, 1 - 0.45 / height, f"Where time and bytes go: {models}",
        color=INK, fontsize=16, fontweight="bold", va="center",
    )  # fmt: skip
    for number, column in enumerate(columns):
        top = height - _HEAD_INCHES
        for each in column:
            _draw_figure(canvas, each, 0.3 + number * width / 2, top, width / 2 - 0.6)
            top -= _inches(each)
    _sign(
        canvas, report.machine, "times to the first token are the client's; the pieces of a bar add up to it"
    )
    _save(canvas, path)


def _num_lines(figure: Figure) -> float:
    """Height of a figure's bars, in lines; a heading takes a line and a gap above it."""
    return len(figure.bars) + 1.4 * sum(bool(heading) for heading, _ in figure.groups)


def _inches(figure: Figure) -> float:
    num_rows = -(-len(figure.key) // _KEY_COLUMNS) + bool(figure.caption)
    return _TITLE_INCHES + _LINE_INCHES * _num_lines(figure) + _KEY_INCHES * num_rows + 0.35


def _draw_figure(canvas: "Canvas", figure: Figure, left: float, top: float, width: float) -> None:
    """Draw a figure with its upper left corner at (left, top), in inches from the lower left of the canvas."""
    whole_width, whole_height = canvas.get_size_inches()
    names = 0.15 + 0.078 * max(len(bar.name) for bar in figure.bars)
    values = 0.15 + 0.075 * max(len(bar.value) for bar in figure.bars)

    def write(x: float, y: float, text: str, **style: Any) -> None:
        canvas.text(x / whole_width, y / whole_height, text, va="center", **style)

    write(left, top - 0.2, figure.title, color=INK, fontsize=12, fontweight="bold")
    inches, bars_inches = _LINE_INCHES * _num_lines(figure), width - names - values
    bottom = top - _TITLE_INCHES - inches
    place = (
        (left + names) / whole_width,
        bottom / whole_height,
        bars_inches / whole_width,
        inches / whole_height,
    )
    axes = canvas.add_axes(place)
    axes.set_axis_off()
    axes.set_ylim(_num_lines(figure) - 0.5, -0.5)
    axes.set_xlim(0, figure.longest)
    line = 0.0
    for heading, bars in figure.groups:
        if heading:
            line += 0.4
            _label(axes, heading, 0, line, -names * 72, ha="left", fontweight="bold")
            line += 1
        for bar in bars:
            _label(axes, bar.name, 0, line, -5, ha="right")
            begin = 0.0
            for block in bar.blocks:
                axes.barh(line, block.amount, left=begin, height=0.68, color=block.colour)
                if block.amount / figure.longest * bars_inches > 0.085 * (len(block.text) + 1):
                    colour = PAPER if block.colour in DARK else INK
                    axes.text(
                        begin + block.amount / 2,
                        line,
                        block.text,
                        va="center",
                        ha="center",
                        fontsize=8,
                        color=colour,
                    )
                begin += block.amount
            _label(axes, bar.value, begin, line, 5, ha="left")
            line += 1
    y = bottom - 0.2
    for number, (name, colour) in enumerate(figure.key.items()):
        x = left + 0.1 + number % _KEY_COLUMNS * (width - 0.1) / _KEY_COLUMNS
        y = bottom - 0.2 - number // _KEY_COLUMNS * _KEY_INCHES
        write(x, y, "■", color=colour, fontsize=10)
        write(x + 0.16, y, name, color=FAINT, fontsize=8.5)
    write(left + 0.1, y - (_KEY_INCHES if figure.key else 0), figure.caption, color=FAINT, fontsize=8.5)


def _label(axes: "Axes", text: str, x: float, line: float, points: float, **style: Any) -> None:
    """Write beside a point of the axes, so many points to the right of it."""
    axes.annotate(
        text,
        (x, line),
        xytext=(points, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=9,
        **style,
    )


def _canvas(width: float, height: float) -> "Canvas":
    """An empty picture, its size in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise BenchError("the chart needs matplotlib: pip install matplotlib") from error
    canvas = Canvas(figsize=(width, height), dpi=150, facecolor=PAPER)
    FigureCanvasAgg(canvas)
    return canvas


def _sign(canvas: "Canvas", machine: Machine, remark: str) -> None:
    """Write at the foot what it was measured on."""
    canvas.text(
        0.02, 0.2 / canvas.get_size_inches()[1],
        f"{machine.cpu}, {machine.cores} cores · Kestrel {machine.kestrel}, onnxruntime {machine.onnxruntime} · "
        f"{remark}",
        color=FAINT, fontsize=8.5, va="center",
    )  # fmt: skip


def _save(canvas: "Canvas", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Software": None})


def _cell_title(cell: CellReport) -> str:
    same = (
        "same text as without the store"
        if cell.identical_text
        else "TEXT DIFFERS from the run without the store"
    )
    return (
        f"{cell.model}, {cell.weights} weights, {cell.kv} KV · {cell.restored.cached_tokens:,} of "
        f"{cell.restored.prompt_tokens:,} prompt tokens restored · {same}"
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
