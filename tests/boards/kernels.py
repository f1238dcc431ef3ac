"""What the kernels of one board compute from fixed inputs, without a model: digests by name, as JSON on stdout.

Equal digests on two boards are equal bits. For the GEMMs also: from how many rows on a row's result does not depend
on the rows beside it (null: from no number tried). Runs under an emulator, so it is small and needs nothing but numpy,
numba and onnxruntime.
"""

import json
import platform
import time

import numpy as np
import xxhash
from llvmlite import binding

from kestrel.engine.attention import Attention
from kestrel.engine.layers import Graph, share_resources
from kestrel.engine.pool import PagePool
from kestrel.models.geometry import Rope
from kestrel.models.quantisation import BLOCK_SIZE, num_blocks
from kestrel.models.weights import Linear
from kestrel.store.layout import PageLayout

THREADS = 2
COLUMNS = 96
PAGE = 128


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 in [-1, 1): multiples of 2^-23, the same on every machine."""
    return np.random.default_rng(seed).random(shape, np.float32) * np.float32(2) - np.float32(1)


def digest(*arrays: np.ndarray) -> str:
    whole = xxhash.xxh3_128()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def attend(kv_dtype: str, dim: int, group: int, context: int = 700) -> str:
    """Keys and values of a context written to pages, then steps of 1 to 70 rows over it; 1 and 2 threads."""
    layout = PageLayout(1, 2, dim, kv_dtype)
    num_pages = -(-context // PAGE)
    pool = PagePool(layout, PAGE, num_pages * layout.page_nbytes(PAGE))
    heads = 2 * group
    positions = np.arange(context, dtype=np.int32)
    places = np.stack([positions // PAGE, positions % PAGE], 1).astype(np.int32)
    cosine, sine = uniform(context, dim // 2, seed=1), uniform(context, dim // 2, seed=2)
    norm = uniform(dim, seed=3)
    qkv = uniform(context, (heads + 4) * dim)
    table = np.arange(num_pages, dtype=np.int32)[None]
    outs: list[np.ndarray] = []
    for rows in (context, 1, 2, 3, 31, 70):
        several = []
        for threads in (1, THREADS):
            kernel = Attention(
                pool, heads, [(norm, norm)], cosine, sine, 1e-6, 0.3, max_rows=rows, threads=threads
            )
            graph = Graph()
            session = graph.session(
                {"qkv": qkv.shape[1]}, {graph.attention("qkv", kernel.record(0), "out"): heads * dim}
            )
            start = context - rows
            kernel.plan(
                np.array([0, rows]), np.array([start]), table, places[start:], positions[start:], rows
            )
            several.append(session.run(None, {"qkv": qkv[start:]})[0])
        if several[0].tobytes() != several[1].tobytes():
            raise SystemExit(
                f"attention of {rows} rows, {kv_dtype}: 1 and {THREADS} threads give different bits"
            )
        if rows == context:
            outs += [kernel.q.copy(), *(pool.layer_block(page, 0).copy() for page in range(num_pages))]
        outs.append(several[0])
    if any(a[-1].tobytes() != outs[-1][-1].tobytes() for a in outs[-6:]):
        raise SystemExit(f"attention, {kv_dtype}: the last row depends on the number of rows")
    return digest(*outs)


def gemm(bits: int, length: int) -> tuple[str, int | None]:
    """Digest of 64 rows through one matrix, and the fewest rows from which on a row's bits are always the same."""
    if bits == 32:
        matrix = Linear(32, length, COLUMNS, uniform(length, COLUMNS), None)
    else:
        blocks = num_blocks(length)
        values = np.random.default_rng(5).integers(
            0, 256, (COLUMNS, blocks, BLOCK_SIZE * bits // 8), np.uint8
        )
        matrix = Linear(bits, length, COLUMNS, values, uniform(COLUMNS, blocks) * np.float32(1 / 64))
    graph = Graph()
    out = graph.linear("x", matrix, "matrix")
    session = graph.session({"x": length}, {out: COLUMNS})
    x = uniform(64, length, seed=6)
    reference = session.run(None, {"x": x})[0]

    def same(rows: int) -> bool:
        return all(
            session.run(None, {"x": x[first : first + rows]})[0].tobytes()
            == reference[first : first + rows].tobytes()
            for first in (0, 17)
        )

    good = {rows: same(rows) for rows in (*range(1, 18), 24, 31, 32, 33, 40, 47)}
    least = next((n for n in (1, 2, 4, 8) if all(ok for rows, ok in good.items() if rows >= n)), None)
    return digest(reference), least


def elementwise() -> dict[str, str]:
    """The other operators of a layer."""
    width = 192
    graph = Graph()
    graph.norm("a", uniform(width, seed=1), "norm", 1e-5)
    graph.add_norm("a", "norm.out", uniform(width, seed=2), "add_norm", 1e-5, "")
    graph.swiglu("b")
    session = graph.session(
        {"a": width, "b": 2 * width}, {"norm.out": width, "add_norm.out": width, "swiglu.out": width}
    )
    outs = session.run(None, {"a": uniform(9, width), "b": uniform(9, 2 * width) * np.float32(6)})
    return dict(zip(("norm", "norm of a sum", "swiglu"), map(digest, outs), strict=True))


def rope() -> str:
    """Cosines and sines as engine/rope.py makes them."""
    frequencies, factor = Rope(10000.0, 64, None).frequencies()
    angles = np.arange(8192, dtype=np.float64)[:, None] * frequencies
    return digest((np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32))


def main() -> None:
    started = time.perf_counter()
    share_resources(THREADS)
    digests = {
        f"attention, {kv} KV, head_dim {dim}, {group} heads a KV head": attend(kv, dim, group)
        for kv in ("float32", "int8")
        for dim, group in ((64, 3), (128, 2))
    }
    attention_seconds = time.perf_counter() - started
    digests["rotary table"] = rope()
    digests.update(elementwise())
    least = {}
    for bits in (32, 8, 4):
        for length in (64, 192, 576, 1024):
            name = f"{'float32' if bits == 32 else f'int{bits}'} GEMM, {length} long"
            digests[name], least[name] = gemm(bits, length)
    facts = {
        "machine": platform.machine(),
        "cpu": binding.get_host_cpu_name(),
        "seconds": time.perf_counter() - started,
        "attention_seconds": attention_seconds,
    }
    print(json.dumps({"facts": facts, "digests": digests, "least_rows": least}))


if __name__ == "__main__":
    main()
