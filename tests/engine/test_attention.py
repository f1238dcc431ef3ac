"""The attention kernel computes softmax attention, for any head geometry, from float32 and int8 pages."""

import numpy as np
import pytest

from kestrel.engine.attention import LOG2E, Attention
from kestrel.engine.layers import Graph
from kestrel.engine.pool import PagePool
from kestrel.store.layout import PageLayout
from tests.engine.conftest import EngineOf


@pytest.fixture(autouse=True)
def threads(engine_of: EngineOf) -> None:
    """onnxruntime has the threads of an engine."""
    engine_of("qwen3", "int8", "float32")


def attended(heads: int, kv_heads: int, dim: int, kv_dtype: str, rows: int, page_tokens: int) -> tuple:
    """A pool that holds `rows` random rows, their pages, q, what K and V they stand for (dequantised), the result."""
    layout = PageLayout(1, kv_heads, dim, kv_dtype)
    pages = -(-rows // page_tokens)
    pool = PagePool(layout, page_tokens, (pages + 2) * layout.page_nbytes(page_tokens))
    table = np.array([pool.allocate() for _ in range(pages + 1)][:0:-1], np.int32)  # not in order
    random = np.random.default_rng(5)
    qkv = random.standard_normal((rows, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    positions = np.arange(rows, dtype=np.int32)
    places = np.stack([table[positions // page_tokens], positions % page_tokens], 1).astype(np.int32)
    none = np.zeros(0, np.float32)
    still = np.ones((rows, dim // 2), np.float32), np.zeros((rows, dim // 2), np.float32)  # no rotation
    kernel = Attention(pool, heads, [(none, none)], *still, 1e-6, dim**-0.5 * LOG2E, rows, 2)
    graph = Graph()
    session = graph.session(
        {"qkv": qkv.shape[1]}, {graph.attention("qkv", kernel.record(0), "out"): heads * dim}
    )
    kernel.plan(np.array([0, rows]), np.array([0]), table[None], places, positions, rows)
    out = session.run(None, {"qkv": qkv})[0].reshape(rows, heads, dim)
    k, v = (
        qkv[:, at : at + kv_heads * dim].reshape(rows, kv_heads, dim).astype(np.float64)
        for at in (heads * dim, (heads + kv_heads) * dim)
    )
    if kv_dtype == "int8":
        k, v = (
            np.floor(x * 127 / np.abs(x).max(-1, keepdims=True) + 0.5)
            * np.abs(x).max(-1, keepdims=True)
            / 127
            for x in (k, v)
        )
    return pool, table, kernel.q, k, v, out


@pytest.mark.parametrize("kv_dtype, tolerance", [("float32", 2e-6), ("int8", 2e-4)])
@pytest.mark.parametrize(
    "heads, kv_heads, dim", [(16, 8, 128), (9, 3, 64), (4, 2, 80), (8, 1, 32), (6, 2, 20), (14, 2, 64)]
)
def test_attention_equals_float64_softmax_attention(
    heads: int, kv_heads: int, dim: int, kv_dtype: str, tolerance: float
) -> None:
    rows, page_tokens = 700, 128
    _, _, q, k, v, out = attended(heads, kv_heads, dim, kv_dtype, rows, page_tokens)
    for row in (0, 1, 127, 128, 300, 511, 512, 699):
        for head in range(heads):
            scores = k[: row + 1, head // (heads // kv_heads)] @ q[row, head].astype(np.float64)
            weights = np.exp2(scores - scores.max())
            expected = (weights / weights.sum()) @ v[: row + 1, head // (heads // kv_heads)]
            assert np.abs(out[row, head] - expected).max() < tolerance


def test_int8_rows_are_the_nearest_steps_of_their_scale() -> None:
    pool, table, *_ = attended(4, 2, 32, "int8", 100, 128)
    k, k_scale, _, v_scale = (array for array, _ in pool.layer_arrays(int(table[0]), 0))
    assert np.abs(k[:, :, :100]).max(1).min() == 127  # the largest value of each row takes the last step
    assert (k_scale[:, :100] > 0).all() and (v_scale[:, :100] > 0).all()
