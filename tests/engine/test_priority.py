"""Background threads give way, and go on where they may not."""

import os
import threading

import pytest

from kestrel.engine.priority import give_way


def niceness_after(before: int, wanted: int) -> int:
    """Of a thread of its own, so that nobody else's changes."""
    found = []

    def run() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, before)
        give_way(wanted)
        found.append(os.getpriority(os.PRIO_PROCESS, thread))

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    return found[0]


def test_priority_is_lowered_never_raised() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_after(own, 12) == max(own, 12)
    assert niceness_after(15, 10) == max(own, 15)  # raising it is for the privileged alone


def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    give_way(19)
