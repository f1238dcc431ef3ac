"""What this CPU's kernels compute, measured: the numerics part of the identity, and whether rows are independent.

Instruction sets round differently, so nothing is declared: a probe of fixed inputs goes through the
operators, bit widths and reduction lengths of the model and its output bits are hashed. A second check
runs the real graphs with few and many rows; where a lone row differs from the same row among others,
steps are padded to the fewest rows that do not.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kestrel.engine.layers import Floats, Graph, LayerGraphs, head_session, projection
from kestrel.engine.pool import PagePool
from kestrel.engine.rope import rope_table
from kestrel.models.geometry import Experts, Geometry
from kestrel.models.quantisation import BLOCK_SIZE, num_blocks
from kestrel.models.weights import Linear, Weights
from kestrel.store.layout import KvDtype, PageLayout

MOST_LEAST_ROWS = 8  # the most rows a step is ever padded to
# First row and number of rows that are run apart from the rest.
_COMPANIES = ((0, 1), (17, 1), (5, 2), (17, 3), (0, 4), (17, 5), (9, 8), (17, 13))
_TIMED = 6  # runs of the reference, of which the quickest counts
_HEAD_OUTPUTS = 4096  # that are run; all of a vocabulary of 150,000 take 20 ms a time
_PROBE_COLUMNS = 96  # outputs computed per operator: enough to fill and overflow any kernel's tile
_PROBE_POSITIONS = 1024


@dataclass(frozen=True)
class Numerics:
    """Findings about this CPU for one model.

    digest: hex, equal on two boards whose kernels round alike. least_rows: rows every graph run must
    have for a row's result not to depend on its company. exact: whether such a number was found. flops: operations
    a second in matrix products of a few dozen rows, roughly what a prompt is computed at.
    """

    digest: str
    least_rows: int
    exact: bool
    flops: float


def measure(weights: Weights, kv_dtype: KvDtype, graphs: LayerGraphs) -> Numerics:
    """Probe the kernels and check that rows are independent; milliseconds for small models."""
    least, flops = least_rows(graphs)
    rows = least or 1
    return Numerics(probe(weights, kv_dtype, rows), rows, least is not None, flops)


def least_rows(graphs: LayerGraphs) -> tuple[int | None, float]:
    """Fewest rows (1, 2, 4 or 8) from which on the graphs give every row the same bits in any company; None if none.

    Runs a projection and the end of the real model, with part of its head, on fixed inputs; also returned is how many
    operations a second that took. Experts meet few of a step's rows, so they are padded too: graphs.least_expert_rows
    is left at the number found.
    """
    geometry = graphs.geometry
    held = graphs.weights.layers[min(1, geometry.num_layers - 1)]
    inputs = (
        _pattern((128, geometry.hidden_size)),
        _pattern((128, geometry.num_heads * geometry.head_dim)),
    )
    largest = min(32, graphs.max_rows)
    graph = Graph()
    hidden = graph.norm("residual", held.input_norm, "norm", geometry.norm_eps)
    qkv = projection(graph, held, hidden)
    session = graph.session({"residual": geometry.hidden_size}, {qkv: held.qkv.out_features})

    head = head_session(graphs.weights, _HEAD_OUTPUTS)

    def run(first: int, rows: int) -> list[npt.NDArray[Any]]:
        residual, attended = (x[first : first + rows] for x in inputs)
        graphs.fill_last(residual, attended)
        return [session.run(None, {"residual": residual})[0], graphs.logits(range(rows), rows, head)]

    def differs(first: int, rows: int) -> bool:
        return any(
            not np.array_equal(alone.view(np.int32), among[first : first + rows].view(np.int32))
            for alone, among in zip(run(first, rows), reference, strict=True)
        )

    last = graphs.weights.layers[-1]
    mlp = last.mlps[0].gate_up.size + last.mlps[0].down.size
    numbers = held.qkv.size + last.o.size + mlp * (geometry.experts.num_used if geometry.experts else 1)
    numbers += min(_HEAD_OUTPUTS, geometry.vocab_size) * geometry.hidden_size
    shortest = math.inf
    found = None
    for least in (1, 2, 4, MOST_LEAST_ROWS):
        graphs.least_expert_rows = least
        for _ in range(_TIMED):
            started = time.perf_counter()
            reference = run(0, largest)
            shortest = min(shortest, time.perf_counter() - started)
        tried = [(first, n) for first, n in _COMPANIES if n >= least and first + n <= largest]
        if not any(differs(first, rows) for first, rows in tried):
            found = least
            break
    return found, 2 * largest * numbers / shortest


def probe(weights: Weights, kv_dtype: KvDtype, rows: int) -> str:
    """Hash (hex xxh3_128) of what the operators in use make of fixed inputs."""
    geometry = weights.geometry
    outputs: list[npt.NDArray[Any]] = []
    layer = weights.layers[0]
    linears = [layer.qkv, layer.o, layer.mlps[0].down, weights.head]
    linears += [] if layer.router is None else [layer.router]
    matrices = {(linear.bits, linear.in_features) for linear in linears}
    for bits, length in sorted(matrices):
        graph = Graph()
        out = graph.linear("x", _pattern_linear(bits, length), "probe")
        session = graph.session({"x": length}, {out: _PROBE_COLUMNS})
        outputs += [session.run(None, {"x": _pattern((n, length))})[0] for n in (rows, rows + 4)]
    graph = Graph()
    ones = _pattern((geometry.hidden_size,))
    graph.norm("a", ones, "norm", geometry.norm_eps)
    graph.add_norm("a", "norm.out", ones, "add_norm", geometry.norm_eps, "")
    graph.swiglu("b")
    session = graph.session(
        {"a": geometry.hidden_size, "b": 2 * geometry.ffn_size},
        {"add_norm.out": geometry.hidden_size, "swiglu.out": geometry.ffn_size},
    )
    outputs += session.run(
        None,
        {"a": _pattern((5, geometry.hidden_size)), "b": np.float32(4) * _pattern((5, 2 * geometry.ffn_size))},
    )
    if geometry.experts is not None:
        outputs += _probe_router(geometry.experts)
    outputs += rope_table(geometry, 0, _PROBE_POSITIONS)
    outputs += _probe_attention(geometry, kv_dtype)
    digest = xxhash.xxh3_128()
    for array in outputs:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _probe_router(experts: Experts) -> list[npt.NDArray[Any]]:
    """Which experts are chosen for 5 rows of scores, and their shares."""
    graph = Graph()
    chosen, shares = graph.choose("scores", experts)
    session = graph.session(
        {"scores": experts.num_experts}, {chosen: experts.num_used, shares: experts.num_used}
    )
    outputs: list[npt.NDArray[Any]] = session.run(
        None, {"scores": np.float32(4) * _pattern((5, experts.num_experts))}
    )
    return outputs


def _probe_attention(geometry: Geometry, kv_dtype: KvDtype) -> list[npt.NDArray[Any]]:
    """Keys and values of 600 positions written to pages, and the attention of the last 5 over them."""
    from kestrel.engine.attention import Attention

    heads = geometry.num_heads // geometry.num_kv_heads
    dim, rows = geometry.head_dim, 600  # past one split of keys
    pool = PagePool(
        PageLayout(1, 1, dim, kv_dtype), 128, 5 * PageLayout(1, 1, dim, kv_dtype).page_nbytes(128)
    )
    qkv = _pattern((rows, (heads + 2) * dim))
    positions = np.arange(rows, dtype=np.int32)
    norm = np.zeros(0, np.float32)
    if geometry.qk_norm:
        norm = _pattern((dim,))
    places = np.stack([positions // 128, positions % 128], 1).astype(np.int32)
    attention = Attention(
        pool,
        heads,
        [(norm, norm)],
        *rope_table(geometry, 0, rows),
        geometry.norm_eps,
        dim**-0.5,
        max_rows=rows,
        threads=2,
    )
    graph = Graph()
    session = graph.session(
        {"qkv": qkv.shape[1]}, {graph.attention("qkv", attention.record(0), "out"): heads * dim}
    )
    table = np.arange(5, dtype=np.int32)[None]
    for start, end in ((0, rows - 5), (rows - 5, rows)):
        attention.plan(
            np.array([0, end - start]),
            np.array([start]),
            table,
            places[start:end],
            positions[start:end],
            end - start,
        )
        out = session.run(None, {"qkv": qkv[start:end]})[0]
    return [attention.q[:5], out, *(pool.layer_block(page, 0).copy() for page in range(5))]


def _pattern(shape: tuple[int, ...]) -> Floats:
    """Fixed float32 numbers in [-1, 1), multiples of 2^-15, the same on every machine."""
    mixed = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    values: Floats = (mixed >> np.uint32(8) & np.uint32(0xFFFF)).astype(np.float32)
    return (values * np.float32(2**-15) - np.float32(1)).reshape(shape)


def _pattern_linear(bits: Any, length: int) -> Linear:
    """A fixed matrix [_PROBE_COLUMNS, length] as the engine's GEMM takes it."""
    if bits == 32:
        return Linear(32, length, _PROBE_COLUMNS, _pattern((length, _PROBE_COLUMNS)), None)
    blocks = num_blocks(length)
    values = (
        _pattern((_PROBE_COLUMNS, blocks, BLOCK_SIZE * bits // 8)) * np.float32(128) + np.float32(128)
    ).astype(np.uint8)
    return Linear(
        bits, length, _PROBE_COLUMNS, values, _pattern((_PROBE_COLUMNS, blocks)) * np.float32(1 / 64)
    )
