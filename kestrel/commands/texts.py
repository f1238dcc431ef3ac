"""What people read: numbers, tables and log lines."""

import json
from collections.abc import Sequence


def size(num_bytes: int) -> str:
    """`0 B`, `234.1 MB`: powers of 1000, as disks are sold."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int, what: str) -> str:
    """`1 page`, `3 pages`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def milliseconds(value: float) -> str:
    """`41 ms`, `1.96 s`."""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def age(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`, `2 days`: the largest unit that fits, rounded down."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length if unit == "days" else seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def ignore_line(text: str) -> None:
    """Take a line about the work and show it to nobody."""


def print_json(data: object) -> None:
    """Write plain data to stdout as indented JSON."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows under their heads, indented by two; columns of numbers to the right, the last one as it comes."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
