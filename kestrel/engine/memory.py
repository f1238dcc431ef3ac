"""Requests to the kernel and to the C library about memory, all without effect on any content.

They need Linux and glibc; where those know them not, nothing happens and nothing is lost but speed.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kestrel.engine.priority import Activity
from kestrel.residency import advise, c_function, share_present

_POPULATE_WRITE = 23  # Linux 5.14: touch for writing
_COLLAPSE = 25  # Linux 6.1: put what is there into huge pages
_SMALL_PAGES = 15  # never make huge ones of it
_HUGE_PAGE = 2 << 20
# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_LARGEST_IN_HEAP = 32 << 20  # as far as glibc raises its threshold by itself
_MAPPINGS = 65536  # glibc's own limit
_RESTS = 1  # times as long as a piece took
_PATIENCE_SECONDS = 10.0  # that requests may keep weights from being moved
_PIECE = 1 << 20  # committed at once


def commit(start: int, nbytes: int) -> bool:
    """Back the pages of [start, start + nbytes) with memory, in pieces; False where the kernel cannot.

    Nobody changes the mappings of the process while a piece is committed, and then nobody's page faults go on either.
    """
    end = start + nbytes
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return all(advise(at, min(_PIECE, end - at), _POPULATE_WRITE) for at in range(first, end, _PIECE))


def _mallopt(option: int, value: int) -> bool:
    """Set an option of glibc's malloc; False where there is another C library."""
    mallopt = c_function("mallopt", ctypes.c_int, ctypes.c_int)
    return mallopt is not None and bool(mallopt(option, value))


# All threads allocate from one heap; those that have allocated before keep another, so this is done on import.
_mallopt(_ARENA_MAX, 1)


@contextmanager
def heap_in_huge_pages(activity: Activity) -> Iterator[None]:
    """Let what is allocated meanwhile lie together in the heap, and what there is by then soon in huge pages.

    activity: of those who compute with it; moving it there waits for them.

    A decode step reads every weight once: with pages of 4 KiB each 64 of those reads begin with a walk of the page
    tables, and in a virtual machine with two. SmolLM2-135M, int8: matrix products of a decode step 7.7 -> 5.7 ms.
    A thread moves it there: in a virtual machine whose host has taken unused memory back, huge pages from the start
    cost 2.2 s for 900 MB instead of 0.3 s for small ones. In mappings of its own, as glibc gives large pieces, memory
    has holes where no huge page fits: products 8.4 -> 10.6 ms.
    """
    # From the first call of mallopt on glibc fits no limit to what is freed any more: these are what it comes to.
    _mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    _mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)
    _mallopt(_MMAP_MAX, 0)  # however large, into the heap
    try:
        yield
    finally:
        _mallopt(_MMAP_MAX, _MAPPINGS)
        if (trim := c_function("malloc_trim", ctypes.c_size_t)) is not None:
            trim(0)  # what was in use for a while, between what stays
        threading.Thread(target=_collapse, args=(activity,), name="kestrel-huge-pages", daemon=True).start()


def forbid_huge_pages(start: int, nbytes: int) -> None:
    """Leave [start, start + nbytes) in small pages, so that no memory is in use but what was touched."""
    advise(start, nbytes, _SMALL_PAGES)


def _collapse(activity: Activity) -> None:
    """Put this process's anonymous memory into huge pages, piece by piece, with a rest after each.

    While a piece is moved all page faults of the process wait. So the thread is no less urgent than others: one that
    loses its core in the middle of a piece keeps a first request waiting until the cores are idle again. It leaves
    requests alone instead, unless they never end; and it ends with the engine, as another one may compute by then.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for start, end in _anonymous_areas():
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        for at in range(first, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            while activity.is_busy and time.monotonic() < deadline:
                time.sleep(0.02)
            if activity.is_over:
                return
            began = time.perf_counter()
            if (share_present(at, _HUGE_PAGE) or 0) > 0.5:  # an unused one must not take memory
                advise(at, _HUGE_PAGE, _COLLAPSE)
            time.sleep(_RESTS * (time.perf_counter() - began))


def _anonymous_areas() -> list[tuple[int, int]]:
    """Where this process's writable memory without a file lies, [start, end) each; none where nobody says."""
    areas = []
    with suppress(OSError), open("/proc/self/maps", encoding="ascii") as lines:
        for line in lines:
            place, permissions, _, _, inode, *name = line.split()
            if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, end = (int(number, 16) for number in place.split("-"))
                areas.append((start, end))
    return areas
