"""The picture of a measure: one panel below the other."""

from pathlib import Path
from typing import TYPE_CHECKING

from kestrel.bench.chart import FAINT, INK, PAPER, RULE
from kestrel.bench.measures.result import Bars, Lines, Panel, Result, Spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#e4572e", "#8fa3b5", "#2a9d8f", "#e9b44c", "#6a4c93", "#b9c5d0")
_WIDTH_INCHES = 11.0
_HEAD_INCHES = 0.9
_FOOT_INCHES = 0.5
_BAR_INCHES = 0.22
_LINES_INCHES = 4.0
_LANE_INCHES = 0.45
_ROOM_INCHES = 0.95  # around a panel, for its title and its axis


def draw(result: Result, path: Path) -> None:
    """Draw all panels of a result into a PNG file; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_panel_inches(panel) for panel in result.panels]
    height = _HEAD_INCHES + sum(heights) + _ROOM_INCHES * len(heights) + _FOOT_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=130, facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.32 / height, result.title, color=INK, fontsize=15, fontweight="bold", va="center")
    top = height - _HEAD_INCHES
    for panel, inches in zip(result.panels, heights, strict=True):
        axes = figure.add_axes((0.22, (top - inches) / height, 0.74, inches / height))
        _draw_panel(axes, panel)
        top -= inches + _ROOM_INCHES
    facts = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    if result.machine is not None and result.busy is not None:
        facts = f"{result.machine.cpu}, {max(result.busy):.0%} busy · {facts}"
    figure.text(0.02, 0.2 / height, facts, color=FAINT, fontsize=8, va="center")
    figure.savefig(path, metadata={"Software": None})


def _panel_inches(panel: Panel) -> float:
    match panel:
        case Bars():
            return max(0.8, _BAR_INCHES * len(panel.labels) * (len(panel.series) + 0.7))
        case Lines():
            return _LINES_INCHES
        case Spans():
            return max(0.8, _LANE_INCHES * len(panel.lanes))


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", color=INK, fontsize=10.5, pad=6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=INK, labelsize=8.5)
    match panel:
        case Bars():
            _draw_bars(axes, panel)
        case Lines():
            _draw_lines(axes, panel)
        case Spans():
            _draw_spans(axes, panel)


def _draw_bars(axes: "Axes", panel: Bars) -> None:
    number = len(panel.series)
    most = max(
        (value for values in panel.series.values() for value in values if value is not None), default=1
    )
    for index, (name, values) in enumerate(panel.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [row + (index - (number - 1) / 2) * 0.8 / number for row in range(len(values))]
        axes.barh(places, [value or 0.0 for value in values], height=0.72 / number, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            if value is not None:
                axes.text(value + most * 0.01, place, f"{value:,.3g}", va="center", fontsize=7.5, color=INK)
    axes.set_yticks(range(len(panel.labels)), list(panel.labels))
    axes.invert_yaxis()
    axes.set_xlabel(panel.unit, fontsize=8.5, color=FAINT)
    axes.set_xlim(0, most * 1.12)
    if number > 1:
        _draw_legend(axes, number)


def _draw_legend(axes: "Axes", number: int) -> None:
    """Name the series in one line above the panel, at the right."""
    axes.legend(
        fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=number, borderaxespad=0.2,
        columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip


def _draw_lines(axes: "Axes", panel: Lines) -> None:
    for index, (name, points) in enumerate(panel.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, color=RULE, linewidth=0.6)
    axes.set_xlabel(panel.x_label, fontsize=8.5, color=FAINT)
    axes.set_ylabel(panel.y_label, fontsize=8.5, color=FAINT)
    _draw_legend(axes, len(panel.series))


def _draw_spans(axes: "Axes", panel: Spans) -> None:
    for index, spans in enumerate(panel.lanes.values()):
        widths = [(begin, end - begin) for begin, end in spans]
        axes.broken_barh(
            widths,
            (index - 0.35, 0.7),
            facecolors=COLOURS[index % len(COLOURS)],
            edgecolors=PAPER,
            linewidth=0.4,
        )
    axes.set_yticks(range(len(panel.lanes)), list(panel.lanes))
    axes.set_ylim(len(panel.lanes) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the request", fontsize=8.5, color=FAINT)
