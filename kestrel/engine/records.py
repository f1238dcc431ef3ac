"""Records: arrays of words that Python and compiled functions both see."""

from typing import Any

import numpy as np
import numpy.typing as npt

# How attention is cut: the operations on a row depend on these alone.
UNIT = 64  # rows (tokens x query heads of one KV head) that share one walk over the keys
SPLIT = 512  # keys folded as one partial softmax
BLOCK = 128  # keys between two looks at the running maximum; a page holds a multiple of it
ROW = 2 * BLOCK  # floats between two rows of scores: up to two blocks are scored in one pass

# A record is an array of words. begin(record, phase) says how many workers phase 0, 1… is for, 0 after the last;
# work(record, worker) is called once for each of them, a single one on the thread that runs the graph. A phase begins
# when all workers of the one before have returned. Both are C functions: their addresses are the first two words.
# The operator writes the next two, where its input is and where its output goes, and reads the output's shape.
RECORD = [(name, np.int64) for name in ("begin", "work", "input", "output", "rows", "width")]
INPUT, OUTPUT, ROWS = 2, 3, 4

# A layer and a step, as the compiled functions see them: words, but for the last two of a step.
LAYER = np.dtype(
    RECORD
    + [(name, np.int64) for name in ("ticket", "phase", "step", "layer")]
    + [(name, np.int64) for name in ("k_at", "ks_at", "v_at", "vs_at", "q_norm", "k_norm", "norm_size")]
)
STEP = np.dtype(
    [
        (name, np.int64)
        for name in ("rows", "threads", "sequences", "table_size", "bounds", "starts", "tables")
    ]
    + [
        (name, np.int64)
        for name in ("places", "positions", "units", "owner", "splits", "shared", "parts", "states")
    ]
    + [(name, np.int64) for name in ("ready", "stopped", "clock", "seconds", "fraction", "started")]
    + [(name, np.int64) for name in ("waited", "attended")]
    + [(name, np.int64) for name in ("q", "heads", "kv_heads", "dim", "kv", "kv_size", "scales")]
    + [(name, np.int64) for name in ("page_size", "page_tokens", "cosine", "sine", "half", "num_positions")]
    + [(name, np.int64) for name in ("scratch", "scratch_size")]
    + [("eps", np.float32), ("q_scale", np.float32)]
)

Records = npt.NDArray[Any]  # of LAYER, one a layer


def new_records(num_layers: int) -> Records:
    """Records that an Attention may fill in later; no graph that names them may run before."""
    return np.zeros(num_layers, LAYER)


def name_record(records: Records, layer: int) -> npt.NDArray[np.int64]:
    """What the operator of a layer takes as its first input: int64 [1]."""
    return np.array([records[layer : layer + 1].ctypes.data], np.int64)
