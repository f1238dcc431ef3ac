# mypy: disable-error-code="no-untyped-def,call-arg,var-annotated"
"""Causal attention over paged KV: one kernel for one row or a thousand, over any mix of sequences.

Rows of one KV head that belong to one sequence are handled in units of up to UNIT rows. A unit walks
its keys in splits of SPLIT tokens; each split is an online softmax of its own, and splits are folded
in order. When there are too few units to keep the threads busy (a decode step over a long context)
the splits of a unit go to different threads, and are then folded in the same order: the operations
on one row are the same either way, and the same for any number of rows, threads and neighbours.

`write` puts new rows into their page slots: bias-free q/k norm, rotary embedding, transposition of K.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

# Two thread pools that both spin fight for the cores; onnxruntime's may, OpenMP's must not.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numba  # noqa: E402
import numpy as np  # noqa: E402
from numba import prange  # noqa: E402

from kestrel.engine.vector import (  # noqa: E402
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

UNIT = 64  # rows (tokens x query heads of one KV head) that share one walk over the keys
SPLIT = 512  # keys folded as one partial softmax
LOG2E = 1.4426950408889634  # scores are kept in base 2, so that the softmax needs 2^x only


def _kernel(**options: Any) -> Any:
    """numba.njit with the compiled code kept in the user's cache, in a folder named after these sources.

    numba's own cache looks at the file of the function alone and would keep code of an older vector.py.
    """
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("vector.py", "attention.py"))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "kestrel" / f"kernels-{hashlib.sha256(sources).hexdigest()[:12]}"

    def decorate(function: Any) -> Any:
        settings: Any = numba.config
        before = settings.CACHE_DIR
        try:
            folder.mkdir(parents=True, exist_ok=True)
            settings.CACHE_DIR = str(folder)
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except OSError:  # no writable home: compile at every start
            return numba.njit(nogil=True, error_model="numpy", **options)(function)
        finally:
            settings.CACHE_DIR = before

    return decorate


@_kernel()
def _row_tile(rows):
    """Rows of the next tile when `rows` are left: 8, 4, 2 or 1; a tile may be padded with zero rows."""
    if rows > 4:
        return 8
    if rows > 2:
        return 4
    return rows


@_kernel()
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


@_kernel()
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


@_kernel()
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


@_kernel()
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


def use_threads(threads: int) -> int:
    """Let the next kernels of this thread run on so many threads, at most as many as numba has; return the number."""
    settings: Any = numba.config
    threads = min(threads, settings.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    return threads


@_kernel(parallel=True)
def attend(
    q, kv, scales, quantised, tables, bounds, starts, page_size, page_tokens,
    k_at, ks_at, v_at, vs_at, kv_heads, threads, out,
):  # fmt: skip
    """Attention of the new rows of several sequences over their pages, new rows included.

    q, out: float32 [n, heads, dim]; q is scaled by dim^-0.5 * LOG2E. Sequence s owns rows
    [bounds[s], bounds[s+1]), which sit at positions starts[s]… and see every key up to themselves.
    kv: the pool as one flat float32 or int8 array, page p from p * page_size; inside a page K of this
    layer lies at k_at as [kv_heads, dim, page_tokens], V at v_at as [kv_heads, page_tokens, dim].
    quantised: kv is int8 and `scales` views the pool as float32, with the scales of K and V at ks_at
    and vs_at as [kv_heads, page_tokens]. tables: int32 [sequences, pages]. threads: how many share it.
    """
    dim = q.shape[2]
    group = q.shape[1] // kv_heads
    sequences = len(starts)
    units = 0
    most_splits = 0
    jobs = 0
    for s in range(sequences):
        new = bounds[s + 1] - bounds[s]
        blocks = (new * group + UNIT - 1) // UNIT
        splits = (starts[s] + new + SPLIT - 1) // SPLIT
        units += blocks * kv_heads
        jobs += blocks * kv_heads * splits
        most_splits = max(most_splits, splits)
    # unit u: sequence, KV head, first row
    owner = np.empty((units, 3), np.int64)
    u = 0
    for s in range(sequences):
        for row in range(0, (bounds[s + 1] - bounds[s]) * group, UNIT):
            for head in range(kv_heads):
                owner[u, 0] = s
                owner[u, 1] = head
                owner[u, 2] = row
                u += 1
    share_splits = threads > 1 and most_splits > 1 and units < 4 * threads
    if share_splits:
        room = (UNIT + 8) * dim
        parts = np.empty(units * most_splits * room, np.float32)
        part_highs = np.empty(units * most_splits * UNIT, np.float32)
        part_totals = np.empty(units * most_splits * UNIT, np.float32)
        for t in prange(threads):
            packed = np.empty((UNIT + 8) * dim, np.float32)
            weights = np.empty(8 * ROW, np.float32)
            for job in range(t, units * most_splits, threads):
                u = job // most_splits
                split = job % most_splits
                s, head, row = owner[u]
                rows = min(UNIT, (bounds[s + 1] - bounds[s]) * group - row)
                if split * SPLIT >= starts[s] + (row + rows - 1) // group + 1:
                    for r in range(rows):
                        part_highs[job * UNIT + r] = NEVER
                    continue
                _pack(q, bounds[s], row, rows, group, head, packed)
                _attend_split(
                    packed, rows, row, group, starts[s], split, kv, scales, quantised, tables[s], page_size,
                    page_tokens, k_at, ks_at, v_at, vs_at, head, dim, weights, parts, job * room,
                    part_highs, part_totals, job * UNIT,
                )  # fmt: skip
        sums = np.empty((UNIT + 8) * dim, np.float32)
        highs = np.empty(UNIT, np.float32)
        totals = np.empty(UNIT, np.float32)
        for u in range(units):
            s, head, row = owner[u]
            rows = min(UNIT, (bounds[s + 1] - bounds[s]) * group - row)
            highs[:] = NEVER
            for split in range(most_splits):
                job = u * most_splits + split
                _fold(rows, dim, parts, job * room, part_highs, part_totals, job * UNIT, sums, highs, totals)
            _finish(rows, row, bounds[s], group, head, dim, sums, totals, out)
    else:
        for t in prange(threads):
            packed = np.empty((UNIT + 8) * dim, np.float32)
            weights = np.empty(8 * ROW, np.float32)
            part = np.empty((UNIT + 8) * dim, np.float32)
            high = np.empty(UNIT, np.float32)
            total = np.empty(UNIT, np.float32)
            sums = np.empty((UNIT + 8) * dim, np.float32)
            highs = np.empty(UNIT, np.float32)
            totals = np.empty(UNIT, np.float32)
            for u in range(t, units, threads):
                s, head, row = owner[u]
                rows = min(UNIT, (bounds[s + 1] - bounds[s]) * group - row)
                _pack(q, bounds[s], row, rows, group, head, packed)
                highs[:] = NEVER
                last_key = starts[s] + (row + rows - 1) // group + 1
                for split in range((last_key + SPLIT - 1) // SPLIT):
                    _attend_split(
                        packed, rows, row, group, starts[s], split, kv, scales, quantised, tables[s],
                        page_size, page_tokens, k_at, ks_at, v_at, vs_at, head, dim, weights, part, 0,
                        high, total, 0,
                    )  # fmt: skip
                    _fold(rows, dim, part, 0, high, total, 0, sums, highs, totals)
                _finish(rows, row, bounds[s], group, head, dim, sums, totals, out)


@_kernel()
def _norm(line, weight, eps):
    """RMS norm of one head's row, in place; the sum of squares runs in one fixed chain."""
    dim = len(weight)
    total = np.float32(0)
    for d in range(dim):
        total = fma(line[d], line[d], total)
    factor = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
    for d in range(dim):
        line[d] = line[d] * factor * weight[d]


@_kernel()
def _rotate(line, cosine, sine):
    """Rotary embedding of the first 2 * len(cosine) values, halves paired (Su et al. 2021), in place."""
    half = len(cosine)
    for d in range(half):
        a = line[d]
        b = line[d + half]
        line[d] = fma(a, cosine[d], -(b * sine[d]))
        line[d + half] = fma(b, cosine[d], a * sine[d])


@_kernel()
def _quantise(line):
    """Scale of one row for int8: its largest magnitude, 1 for a row of zeros."""
    top = np.float32(0)
    for d in range(len(line)):
        top = max(top, abs(line[d]))
    return top if top > np.float32(1e-6) else np.float32(1)


@_kernel(parallel=True)
def write(
    qkv, q_norm, k_norm, eps, cosine, sine, kv, scales, quantised, places, positions, page_size, page_tokens,
    k_at, ks_at, v_at, vs_at, kv_heads, q_scale, threads, q,
):  # fmt: skip
    """Split projected rows into q, k, v: norm and rotate q and k, store k and v in their page slots.

    qkv: float32 [n, (heads + 2 kv_heads) * dim]; q_norm, k_norm: [dim] or empty (no norm). cosine,
    sine: [positions, dim_rotated / 2]. places: int32 [n, 2], page and slot of each row; positions: int32 [n].
    q: float32 [n, heads, dim] out, times q_scale. Layout of kv and scales as in `attend`.
    """
    n = qkv.shape[0]
    heads = q.shape[1]
    dim = q.shape[2]
    step = (n + threads - 1) // threads
    for t in prange(threads):
        line = np.empty(dim, np.float32)
        for i in range(t * step, min(n, t * step + step)):
            cos = cosine[positions[i]]
            sin = sine[positions[i]]
            for h in range(heads):
                out = q[i, h]
                for d in range(dim):
                    out[d] = qkv[i, h * dim + d]
                if len(q_norm):
                    _norm(out, q_norm, eps)
                _rotate(out, cos, sin)
                for d in range(dim):
                    out[d] *= q_scale
            page = np.int64(places[i, 0])
            slot = places[i, 1]
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
                        kv[at + d] = np.int8(
                            np.floor(qkv[i, value + d] * np.float32(127) / scale + np.float32(0.5))
                        )
                else:
                    for d in range(dim):
                        kv[at + d] = qkv[i, value + d]
