"""The place of background threads among those that compute."""

import os
import threading
import time
from contextlib import suppress

FOR_LATER = 19  # nobody waits for it: done when a core is free
BEHIND_ANSWERS = 10  # must keep up with prompts, but an answer comes first
_STEPS_APART_SECONDS = 0.1  # at most, while somebody waits for an answer


class Activity:
    """Whether an engine computes, for threads that leave it alone: a context manager around each of its steps."""

    def __init__(self) -> None:
        self._is_stepping = False
        self._ended = 0.0  # time.monotonic() of the last step's end
        self.is_over = False  # the engine is closed

    def __enter__(self) -> None:
        self._is_stepping = True

    def __exit__(self, *_: object) -> None:
        self._is_stepping, self._ended = False, time.monotonic()

    def expect(self) -> None:
        """A step is about to come."""
        self._ended = time.monotonic()

    def end(self) -> None:
        """No step will come any more."""
        self.is_over = True

    @property
    def is_busy(self) -> bool:
        """Whether a step runs, or another one is likely to follow the last."""
        return self._is_stepping or time.monotonic() - self._ended < _STEPS_APART_SECONDS


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread alone, to `niceness` as `nice` counts; one that is lower stays.

    Only Linux has priorities of threads; elsewhere, and where they may not be changed, nothing happens.
    """
    if hasattr(os, "sched_getaffinity"):
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


def waited_for_a_core() -> float:
    """Seconds that the calling thread has been ready to run since it began, but had no core; 0 where nobody says."""
    with suppress(OSError, ValueError), open("/proc/thread-self/schedstat", encoding="ascii") as file:
        _, nanoseconds, _ = file.read().split()
        return int(nanoseconds) * 1e-9
    return 0.0
