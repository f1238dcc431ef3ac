"""Reading and writing past the page cache.

Through it the kernel finds memory for every byte and copies it, on the cores that compute meanwhile: 94 MB, written
and synced, take 120 ms of a core, past it 6. File systems that cannot do without it are used as usual.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

SECTOR = 512  # direct reads and writes begin and end on multiples of it, on disk and in memory
LOOKS = 4  # places at which a file is asked whether it is in the page cache
LEAST_NBYTES = 1 << 20  # written past the page cache: less costs little, and says little of the disk
FAST = 300e6  # bytes a second; memory cards and eMMC are slower, disks are faster
TRIES = 8  # writes before a disk is called slow: one alone may have waited for a core


def open_direct(fd: int, flags: int) -> int:
    """A second descriptor of an open file that goes past the page cache; -1 where there is no such thing."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    return -1


def read_ahead(fd: int, nbytes: int) -> None:
    """Let the disk bring the first and the last `nbytes` of a file to the page cache, without waiting for it."""
    with contextlib.suppress(OSError, AttributeError):
        for offset in (0, max(0, os.fstat(fd).st_size - nbytes)):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


def is_cached(fd: int, nbytes: int) -> bool:
    """Whether the page cache holds most of the first `nbytes` of a file, going by a few places of it.

    True where the kernel does not say. Mapping the file to ask of all its pages would wait for whoever changes this
    process's mappings: up to 10 ms a file while a model's weights are moved to huge pages.
    """
    byte, num_cached = [bytearray(1)], 0
    try:
        for place in range(LOOKS):
            with contextlib.suppress(BlockingIOError):
                os.preadv(fd, byte, (2 * place + 1) * nbytes // (2 * LOOKS), os.RWF_NOWAIT)
                num_cached += 1
    except (OSError, AttributeError):
        return True
    return 2 * num_cached >= LOOKS


class FileWriter:
    """Writes new files, long runs of aligned buffers past the page cache as long as the disk is fast.

    What a slow disk holds comes sooner from the page cache after a restart, and there the copy costs little beside the
    write.
    """

    def __init__(self) -> None:
        self._num_tried = 0
        self._best = 0.0  # bytes a second

    @property
    def goes_direct(self) -> bool:
        """Whether the page cache is left out of long writes."""
        return self._num_tried < TRIES or self._best >= FAST

    def write(self, fd: int, chunks: Iterable[Any]) -> None:
        """Write an empty file from byte buffers; neighbours that are aligned are held until they can go together."""
        offset = held = 0
        run: list[memoryview] = []
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            if self.goes_direct and _is_aligned(view, offset + held):
                run.append(view)
                held += len(view)
                continue
            self._write_run(fd, run, offset, held)
            _write(fd, view, offset + held)
            offset += held + len(view)
            run, held = [], 0
        self._write_run(fd, run, offset, held)

    def _write_run(self, fd: int, run: list[memoryview], offset: int, nbytes: int) -> None:
        """Write neighbours of `nbytes` together from `offset`."""
        direct = open_direct(fd, os.O_WRONLY) if nbytes >= LEAST_NBYTES else -1
        if direct >= 0:
            started = time.perf_counter()
            try:
                written = os.pwritev(direct, run, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # anything but "not aligned": larger sectors, other rules
                    raise
                written = 0
            finally:
                os.close(direct)
            self._num_tried += 1
            self._best = max(self._best, written / (time.perf_counter() - started))
            offset, run = offset + written, _behind(run, written)
        for view in run:
            _write(fd, view, offset)
            offset += len(view)


def _is_aligned(view: memoryview, offset: int) -> bool:
    address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 1
    return not (address | len(view) | offset) % SECTOR


def _behind(run: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of neighbours behind their first `nbytes`."""
    left = []
    for view in run:
        if nbytes < len(view):
            left.append(view[nbytes:])
        nbytes = max(0, nbytes - len(view))
    return left


def _write(fd: int, view: memoryview, offset: int) -> None:
    """Write a whole buffer, however many calls that takes."""
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
