"""The report as one HTML file that needs nothing else: no network, no script, no font, no picture beside it."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kestrel.bench.figures import DARK, Bar, Figure, cell_names, figures
from kestrel.bench.records import BenchError, Machine, Parts
from kestrel.bench.report import CALIBER_NAMES, CALIBERS, Report, gibibytes, ratio

WIDTH, LINE, BAR, GAP = 760, 24, 16, 8  # of a chart, of a line, of a bar, between groups; pixels
LETTER = 7.2  # of a text, generously

STYLE = """
body{margin:0 auto;max-width:60rem;padding:2rem 1rem 4rem;color:#1b2733;background:#fff;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;margin:0 0 .2rem}h2{font-size:1.25rem;margin:2.5rem 0 .2rem}h3{font-size:1rem;margin:1.6rem 0 .3rem}
p.machine,figcaption,.key{color:#6b7885;font-size:.88rem}figure{margin:.4rem 0 0}
.figures{display:flex;gap:2.5rem;flex-wrap:wrap;margin:1rem 0}
.figures b{display:block;font-size:2.4rem;line-height:1.1;color:#e4572e}
svg{width:100%;height:auto;display:block}svg text{font:13px system-ui,sans-serif;fill:#1b2733}
svg .value{fill:#6b7885}
svg .group{font-weight:600}svg .on{fill:#fff}svg .in{font-size:11px}
.key{display:flex;flex-wrap:wrap;gap:0 1.2rem}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
.bad{background:#fdecea;border-left:4px solid #c62828;padding:.5rem .8rem}
"""


def load_board(path: Path) -> dict[str, Any]:
    """The report.json of another board. Raises BenchError when this Kestrel would not write one like it."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        machine, cells = data["machine"], data["contexts"]
        fits = {field.name for field in fields(Machine)} <= set(machine) and all(
            set(cell[run]["parts"]) == {field.name for field in fields(Parts)}
            for cell in cells
            for run in ("cold", "control", "restored")
        )
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise BenchError(
            f"{path}: expected the report.json of a board with this version of Kestrel; measure there again "
            "(dvc repro), or take the file away"
        )
    return data


def render_page(report: Report, others: Sequence[Mapping[str, Any]]) -> str:
    """The page of a report. `others`: report.json of other boards, each shown in a section of its own."""
    sections = [_board(report.as_json(), "This board")]
    sections += [_board(other, f"Another board: {other['machine']['cpu']}") for other in others]
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Kestrel: restart experiment</title>'
        f"<style>{STYLE}</style>\n<h1>After a restart, only the new part of the prompt is computed</h1>\n"
        "<p>Three runs of a conversation: <b>cold</b> computes its first prompt in a new process with an empty store "
        "and is killed; <b>restored</b> is a second process that goes on from the store; <b>no store</b> is the same "
        "prompt without it. Numbers of one board are never mixed with those of another.</p>\n"
        + "\n".join(sections)
        + "</html>\n"
    )


def _board(data: Mapping[str, Any], title: str) -> str:
    machine, cells = data["machine"], data["contexts"]
    facts = (
        f"{machine['cpu']}, {machine['cores']} cores ({machine['instructions']}), "
        f"{gibibytes(machine['memory_bytes'])}, {machine['os']}; disk reads {machine['disk_read_mb_s']:,.0f} MB/s, "
        f"writes {machine['disk_write_mb_s']:,.0f} MB/s; Kestrel {machine['kestrel']}, onnxruntime "
        f"{machine['onnxruntime']}, numba {machine['numba']}"
    )
    parts = [f"<h2>{html.escape(title)}</h2>", f'<p class="machine">{html.escape(facts)}</p>']
    for cell, name in zip(cells, cell_names(cells), strict=True):
        if not cell["identical_text"] or not cell["restored"]["cached_tokens"]:
            problem = f"{name}: nothing was restored, or the restored answer differs from the control's."
            parts.append(f'<p class="bad">{html.escape(problem)}</p>')
    names = cell_names(cells)
    largest = max(range(len(cells)), key=lambda place: int(cells[place]["context_tokens"]))
    parts.append(_ratios(cells[largest], names[largest]))
    parts += [_figure(figure) for figure in figures(data)]
    return "\n".join(parts)


def _ratios(cell: Mapping[str, Any], name: str) -> str:
    """The three ratios of one cell, large."""
    large = "".join(
        f"<div><b>{ratio(cell['speedup'][caliber])}</b>{CALIBER_NAMES[caliber]}</div>" for caliber in CALIBERS
    )
    title = html.escape(f"{cell['model']}, {name}: cold / restored")
    return f"<h3>{title}</h3><div class='figures'>{large}</div>"


def _figure(figure: Figure) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in figure.key.items()
    )
    return (
        f"<h3>{html.escape(figure.title)}</h3><figure>{_svg(figure)}"
        + (f'<div class="key">{keys}</div>' if keys else "")
        + (f"<figcaption>{html.escape(figure.caption)}</figcaption>" if figure.caption else "")
        + "</figure>"
    )


def _svg(figure: Figure) -> str:
    """The bars of a figure; names left of them, values behind them, a heading above each group."""
    left = LETTER * max(len(bar.name) for bar in figure.bars) + 12
    right = LETTER * max(len(bar.value) for bar in figure.bars) + 12
    scale = (WIDTH - left - right) / figure.longest
    shapes: list[str] = []
    y = 0
    for heading, bars in figure.groups:
        if heading:
            y += GAP if shapes else 0
            shapes.append(f'<text class="group" x="0" y="{y + 16}">{html.escape(heading)}</text>')
            y += LINE
        for bar in bars:
            shapes += _bar(bar, left, y, scale)
            y += LINE
    return f'<svg viewBox="0 0 {WIDTH} {y}" role="img">{"".join(shapes)}</svg>'


def _bar(bar: Bar, left: float, y: int, scale: float) -> list[str]:
    name = f'<text x="{left - 8:.1f}" y="{y + 16}" text-anchor="end">{html.escape(bar.name)}</text>'
    shapes, x = [name], left
    for block in bar.blocks:
        width = block.amount * scale
        shapes.append(
            f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{BAR}" fill="{block.colour}"/>'
        )
        if width > LETTER * len(block.text) + 4:
            kind = "in on" if block.colour in DARK else "in"
            middle = x + width / 2
            shapes.append(
                f'<text class="{kind}" x="{middle:.1f}" y="{y + 16}" text-anchor="middle">{block.text}</text>'
            )
        x += width
    shapes.append(f'<text class="value" x="{x + 6:.1f}" y="{y + 16}">{html.escape(bar.value)}</text>')
    return shapes
