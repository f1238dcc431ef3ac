# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,attr-defined"
"""Causal attention over paged KV: one kernel for one row or a thousand, over any mix of sequences.

A run has phases, each shared out to onnxruntime's threads by a ticket counter. First new rows are put into their page
slots: bias-free q/k norm, rotary embedding, transposition of K. Then rows of one KV head that belong to one sequence
are attended in units of up to UNIT rows. A unit walks its keys in splits of SPLIT tokens; each split is an online
softmax of its own, and splits are folded in order. When there are too few units to keep the threads busy (a decode
step over a long context) the splits of a unit go to different threads, and are then folded in the same order: the
operations on one row are the same either way, and the same for any number of rows, threads and neighbours.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, types

from kestrel.engine.compiled import compiled
from kestrel.engine.operator import address_of
from kestrel.engine.pool import PagePool
from kestrel.engine.records import LAYER, STEP, Records, name_record, new_records
from kestrel.engine.vector import (
    BLOCK,
    NEVER,
    ROW,
    add_values_1,
    add_values_2,
    add_values_4,
    add_values_8,
    exp2,
    fma,
    scores_1,
    scores_2,
    scores_4,
    scores_8,
    softmax_block,
)
from kestrel.engine.worker_pool import as_pointer, call_1, call_2, take_ticket

Floats = npt.NDArray[np.float32]

UNIT = 64  # rows (tokens x query heads of one KV head) that share one walk over the keys
SPLIT = 512  # keys folded as one partial softmax
LOG2E = 1.4426950408889634  # scores are kept in base 2, so that the softmax needs 2^x only
WRITE_ROWS = 8  # rows that a thread puts into their slots before it takes the next ticket
_FEW_UNITS = 8  # so many are folded faster by one thread than by two
_WORTH_A_THREAD = 50_000  # multiply-adds; sharing a run out costs about 2 us


@compiled()
def _row_tile(rows):
    """Rows of the next tile when `rows` are left: 8, 4, 2 or 1; a tile may be padded with zero rows."""
    if rows > 4:
        return 8
    if rows > 2:
        return 4
    return rows


@compiled()
def _pack(q, first_row, row, rows, group, head, packed):
    """Copy rows [row, row+rows) of one head into tiles of [dim, tile rows], zero rows at the end."""
    dim = q.shape[2]
    at = 0
    r = 0
    while r < rows:
        tile = _row_tile(rows - r)
        for i in range(tile):
            if r + i < rows:
                n = row + r + i
                line = q[first_row + n // group, head * group + n % group]
                for d in range(dim):
                    packed[at + d * tile + i] = line[d]
            else:
                for d in range(dim):
                    packed[at + d * tile + i] = np.float32(0)
        at += tile * dim
        r += tile


@compiled()
def _attend_split(
    packed, rows, row, group, start, split, kv, scales, quantised, table, page_size, page_tokens,
    k_at, ks_at, v_at, vs_at, head, dim, weights, out, out_at, highs, totals, state_at,
):  # fmt: skip
    """Attend `rows` packed rows over the keys of one split; leave unnormalised sums, highs and totals.

    out[out_at:]: [padded rows, dim]; highs, totals from state_at: one a row, NEVER and 0 where the row
    sees no key of this split. weights: scratch of 8 * ROW floats.
    """
    first_key = split * SPLIT
    last_key = min(first_key + SPLIT, start + (row + rows - 1) // group + 1)
    padded = 0
    while padded < rows:
        padded += _row_tile(rows - padded)
    for i in range(padded * dim):
        out[out_at + i] = np.float32(0)
    for r in range(rows):
        highs[state_at + r] = NEVER
        totals[state_at + r] = np.float32(0)
    inverse = np.float32(1.0 / 127.0)
    key = first_key
    while key < last_key:
        page = np.int64(table[key // page_tokens])
        slot = key % page_tokens
        run = min(ROW, page_tokens - slot, last_key - key)
        k_base = page * page_size + k_at + head * dim * page_tokens + slot
        v_base = page * page_size + v_at + (head * page_tokens + slot) * dim
        scale_base = page * (page_size // 4) + head * page_tokens + slot
        r = 0
        packed_at = 0
        while r < rows:
            tile = _row_tile(rows - r)
            last = min(r + tile, rows) - 1  # of the tile's rows the one that sees most
            seen_by_last = start + (row + last) // group + 1 - key
            if seen_by_last > 0:
                keys = min(run, (seen_by_last + 15) // 16 * 16, page_tokens - slot)
                if tile == 8:
                    scores_8(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0)
                elif tile == 4:
                    scores_4(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0)
                elif tile == 2:
                    scores_2(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0)
                else:
                    scores_1(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0)
                if quantised:
                    for i in range(tile):
                        for c in range(keys):
                            weights[i * ROW + c] *= scales[scale_base + ks_at + c] * inverse
                for block in range(0, keys, BLOCK):
                    keys_of_tile = min(BLOCK, run - block, seen_by_last - block)
                    if keys_of_tile <= 0:
                        break
                    for i in range(tile):
                        at = i * ROW + block
                        n = r + i
                        seen = 0
                        if n < rows:
                            seen = min(BLOCK, run - block, start + (row + n) // group + 1 - key - block)
                        if seen <= 0:
                            for c in range(BLOCK):
                                weights[at + c] = np.float32(0)
                            continue
                        before = highs[state_at + n]
                        high, total = softmax_block(weights, at, seen, before)
                        if high > before:
                            shrink = exp2(before - high)
                            for d in range(dim):
                                out[out_at + n * dim + d] *= shrink
                            totals[state_at + n] *= shrink
                            highs[state_at + n] = high
                        totals[state_at + n] += total
                        if quantised:
                            for c in range(keys_of_tile):
                                weights[at + c] *= scales[scale_base + vs_at + block + c] * inverse
                    o = out_at + r * dim
                    v = v_base + block * dim
                    if tile == 8:
                        add_values_8(weights, block, kv, v, dim, keys_of_tile, out, o)
                    elif tile == 4:
                        add_values_4(weights, block, kv, v, dim, keys_of_tile, out, o)
                    elif tile == 2:
                        add_values_2(weights, block, kv, v, dim, keys_of_tile, out, o)
                    else:
                        add_values_1(weights, block, kv, v, dim, keys_of_tile, out, o)
            packed_at += tile * dim
            r += tile
        key += run


@compiled()
def _fold(rows, dim, part, part_at, part_highs, part_totals, part_state, out, highs, totals):
    """Add one split's sums to the running ones; a row that saw nothing of the split stays as it is."""
    for r in range(rows):
        high = part_highs[part_state + r]
        if high == NEVER:
            continue
        if highs[r] == NEVER:
            for d in range(dim):
                out[r * dim + d] = part[part_at + r * dim + d]
            highs[r] = high
            totals[r] = part_totals[part_state + r]
            continue
        top = max(high, highs[r])
        mine = exp2(highs[r] - top)
        theirs = exp2(high - top)
        for d in range(dim):
            out[r * dim + d] = fma(out[r * dim + d], mine, part[part_at + r * dim + d] * theirs)
        totals[r] = fma(totals[r], mine, part_totals[part_state + r] * theirs)
        highs[r] = top


@compiled()
def _finish(rows, row, first_row, group, head, dim, sums, totals, out):
    """Divide by the softmax totals and put the rows where they belong.

    Adding zero turns -0 into +0: the only trace that padding a row with zero weights could leave.
    """
    for r in range(rows):
        n = row + r
        line = out[first_row + n // group, head * group + n % group]
        inverse = np.float32(1) / totals[r]
        for d in range(dim):
            line[d] = sums[r * dim + d] * inverse + np.float32(0)


@compiled()
def _norm(line, weight, eps):
    """RMS norm of one head's row, in place; the sum of squares runs in one fixed chain."""
    dim = len(weight)
    total = np.float32(0)
    for d in range(dim):
        total = fma(line[d], line[d], total)
    factor = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
    for d in range(dim):
        line[d] = line[d] * factor * weight[d]


@compiled()
def _rotate(line, cosine, sine):
    """Rotary embedding of the first 2 * len(cosine) values, halves paired (Su et al. 2021), in place."""
    half = len(cosine)
    for d in range(half):
        a = line[d]
        b = line[d + half]
        line[d] = fma(a, cosine[d], -(b * sine[d]))
        line[d + half] = fma(b, cosine[d], a * sine[d])


@compiled()
def _quantise(line):
    """Scale of one row for int8: its largest magnitude, 1 for a row of zeros."""
    top = np.float32(0)
    for d in range(len(line)):
        top = max(top, abs(line[d]))
    return top if top > np.float32(1e-6) else np.float32(1)


@compiled()
def _write_row(
    i, qkv, q_norm, k_norm, eps, cosine, sine, kv, scales, quantised, place, position, page_size, page_tokens,
    k_at, ks_at, v_at, vs_at, kv_heads, q_scale, line, q,
):  # fmt: skip
    """Split one projected row into q, k, v: norm and rotate q and k, store k and v in their page slot."""
    heads = q.shape[1]
    dim = q.shape[2]
    cos = cosine[position]
    sin = sine[position]
    for h in range(heads):
        out = q[i, h]
        for d in range(dim):
            out[d] = qkv[i, h * dim + d]
        if len(q_norm):
            _norm(out, q_norm, eps)
        _rotate(out, cos, sin)
        for d in range(dim):
            out[d] *= q_scale
    page = np.int64(place[0])
    slot = place[1]
    scale_base = page * (page_size // 4) + slot
    for h in range(kv_heads):
        for d in range(dim):
            line[d] = qkv[i, (heads + h) * dim + d]
        if len(k_norm):
            _norm(line, k_norm, eps)
        _rotate(line, cos, sin)
        at = page * page_size + k_at + h * dim * page_tokens + slot
        if quantised:
            scale = _quantise(line)
            scales[scale_base + ks_at + h * page_tokens] = scale
            for d in range(dim):
                kv[at + d * page_tokens] = np.int8(
                    np.floor(line[d] * np.float32(127) / scale + np.float32(0.5))
                )
        else:
            for d in range(dim):
                kv[at + d * page_tokens] = line[d]
        value = (heads + kv_heads + h) * dim
        at = page * page_size + v_at + (h * page_tokens + slot) * dim
        if quantised:
            scale = _quantise(qkv[i, value : value + dim])
            scales[scale_base + vs_at + h * page_tokens] = scale
            for d in range(dim):
                kv[at + d] = np.int8(np.floor(qkv[i, value + d] * np.float32(127) / scale + np.float32(0.5)))
        else:
            for d in range(dim):
                kv[at + d] = qkv[i, value + d]


# A layer and a step, as the compiled functions see them.
_TICKET = 8 * list(LAYER.fields or ()).index("ticket")
_SECONDS = 8 * list(STEP.fields or ()).index("seconds")
_MONOTONIC = 1  # CLOCK_MONOTONIC
_Layer = types.CPointer(numba.from_dtype(LAYER))
_Step = types.CPointer(numba.from_dtype(STEP))
_Word = types.CPointer(types.int64)
_Half = types.CPointer(types.int32)
_Float = types.CPointer(types.float32)
_Byte = types.CPointer(types.int8)


@compiled()
def _plan(bounds, starts, kv_heads, group):
    """Units of a step as int64 [units, 3] (sequence, KV head, first row), and the most splits one of them has."""
    units = 0
    most_splits = 0
    for s in range(len(starts)):
        new = bounds[s + 1] - bounds[s]
        units += (new * group + UNIT - 1) // UNIT * kv_heads
        most_splits = max(most_splits, (starts[s] + new + SPLIT - 1) // SPLIT)
    owner = np.empty((units, 3), np.int64)
    u = 0
    for s in range(len(starts)):
        for row in range(0, (bounds[s + 1] - bounds[s]) * group, UNIT):
            for head in range(kv_heads):
                owner[u, 0] = s
                owner[u, 1] = head
                owner[u, 2] = row
                u += 1
    return owner, most_splits


@compiled()
def _floats(address, size):
    """`size` floats at an address."""
    return carray(as_pointer(address, _Float), (size,))


@compiled()
def _work(call, step, ticket_at, kv, quantised, worker):
    """Do jobs of a layer's present phase until none is left."""
    dim, heads, kv_heads = step.dim, step.heads, step.kv_heads
    group = heads // kv_heads
    padded = (UNIT + 8) * dim
    q = carray(as_pointer(step.q, _Float), (step.rows, heads, dim))
    scales = _floats(step.scales, step.kv_size // 4 if quantised else step.kv_size)
    scratch = step.scratch + worker * step.scratch_size * 4
    packed = _floats(scratch, padded)
    part = _floats(scratch + 4 * padded, padded)
    sums = _floats(scratch + 8 * padded, padded)
    state = scratch + 12 * padded
    high, total = _floats(state, UNIT), _floats(state + 4 * UNIT, UNIT)
    highs, totals = _floats(state + 8 * UNIT, UNIT), _floats(state + 12 * UNIT, UNIT)
    weights = _floats(state + 16 * UNIT, 8 * ROW)
    if call.phase == 0:
        qkv = carray(as_pointer(call.input, _Float), (step.rows, (heads + 2 * kv_heads) * dim))
        q_norm = _floats(call.q_norm, call.norm_size)
        k_norm = _floats(call.k_norm, call.norm_size)
        cosine = carray(as_pointer(step.cosine, _Float), (step.num_positions, step.half))
        sine = carray(as_pointer(step.sine, _Float), (step.num_positions, step.half))
        places = carray(as_pointer(step.places, _Half), (step.rows, 2))
        positions = carray(as_pointer(step.positions, _Half), (step.rows,))
        line = _floats(scratch, dim)
        while True:
            first = take_ticket(ticket_at) * WRITE_ROWS
            if first >= step.rows:
                return
            for i in range(first, min(step.rows, first + WRITE_ROWS)):
                _write_row(
                    i, qkv, q_norm, k_norm, step.eps, cosine, sine, kv, scales, quantised, places[i], positions[i],
                    step.page_size, step.page_tokens, call.k_at, call.ks_at, call.v_at, call.vs_at, kv_heads,
                    step.q_scale, line, q,
                )  # fmt: skip
    out = carray(as_pointer(call.output, _Float), (step.rows, heads, dim))
    bounds = carray(as_pointer(step.bounds, _Word), (step.sequences + 1,))
    starts = carray(as_pointer(step.starts, _Word), (step.sequences,))
    tables = carray(as_pointer(step.tables, _Half), (step.sequences, step.table_size))
    owner = carray(as_pointer(step.owner, _Word), (step.units, 3))
    jobs = step.units * step.splits
    parts = _floats(step.parts, jobs * padded)
    part_highs, part_totals = (
        _floats(step.states, jobs * UNIT),
        _floats(step.states + 4 * jobs * UNIT, jobs * UNIT),
    )
    while True:
        job = take_ticket(ticket_at)
        if call.phase == 1 and step.shared:
            if job >= jobs:
                return
            s, head, row = owner[job // step.splits]
            split = job % step.splits
            rows = min(UNIT, (bounds[s + 1] - bounds[s]) * group - row)
            if split * SPLIT >= starts[s] + (row + rows - 1) // group + 1:
                for r in range(rows):
                    part_highs[job * UNIT + r] = NEVER
                continue
            _pack(q, bounds[s], row, rows, group, head, packed)
            _attend_split(
                packed, rows, row, group, starts[s], split, kv, scales, quantised, tables[s], step.page_size,
                step.page_tokens, call.k_at, call.ks_at, call.v_at, call.vs_at, head, dim, weights, parts,
                job * padded, part_highs, part_totals, job * UNIT,
            )  # fmt: skip
            continue
        if job >= step.units:
            return
        unit = step.units - 1 - job  # the last ones of a sequence have the most keys
        s, head, row = owner[unit]
        rows = min(UNIT, (bounds[s + 1] - bounds[s]) * group - row)
        highs[:] = NEVER
        if call.phase == 1:
            _pack(q, bounds[s], row, rows, group, head, packed)
            last_key = starts[s] + (row + rows - 1) // group + 1
            for split in range((last_key + SPLIT - 1) // SPLIT):
                _attend_split(
                    packed, rows, row, group, starts[s], split, kv, scales, quantised, tables[s], step.page_size,
                    step.page_tokens, call.k_at, call.ks_at, call.v_at, call.vs_at, head, dim, weights, part, 0,
                    high, total, 0,
                )  # fmt: skip
                _fold(rows, dim, part, 0, high, total, 0, sums, highs, totals)
        else:
            for split in range(step.splits):
                at = unit * step.splits + split
                _fold(rows, dim, parts, at * padded, part_highs, part_totals, at * UNIT, sums, highs, totals)
        _finish(rows, row, bounds[s], group, head, dim, sums, totals, out)


@compiled()
def _now(step, step_at):
    """Nanoseconds of the monotonic clock."""
    call_2(step.clock, (_MONOTONIC, step_at + _SECONDS))
    return step.seconds * 1_000_000_000 + step.fraction


@compiled()
def _begin(call, step, phase):
    """Prepare a phase of a layer and return how many threads it is for, 0 when all are done."""
    call.ticket = 0
    call.phase = phase
    if phase == 0:
        before = _now(step, call.step)
        if step.ready and not step.stopped:
            step.stopped = call_1(step.ready, (call.layer,))
        step.started = _now(step, call.step)
        step.waited += step.started - before
        if step.stopped:
            return 0
        out = _floats(call.output, call.rows * call.width)
        for i in range(step.rows * call.width, len(out)):
            out[i] = np.float32(0)
        return min(step.threads, (step.rows + WRITE_ROWS - 1) // WRITE_ROWS)
    if phase == 1:
        return min(step.threads, step.units * step.splits if step.shared else step.units)
    if phase == 2 and step.shared:
        return step.threads if step.units > _FEW_UNITS else 1
    step.attended += _now(step, call.step) - step.started
    return 0


@functools.cache
def _compiled(quantised: bool) -> tuple[Any, Any]:
    """The functions (begin, work) that onnxruntime's threads call, for int8 or float32 pages."""
    kind = _Byte if quantised else _Float

    def begin(address, phase):
        call = carray(as_pointer(address, _Layer), (1,))[0]
        return _begin(call, carray(as_pointer(call.step, _Step), (1,))[0], phase)

    def work(address, worker):
        call = carray(as_pointer(address, _Layer), (1,))[0]
        step = carray(as_pointer(call.step, _Step), (1,))[0]
        kv = carray(as_pointer(step.kv, kind), (step.kv_size,))
        _work(call, step, address + _TICKET, kv, quantised, worker)

    return (
        compiled(cfunc, types.int64(types.int64, types.int64))(begin),
        compiled(cfunc, types.void(types.int64, types.int64))(work),
    )


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
        begin, work = _compiled(pool.quantised)
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
                begin.address, work.address, 0, 0, 0, num_heads * dim, 0, 0, self._step_record.ctypes.data, layer,
                *pool.layer_offsets(layer), q_norm.ctypes.data, k_norm.ctypes.data, len(q_norm),
            )  # fmt: skip
        self._hook = _Hook()

    def record(self, layer: int) -> npt.NDArray[np.int64]:
        """What the operator of a layer takes as its first input: int64 [1]."""
        return name_record(self._layers, layer)

    def plan(
        self, bounds: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], tables: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], padded: int,
        layer_ready: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Take the rows of a step: sequence s owns rows [bounds[s], bounds[s+1]), at positions starts[s]…

        They see every key up to themselves. tables: pages [sequences, pages]; places: page and slot of each row;
        positions: of each row; all contiguous. padded: rows of the graphs' tensors; those beyond the last sequence
        come out as zeros. layer_ready(l) is called before layer l touches its pages.
        """
        owner, splits = _plan(bounds, starts, self._kv_heads, self._group)
        # Keys that all rows together see, times what a key costs: less than this is not worth a second thread.
        work = (int(positions.sum()) + len(positions)) * self._group * self._kv_heads * self._dim
        threads = 1 if work < _WORTH_A_THREAD else self.threads
        shared = threads > 1 and splits > 1 and len(owner) < 4 * threads
        jobs = len(owner) * splits
        if shared and len(self._parts) < jobs * (UNIT + 8) * self._dim:
            self._parts = np.empty(jobs * (UNIT + 8) * self._dim, np.float32)
            self._states = np.empty(2 * jobs * UNIT, np.float32)
        self._planned = bounds, starts, tables, places, positions, owner  # keeps what the record points to
        self._hook.function, self._hook.failed = layer_ready, None
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
        self.failed: BaseException | None = None
        hook = weakref.ref(self)

        def call(layer: int) -> int:
            found = hook()
            assert found is not None and found.function is not None
            try:
                found.function(layer)
            except BaseException as error:  # nothing may pass through the compiled code in between
                found.failed = error
                return 1
            return 0

        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(call)
        self.address = address_of(self._callback)
