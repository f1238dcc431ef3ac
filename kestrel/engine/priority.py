"""The place of background threads among those that compute."""

import os
import threading

FOR_LATER = 19  # nobody waits for it: done when a core is free
BEHIND_ANSWERS = 10  # must keep up with prompts, but an answer comes first


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread alone, to `niceness` as `nice` counts.

    Only Linux has priorities of threads; elsewhere nothing happens.
    """
    if hasattr(os, "sched_getaffinity"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
