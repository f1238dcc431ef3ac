# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,attr-defined"
"""Causal attention over paged KV: one kernel for one row or a thousand, over any mix of sequences.

A run has phases, each shared out to onnxruntime's threads by a ticket counter. First new rows are put into their page
slots: bias-free q/k norm, rotary embedding, transposition of K. Then rows of one KV head that belong to one sequence
are attended in units of up to UNIT rows. A unit walks its keys in splits of SPLIT tokens; each split is an online
softmax of its own, and splits are folded in order. When there are too few units to keep the threads busy (a decode
step over a long context) the splits of a unit go to different threads, and are then folded in the same order: the
operations on one row are the same either way, and the same for any number of rows, threads and neighbours.
"""

from typing import Any

import numba
import numpy as np
from numba import carray, types

from kestrel.engine.compiled.build import build_library, jitted
from kestrel.engine.compiled.vector import (
    NEVER,
    add_values_1,
    add_values_2,
    add_values_4,
    add_values_8,
    exp2,
    fma,
    scale_all,
    scale_each,
    scores_1,
    scores_2,
    scores_4,
    scores_8,
    softmax_block,
)
from kestrel.engine.compiled.worker_pool import as_pointer, call_1, call_2, compute, take_ticket
from kestrel.engine.records import BLOCK, LAYER, ROW, SPLIT, STEP, UNIT
from kestrel.store.layout import KvDtype

WRITE_ROWS = 8  # rows that a thread puts into their slots before it takes the next ticket
_FEW_UNITS = 8  # so many are folded faster by one thread than by two


@jitted
def _row_tile(rows):
    """Rows of the next tile when `rows` are left: 8, 4, 2 or 1; a tile may be padded with zero rows."""
    if rows > 4:
        return 8
    if rows > 2:
        return 4
    return rows


@jitted
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


@jitted
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
        k_next = k_base  # of the next page, wanted when this one is done
        if key + run < last_key:
            k_next = np.int64(table[(key + run) // page_tokens]) * page_size + k_at + head * dim * page_tokens
        r = 0
        packed_at = 0
        while r < rows:
            tile = _row_tile(rows - r)
            last = min(r + tile, rows) - 1  # of the tile's rows the one that sees most
            seen_by_last = start + (row + last) // group + 1 - key
            if seen_by_last > 0:
                keys = min(run, (seen_by_last + 15) // 16 * 16, page_tokens - slot)
                if tile == 8:
                    scores_8(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0, v_base)
                elif tile == 4:
                    scores_4(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0, v_base)
                elif tile == 2:
                    scores_2(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0, v_base)
                else:
                    scores_1(packed, packed_at, kv, k_base, page_tokens, dim, keys, weights, 0, v_base)
                if quantised:
                    for i in range(tile):
                        scale_each(weights, i * ROW, keys, scales, scale_base + ks_at, inverse)
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
                            scale_all(out, out_at + n * dim, dim, shrink)
                            totals[state_at + n] *= shrink
                            highs[state_at + n] = high
                        totals[state_at + n] += total
                        if quantised:
                            scale_each(weights, at, keys_of_tile, scales, scale_base + vs_at + block, inverse)
                    o = out_at + r * dim
                    v = v_base + block * dim
                    if tile == 8:
                        add_values_8(weights, block, kv, v, dim, keys_of_tile, out, o, k_next + block * dim)
                    elif tile == 4:
                        add_values_4(weights, block, kv, v, dim, keys_of_tile, out, o, k_next + block * dim)
                    elif tile == 2:
                        add_values_2(weights, block, kv, v, dim, keys_of_tile, out, o, k_next + block * dim)
                    else:
                        add_values_1(weights, block, kv, v, dim, keys_of_tile, out, o, k_next + block * dim)
            packed_at += tile * dim
            r += tile
        key += run


@jitted
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


@jitted
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


@jitted
def _norm(line, weight, eps):
    """RMS norm of one head's row, in place; the sum of squares runs in one fixed chain."""
    dim = len(weight)
    total = np.float32(0)
    for d in range(dim):
        total = fma(line[d], line[d], total)
    factor = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
    for d in range(dim):
        line[d] = line[d] * factor * weight[d]


@jitted
def _rotate(line, cosine, sine):
    """Rotary embedding of the first 2 * len(cosine) values, halves paired (Su et al. 2021), in place."""
    half = len(cosine)
    for d in range(half):
        a = line[d]
        b = line[d + half]
        line[d] = fma(a, cosine[d], -(b * sine[d]))
        line[d + half] = fma(b, cosine[d], a * sine[d])


@jitted
def _quantise(line):
    """Scale of one row for int8: its largest magnitude, 1 for a row of zeros."""
    top = np.float32(0)
    for d in range(len(line)):
        top = max(top, abs(line[d]))
    return top if top > np.float32(1e-6) else np.float32(1)


@jitted
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


@jitted
def _floats(address, size):
    """`size` floats at an address."""
    return carray(as_pointer(address, _Float), (size,))


@jitted
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


@jitted
def _now(step, step_at):
    """Nanoseconds of the monotonic clock."""
    call_2(step.clock, (_MONOTONIC, step_at + _SECONDS))
    return step.seconds * 1_000_000_000 + step.fraction


@jitted
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


def library(kv_dtype: KvDtype) -> bytes:
    """The shared library for pages of this type: `begin` and `work` of records, `compute` of the operator."""
    quantised = kv_dtype == "int8"
    kind: Any = _Byte if quantised else _Float

    def begin(address, phase):
        call = carray(as_pointer(address, _Layer), (1,))[0]
        return _begin(call, carray(as_pointer(call.step, _Step), (1,))[0], phase)

    def work(address, worker):
        call = carray(as_pointer(address, _Layer), (1,))[0]
        step = carray(as_pointer(call.step, _Step), (1,))[0]
        kv = carray(as_pointer(step.kv, kind), (step.kv_size,))
        _work(call, step, address + _TICKET, kv, quantised, worker)

    return build_library({"begin": begin, "work": work, "compute": compute})
