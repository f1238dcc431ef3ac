"""What of this process's address space lies in memory: asked of the kernel, and told to it.

None of it changes any content. Both need Linux; elsewhere nothing is known and nothing happens.
"""

import ctypes
import mmap

import numpy as np


def advise(start: int, nbytes: int, advice: int) -> bool:
    """madvise of [start, start + nbytes), without the interpreter's lock; False where the kernel refuses."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except AttributeError:
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, nbytes, advice) == 0)


def share_present(start: int, nbytes: int) -> float | None:
    """How much of [start, start + nbytes) is in memory, of a file: in the page cache; 0 to 1, None if not known.

    start: at the beginning of a page.
    """
    present = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except AttributeError:
        return None
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return float((present & 1).mean()) if mincore(start, nbytes, present.ctypes.data) == 0 else None
