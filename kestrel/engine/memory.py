"""Requests to the kernel and to the C library about memory, all without effect on any content.

They need Linux and glibc; where those know them not, nothing happens and nothing is lost but speed.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

_POPULATE_WRITE = 23  # Linux 5.14: touch for writing
_HUGE_PAGE = 2 << 20
# Of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_LARGEST_IN_HEAP = 32 << 20  # as far as glibc raises its threshold by itself
_MAPPINGS = 65536  # glibc's own limit
_PAD = 128 << 10  # glibc's own


def commit(start: int, nbytes: int) -> bool:
    """Back the pages of [start, start + nbytes) with memory; False where the kernel cannot."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return _advise(first, start + nbytes - first, _POPULATE_WRITE)


@contextmanager
def heap_in_huge_pages(nbytes: int) -> Iterator[None]:
    """Let what is allocated meanwhile, up to about `nbytes`, lie in huge pages, in the heap the process grows by.

    A decode step reads every weight once: with pages of 4 KiB each 64 of those reads begin with a walk of the page
    tables, and in a virtual machine with two. SmolLM2-135M, int8: matrix products of a decode step 7.7 -> 5.7 ms.
    Only what is used of it takes memory.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt, malloc, free, sbrk = libc.mallopt, libc.malloc, libc.free, libc.sbrk
    except AttributeError:  # another C library
        yield
        return
    sbrk.restype = malloc.restype = ctypes.c_void_p
    sbrk.argtypes, malloc.argtypes, free.argtypes = (
        (ctypes.c_ssize_t,),
        (ctypes.c_size_t,),
        (ctypes.c_void_p,),
    )
    before = sbrk(0)
    mallopt(_MMAP_MAX, 0)  # however large, into the heap
    mallopt(_TOP_PAD, nbytes)  # and the heap grows by so much at once
    free(malloc(_LARGEST_IN_HEAP))
    first, end = -(-before // _HUGE_PAGE) * _HUGE_PAGE, sbrk(0) // _HUGE_PAGE * _HUGE_PAGE
    if first < end:
        _advise(first, end - first, mmap.MADV_HUGEPAGE)
    try:
        yield
    finally:
        mallopt(_TOP_PAD, _PAD)
        mallopt(_MMAP_MAX, _MAPPINGS)
        # With a first call of mallopt glibc has stopped to fit these to what is freed; this is what it comes to.
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)


def _advise(start: int, nbytes: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise  # mmap.madvise would hold the interpreter's lock meanwhile
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, nbytes, advice) == 0)
