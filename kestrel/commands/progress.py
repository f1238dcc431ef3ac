"""Telling people that long work goes on: on stderr, a moving bar on a terminal, plain lines elsewhere."""

import sys
import threading
import time

PATIENCE_SECONDS = 2.0  # work that ends sooner shows nothing
LINE_SECONDS = 10.0  # between two plain lines
BAR_SECONDS = 0.2  # between two movements of the bar


class Working:
    """Says what is going on while a `with` block runs, once it takes longer than two seconds.

    A thread of its own shows it, so the block may be busy in C code. Lines that others write to stderr meanwhile
    appear above the bar.
    """

    def __init__(self, label: str) -> None:
        self._state: tuple[str, int, int] = (label, 0, 0)  # replaced as a whole, so the thread sees one state
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, name="kestrel-progress", daemon=True)
        self._thread.start()

    def report(self, done: int, total: int, label: str | None = None) -> None:
        """Note how far the work is, in any unit; `total` 0 means unknown. A label replaces the former one."""
        self._state = (label or self._state[0], done, total)

    def stop(self) -> None:
        """Take the bar away before something else is printed. Calling it again does nothing."""
        self._stopped.set()
        self._thread.join()

    def _show(self) -> None:
        if not self._stopped.wait(PATIENCE_SECONDS):
            (self._show_bar if sys.stderr.isatty() else self._show_lines)()

    def _show_lines(self) -> None:
        started = time.monotonic() - PATIENCE_SECONDS
        while True:
            label, done, total = self._state
            share = f" {100 * done // total}%" if total else ""
            print(f"{label}{share} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
            if self._stopped.wait(LINE_SECONDS):
                return

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
            task = progress.add_task(self._state[0], total=None)
            while not self._stopped.wait(BAR_SECONDS):
                label, done, total = self._state
                progress.update(task, description=label, completed=done, total=total or None)

    def __enter__(self) -> "Working":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
