"""What of this process's address space lies in memory: asked of the kernel, and told to it.

None of it changes any content. Both need Linux; elsewhere nothing is known and nothing happens.
"""

import ctypes
import functools
import mmap
from typing import Any

import numpy as np


@functools.cache
def c_function(name: str, *kinds: Any) -> Any:
    """A function of the C library that takes arguments of these kinds; None where there is none of that name."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = kinds
    return function


def advise(start: int, nbytes: int, advice: int) -> bool:
    """madvise of [start, start + nbytes), without the interpreter's lock; False where the kernel refuses."""
    madvise = c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise is not None and bool(madvise(start, nbytes, advice) == 0)


def share_present(start: int, nbytes: int) -> float | None:
    """How much of [start, start + nbytes) is in memory, of a file: in the page cache; 0 to 1, None if not known.

    start: at the beginning of a page.
    """
    mincore = c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore is None:
        return None
    present = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    return float((present & 1).mean()) if mincore(start, nbytes, present.ctypes.data) == 0 else None
