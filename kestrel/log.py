"""Where log lines go."""

import sys
from collections.abc import Callable
from contextlib import suppress

Log = Callable[[str], None]


def log_to_stderr(line: str) -> None:
    """Print one log line to stderr at once; a line that nobody takes (a full disk, a closed pipe) is lost."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
