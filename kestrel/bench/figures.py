"""The figures of a report as plain data: what is compared, in which colours. page.py and chart.py draw them.

A report comes as report.json holds it, so that one of another board, read from a file, is drawn in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.bench.report import (
    CALIBER_NAMES,
    CALIBERS,
    COLD_PIECES,
    TTFT_PIECES,
    Piece,
    duration,
    megabytes,
    pieces_ms,
    ratio,
)

RUNS = {"cold": "cold start", "control": "no store", "restored": "restored"}
COLOURS = {
    "find": "#6a4c93",
    "wait": "#e9b44c",
    "tail": "#34627a",
    "matmul": "#34627a",
    "attention": "#2a9d8f",
    "head": "#8ab17d",
    "first_token": "#8ab17d",
    "rest": "#b9c5d0",
}
DARK = frozenset({"#6a4c93", "#34627a", "#2a9d8f", "#7a2c17", "#b3431f", "#e4572e"})  # text on them is white
CALIBER_COLOURS = dict(zip(CALIBERS, ("#7a2c17", "#b3431f", "#e4572e"), strict=True))
BYTES = {
    ("cold", "bytes_written"): ("written by S1", "#8fa3b5"),
    ("restored", "bytes_read"): ("read by S2", "#e4572e"),
    ("restored", "bytes_written"): ("written by S2", "#f2a488"),
}


@dataclass(frozen=True)
class Block:
    """A piece of a bar; `text` stands in it where it fits."""

    colour: str
    amount: float
    text: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its blocks from left to right, and what its whole length says."""

    name: str
    blocks: tuple[Block, ...]
    value: str


@dataclass(frozen=True)
class Figure:
    """Bars on one scale, in groups with a heading each ("" for none). key: the name of every colour."""

    title: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    key: Mapping[str, str]
    caption: str = ""

    @property
    def bars(self) -> list[Bar]:
        """All bars, from top to bottom."""
        return [bar for _, bars in self.groups for bar in bars]

    @property
    def longest(self) -> float:
        """The length of the longest bar."""
        return max(sum(block.amount for block in bar.blocks) for bar in self.bars) or 1.0


def figures(data: Mapping[str, Any]) -> list[Figure]:
    """What there is to look at in a report, most important first."""
    cells = data["contexts"]
    names = cell_names(cells)
    return [
        _speedups(cells, names),
        _first_tokens(cells, names),
        _restored(cells, names),
        _cold(cells, names),
        _bytes(cells, names),
    ]


def cell_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the cells of a report apart: the length, and the model and the type of KV where they differ."""
    models = {cell["model"] for cell in cells}
    kinds = {cell["kv"] for cell in cells}
    return [
        (f"{cell['model']}, " if len(models) > 1 else "")
        + f"{cell['context_tokens']:,} tokens"
        + (f", {cell['kv']} KV" if len(kinds) > 1 else "")
        for cell in cells
    ]


def _compared(
    things: Sequence[tuple[str, Sequence[Bar]]], names: Sequence[str]
) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    """A group for each thing with a bar for each cell; of a single cell, a bar for each thing."""
    if len(names) == 1:
        return (("", tuple(replace(bar, name=thing) for thing, (bar,) in things)),)
    return tuple((thing, tuple(bars)) for thing, bars in things)


def _speedups(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    things = []
    for caliber in CALIBERS:
        ratios = [cell["speedup"][caliber] for cell in cells]
        bars = [
            Bar(name, (Block(CALIBER_COLOURS[caliber], value or 0.0),), ratio(value))
            for value, name in zip(ratios, names, strict=True)
        ]
        things.append((CALIBER_NAMES[caliber], bars))
    return Figure("Speed-up by caliber: cold / restored", _compared(things, names), {})


def _first_tokens(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    groups = tuple(
        (
            name if len(cells) > 1 else "",
            tuple(
                Bar(title, _blocks(cell[run], TTFT_PIECES), duration(cell[run]["ttft_ms"]))
                for run, title in RUNS.items()
            ),
        )
        for cell, name in zip(cells, names, strict=True)
    )
    caption = "First token: its scores and the way to the client. The rest: queue, embedding, bookkeeping."
    return Figure("Time to first token", groups, _key(TTFT_PIECES), caption)


def _restored(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    bars = tuple(
        Bar(name, _blocks(cell["restored"], TTFT_PIECES, duration), duration(cell["restored"]["ttft_ms"]))
        for cell, name in zip(cells, names, strict=True)
    )
    caption = "Colours as above. Reading goes on while the tail is computed; only waiting for it takes time."
    return Figure("The restored run, closer", (("", bars),), {}, caption)


def _cold(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    bars = []
    for cell, name in zip(cells, names, strict=True):
        total = cell["cold"]["ttft_ms"] or 1.0
        blocks = tuple(
            Block(block.colour, 100 * block.amount / total, f"{block.amount / total:.0%}")
            for block in _blocks(cell["cold"], COLD_PIECES)
        )
        bars.append(Bar(name, blocks, duration(cell["cold"]["ttft_ms"])))
    caption = "Shares of the time at the end of a bar. The rest: queue, embedding, bookkeeping, client."
    title = "Where the time of a cold run goes, up to its first token"
    return Figure(title, (("", tuple(bars)),), _key(COLD_PIECES), caption)


def _bytes(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    things = []
    for (run, field), (title, colour) in BYTES.items():
        bars = []
        for cell, name in zip(cells, names, strict=True):
            value = megabytes(cell[run][field])
            if field == "bytes_read":
                value += f" in {duration(cell[run]['restore_ms'])}"
            bars.append(Bar(name, (Block(colour, cell[run][field]),), value))
        things.append((title, bars))
    caption = "A turn writes the pages of its new tokens only."
    return Figure("Bytes a turn", _compared(things, names), {}, caption)


def _blocks(
    run: Mapping[str, Any], pieces: Sequence[Piece], words: Callable[[float], str] = lambda _: ""
) -> tuple[Block, ...]:
    amounts = pieces_ms(run["parts"], pieces)
    return tuple(
        Block(COLOURS[piece.key], amount, words(amount))
        for piece, amount in zip(pieces, amounts, strict=True)
    )


def _key(pieces: Sequence[Piece]) -> dict[str, str]:
    return {piece.name: COLOURS[piece.key] for piece in pieces}
