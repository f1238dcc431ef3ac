"""The report as one HTML file that needs nothing else: no network, no script, no font, no picture beside it."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.bench.report import CALIBER_NAMES, CALIBERS, Report, duration, gibibytes, megabytes, ratio

RUNS = {"cold": "cold start", "control": "no store", "restored": "restored"}
COLOURS = {"cold": "#8fa3b5", "control": "#b9c5d0", "restored": "#e4572e"}
PARTS = {
    "compute": ("computing the prompt", "#34627a"),
    "rest": ("lookup, waiting for the disk, first token", "#e9b44c"),
}
BYTES = {
    "cold": ("written by S1", "#8fa3b5"),
    "read": ("read by S2", "#e4572e"),
    "tail": ("written by S2", "#f2a488"),
}
WIDTH, LABEL, ROW = 760, 190, 24  # of a chart, of its row names, of one row; pixels

STYLE = """
body{margin:0 auto;max-width:60rem;padding:2rem 1rem 4rem;color:#1b2733;background:#fff;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;margin:0 0 .2rem}h2{font-size:1.25rem;margin:2.5rem 0 .2rem}h3{font-size:1rem;margin:1.6rem 0 .3rem}
p.machine,figcaption,.key{color:#6b7885;font-size:.88rem}figure{margin:.4rem 0 0}
.figures{display:flex;gap:2.5rem;flex-wrap:wrap;margin:1rem 0}
.figures b{display:block;font-size:2.4rem;line-height:1.1;color:#e4572e}
svg{width:100%;height:auto;display:block}svg text{font:13px system-ui,sans-serif;fill:#1b2733}
svg .value{fill:#6b7885}.key i{display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 1em;border-radius:2px}
.bad{background:#fdecea;border-left:4px solid #c62828;padding:.5rem .8rem}
"""


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
        f"{machine['cpu']}, {machine['cores']} cores, {gibibytes(machine['memory_bytes'])}, {machine['os']}; disk "
        f"reads {machine['disk_read_mb_s']:,.0f} MB/s, writes {machine['disk_write_mb_s']:,.0f} MB/s; Kestrel "
        f"{machine['kestrel']}, onnxruntime {machine['onnxruntime']}, numba {machine['numba']}"
    )
    parts = [f"<h2>{html.escape(title)}</h2>", f'<p class="machine">{html.escape(facts)}</p>']
    for cell in cells:
        if not cell["identical_text"] or not cell["restored"]["cached_tokens"]:
            problem = (
                f"{_name(cell)}: nothing was restored, or the restored answer differs from the control's."
            )
            parts.append(f'<p class="bad">{html.escape(problem)}</p>')
    parts.append(_figures(max(cells, key=lambda cell: int(cell["context_tokens"]))))
    parts.append(_figure("Speed-up, cold / restored, by caliber", _speedups(cells), {}))
    parts.append(
        _figure(
            "Time to first token",
            _stacked(
                [
                    (
                        f"{_name(cell)} {RUNS[run]}",
                        [
                            (colour, time)
                            for (_, colour), time in zip(PARTS.values(), _split(cell[run]), strict=True)
                        ],
                        duration(cell[run]["ttft_ms"]),
                    )
                    for cell in cells
                    for run in RUNS
                ]
            ),
            dict(PARTS.values()),
            "Reading overlaps with computing: "
            + "; ".join(
                f"{_name(cell)} read {megabytes(cell['restored']['bytes_read'])} in "
                f"{duration(cell['restored']['restore_ms'])}"
                for cell in cells
            ),
        )
    )
    parts.append(
        _figure(
            "Bytes a turn",
            _stacked(
                [
                    (f"{_name(cell)} {title}", [(colour, value)], megabytes(value))
                    for cell in cells
                    for (title, colour), value in zip(BYTES.values(), _turn_bytes(cell), strict=True)
                ]
            ),
            {},
            "A turn writes the pages of its new tokens only.",
        )
    )
    return "\n".join(parts)


def _figures(cell: Mapping[str, Any]) -> str:
    """The three ratios of one cell, large."""
    figures = "".join(
        f"<div><b>{ratio(cell['speedup'][caliber])}</b>{CALIBER_NAMES[caliber]}</div>" for caliber in CALIBERS
    )
    return f"<h3>{html.escape(_name(cell))}: cold / restored</h3><div class='figures'>{figures}</div>"


def _speedups(cells: Sequence[Mapping[str, Any]]) -> str:
    shades = dict(zip(CALIBERS, ("#7a2c17", "#b3431f", "#e4572e"), strict=True))
    return _stacked(
        [
            (
                f"{_name(cell)} {CALIBER_NAMES[caliber]}",
                [(shades[caliber], cell["speedup"][caliber] or 0.0)],
                ratio(cell["speedup"][caliber]),
            )
            for cell in cells
            for caliber in CALIBERS
        ]
    )


def _split(run: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds until the first token that went into computing, and all others."""
    compute = min(float(run["prefill_ms"]), float(run["ttft_ms"]))
    return compute, float(run["ttft_ms"]) - compute


def _turn_bytes(cell: Mapping[str, Any]) -> tuple[int, int, int]:
    return cell["cold"]["bytes_written"], cell["restored"]["bytes_read"], cell["restored"]["bytes_written"]


def _name(cell: Mapping[str, Any]) -> str:
    kv = "" if cell["kv"] == "float32" else f", {cell['kv']} KV"
    return f"{cell['model']} {cell['context_tokens']:,}{kv}"


def _stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]]) -> str:
    """An SVG of horizontal bars: (name, parts as (colour, amount), value as text); all rows have one scale."""
    label = max(LABEL, 8 * max(len(name) for name, _, _ in rows))
    longest = max(sum(amount for _, amount in parts) for _, parts, _ in rows) or 1.0
    scale = (WIDTH - label - 90) / longest
    shapes = []
    for place, (name, parts, value) in enumerate(rows):
        y, x = place * ROW, float(label)
        shapes.append(f'<text x="{label - 8}" y="{y + 16}" text-anchor="end">{html.escape(name)}</text>')
        for colour, amount in parts:
            width = amount * scale
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{max(width, 0.5):.1f}" height="16" fill="{colour}"/>'
            )
            x += width
        shapes.append(f'<text class="value" x="{x + 6:.1f}" y="{y + 16}">{html.escape(value)}</text>')
    height = len(rows) * ROW
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(shapes)}</svg>'


def _figure(title: str, chart: str, key: Mapping[str, str], caption: str = "") -> str:
    keys = "".join(f'<i style="background:{colour}"></i>{html.escape(name)}' for name, colour in key.items())
    return (
        f"<h3>{html.escape(title)}</h3><figure>{chart}"
        + (f'<div class="key">{keys}</div>' if keys else "")
        + (f"<figcaption>{html.escape(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )
