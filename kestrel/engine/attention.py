"""Attention over the page pool, as onnxruntime's graphs run it: records of the layers, filled in for each step.

What the records make the threads do is in `compiled/attention.py`.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.engine.elf import address_of
from kestrel.engine.kernels import load_kernels
from kestrel.engine.pool import PagePool
from kestrel.engine.records import ROW, SPLIT, STEP, UNIT, Records, name_record, new_records

Floats = npt.NDArray[np.float32]

LOG2E = 1.4426950408889634  # scores are kept in base 2, so that the softmax needs 2^x only
_WORTH_A_THREAD = 50_000  # multiply-adds; sharing a run out costs about 2 us


def _units(
    bounds: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], kv_heads: int, group: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Units of a step as int64 [units, 3] (sequence, KV head, first row), and the most splits one of them has.

    A sequence's units follow one another by their first rows, so that later ones have more keys.
    """
    new = np.diff(bounds)
    walks = -(-new * group // UNIT)  # units of one KV head
    sequence = np.repeat(np.arange(len(new)), walks)
    row = (np.arange(len(sequence)) - np.repeat(np.cumsum(walks) - walks, walks)) * UNIT
    owner = np.empty((len(sequence), kv_heads, 3), np.int64)
    owner[:, :, 0], owner[:, :, 1], owner[:, :, 2] = sequence[:, None], np.arange(kv_heads), row[:, None]
    return owner.reshape(-1, 3), int(-(-(starts + new) // SPLIT).max())


class Attention:
    """The attention of all layers of an engine over its page pool, as records for the operator `kestrel.Call`.

    `plan` once a step; then graphs run the records, each with its layer's projected rows as input.
    """

    def __init__(
        self, pool: PagePool, num_heads: int, norms: Sequence[tuple[Floats, Floats]], cosine: Floats, sine: Floats,
        eps: float, q_scale: float, max_rows: int, threads: int, records: Records | None = None,
    ):  # fmt: skip
        """norms: of each layer, the weights [dim] of q's and k's norm, or empty arrays (no norm), and eps of both.

        cosine, sine: rotary table [positions, dim_rotated / 2]. q_scale: dim^-0.5 * LOG2E for attention as usual.
        max_rows: most rows of a step. threads: how many share a layer, as many as onnxruntime has. records: where
        to put the records, for those who have named them before; None for new ones.
        """
        layout = pool.layout
        dim, kv_heads = layout.head_dim, layout.num_kv_heads
        self.threads = threads
        self.q: Floats = np.zeros(
            (max_rows, num_heads, dim), np.float32
        )  # as attended: normed, rotated, scaled
        self._group, self._kv_heads, self._dim = num_heads // kv_heads, kv_heads, dim
        scratch_size = -(-(3 * (UNIT + 8) * dim + 4 * UNIT + 8 * ROW) // 16) * 16
        self._scratch = np.zeros(threads * scratch_size, np.float32)
        self._parts, self._states = np.zeros(0, np.float32), np.zeros(0, np.float32)
        self._held = pool, norms, cosine, sine
        kernels = load_kernels(layout.kv_dtype)
        self._step_record = np.zeros(1, STEP)
        self._set(
            q=self.q, heads=num_heads, kv_heads=kv_heads, dim=dim, kv=pool.kv, kv_size=pool.kv.size,
            scales=pool.scales, page_size=pool.page_size, page_tokens=pool.page_tokens, cosine=cosine, sine=sine,
            half=cosine.shape[1], num_positions=len(cosine), scratch=self._scratch, scratch_size=scratch_size,
            eps=np.float32(eps), q_scale=np.float32(q_scale), clock=address_of(ctypes.CDLL(None).clock_gettime),
        )  # fmt: skip
        self._layers = new_records(layout.num_layers) if records is None else records
        for layer, (q_norm, k_norm) in enumerate(norms):
            self._layers[layer] = (
                kernels.begin, kernels.work, 0, 0, 0, num_heads * dim, 0, 0, self._step_record.ctypes.data, layer,
                *pool.layer_offsets(layer), q_norm.ctypes.data, k_norm.ctypes.data, len(q_norm),
            )  # fmt: skip
        self._hook = _Hook()

    def record(self, layer: int) -> npt.NDArray[np.int64]:
        """What the operator of a layer takes as its first input: int64 [1]."""
        return name_record(self._layers, layer)

    def plan(
        self, bounds: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], tables: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], padded: int,
        layer_ready: Callable[[int], None] | None = None, stop: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take the rows of a step: sequence s owns rows [bounds[s], bounds[s+1]), at positions starts[s]…

        They see every key up to themselves. tables: pages [sequences, pages]; places: page and slot of each row;
        positions: of each row; all contiguous. padded: rows of the graphs' tensors; those beyond the last sequence
        come out as zeros. layer_ready(l) is called before layer l touches its pages, and stop() once it has raised.
        """
        owner, splits = _units(bounds, starts, self._kv_heads, self._group)
        # Keys that all rows together see, times what a key costs: less than this is not worth a second thread.
        work = (int(positions.sum()) + len(positions)) * self._group * self._kv_heads * self._dim
        threads = 1 if work < _WORTH_A_THREAD else self.threads
        shared = threads > 1 and splits > 1 and len(owner) < 4 * threads
        jobs = len(owner) * splits
        if shared and len(self._parts) < jobs * (UNIT + 8) * self._dim:
            self._parts = np.empty(jobs * (UNIT + 8) * self._dim, np.float32)
            self._states = np.empty(2 * jobs * UNIT, np.float32)
        self._planned = bounds, starts, tables, places, positions, owner  # keeps what the record points to
        self._hook.function, self._hook.stop, self._hook.failed = layer_ready, stop, None
        self._set(
            rows=len(positions), threads=threads, sequences=len(starts), table_size=tables.shape[1], bounds=bounds,
            starts=starts, tables=tables, places=places, positions=positions, units=len(owner), owner=owner,
            splits=splits, shared=shared, parts=self._parts, states=self._states, waited=0, attended=0, stopped=0,
            ready=0 if layer_ready is None else self._hook.address,
        )  # fmt: skip
        self._layers["rows"] = padded

    def finish(self) -> tuple[float, float]:
        """Seconds that the step's layers attended and waited; raises what `layer_ready` raised."""
        if self._hook.failed is not None:
            raise self._hook.failed
        record = self._step_record[0]
        return float(record["attended"]) * 1e-9, float(record["waited"]) * 1e-9

    def _set(self, **values: Any) -> None:
        record = self._step_record[0]
        for name, value in values.items():
            record[name] = value.ctypes.data if isinstance(value, np.ndarray) else value


class _Hook:
    """A C function for `layer_ready`: 0 to go on, 1 when it has raised; the layers that follow are then left out."""

    def __init__(self) -> None:
        self.function: Callable[[int], None] | None = None
        self.stop: Callable[[], None] = lambda: None
        self.failed: BaseException | None = None
        hook = weakref.ref(self)

        def call(layer: int) -> int:
            found = hook()
            assert found is not None and found.function is not None
            try:
                found.function(layer)
            except BaseException as error:  # nothing may pass through the compiled code in between
                found.failed = error
                found.stop()
                return 1
            return 0

        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(call)
        self.address = address_of(self._callback)
