"""Background threads give way, and go on where they may not."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kestrel.engine.priority import give_way, waited_for_a_core


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


def test_a_thread_that_has_to_share_its_core_knows_how_long_it_waited() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count it")
    core = {min(os.sched_getaffinity(0))}
    waited: list[float] = []

    def work() -> None:
        os.sched_setaffinity(0, core)  # of this thread alone
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        waited.append(waited_for_a_core())

    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(rival.pid, core)
        time.sleep(0.1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        rival.kill()
        rival.wait()
    assert waited[0] > 0.03  # half of the core was the rival's
