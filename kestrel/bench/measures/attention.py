"""One layer's attention beside onnxruntime's GroupQueryAttention, in turns: few rows behind a long context, and many.

Both turn q and k (RoPE), write the new rows and attend. Kestrel's time is a layer's share of an engine step (with q/k
norms where the model has them), so each layer's KV comes from memory; the operator goes round several buffers for the
same reason. Its int8 KV has fixed scales and is no counterpart of Kestrel's; so float32 is what both are held against.
"""

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np

from kestrel.bench.measures.decode import BANDWIDTH_BOUND
from kestrel.bench.measures.result import (
    Bars,
    Column,
    Observation,
    Result,
    Row,
    Target,
    common_settings,
    median,
)
from kestrel.bench.measures.setting import (
    CONTEXTS,
    filled_table,
    fitting,
    log_line,
    memory_bandwidth,
    open_engine,
)
from kestrel.config import Config
from kestrel.engine.engine import Engine, Span
from kestrel.identity import as_tokens
from kestrel.models.fetch import resolve_model
from kestrel.models.geometry import Geometry
from kestrel.store.layout import KvDtype

ROWS = (1, 4, 32, 512)
BUFFER_BYTES = 256e6  # that the operator goes round: more than any cache holds
BLOCK_STEPS = 5
COLUMNS = (
    Column("kv", "KV"),
    Column("tokens", "context", "{:,}"),
    Column("rows", "rows", "{:,}"),
    Column("ms", "Kestrel, ms", "{:.2f}"),
    Column("operator_ms", "onnxruntime float32, ms", "{:.2f}"),
    Column("ratio", "Kestrel / onnxruntime", "{:.2f}"),
    Column("gflops", "GFLOP/s", "{:,.0f}"),
    Column("read_gb_s", "reads, GB/s", "{:,.1f}"),
    Column("share", "of memory", "{:.2f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """1, 4, 32 and 512 rows that end a context of 2K, float32 and int8 KV. Full: 8K too."""
    observation = Observation(out)
    checkpoint, name = resolve_model(config.model)
    geometry = checkpoint.geometry
    longest = config.model.context_tokens or geometry.context_tokens
    contexts = fitting(CONTEXTS if full else CONTEXTS[:1], longest, 0)
    kvs: tuple[KvDtype, ...] = ("float32", "int8")
    engines = {kv: open_engine(config, checkpoint, config.engine.weights, kv, max(contexts)) for kv in kvs}
    tables = {kv: filled_table(engine, max(contexts)) for kv, engine in engines.items()}
    threads = engines["float32"].threads
    numbers = [rows for rows in ROWS if rows <= min(config.engine.chunk_tokens, min(contexts))]
    times: dict[tuple[str, int, int], list[float]] = {}
    for tokens in contexts:
        operator = Operator(geometry, tokens)
        for turn in range(config.bench.repeats + 1):
            log_line(f"attention: {tokens} tokens, round {turn} of {config.bench.repeats}")
            for rows in numbers:
                for _ in range(BLOCK_STEPS if turn and rows < 512 else 1):
                    for kv, engine in engines.items():
                        seconds = layer_seconds(engine, tables[kv], tokens, rows)
                        if turn:  # the first round compiles
                            times.setdefault((kv, tokens, rows), []).append(seconds)
                    seconds = operator.seconds(rows)
                    if turn:
                        times.setdefault(("operator", tokens, rows), []).append(seconds)
        del operator
        gc.collect()
    bandwidth = memory_bandwidth()
    found = [
        _row(engines[kv], kv, tokens, rows, times, bandwidth)
        for kv in kvs
        for tokens in contexts
        for rows in numbers
    ]
    for engine in engines.values():
        engine.close()
    targets = [
        Target(
            f"{row['rows']} rows behind {row['tokens']:,} tokens: Kestrel / onnxruntime", row["ratio"], 1.0
        )
        for row in found
        if row["rows"] == max(numbers) and row["kv"] == "float32"
    ]
    targets += [
        Target(
            f"one row, {row['kv']} KV, {row['tokens']:,} tokens: share of memory bandwidth",
            row["share"],
            BANDWIDTH_BOUND,
            at_most=False,
        )
        for row in found
        if row["rows"] == 1
    ]
    panel = Bars(
        "One layer",
        "ms",
        [f"{row['kv']} KV, {row['tokens']:,}, {row['rows']} rows" for row in found],
        {
            "Kestrel": [row["ms"] for row in found],
            "onnxruntime, float32": [row["operator_ms"] for row in found],
        },
    )
    shape = f"{geometry.num_heads}/{geometry.num_kv_heads} heads x {geometry.head_dim}"
    return observation.publish(
        Result(
            "attention",
            "Attention of one layer",
            {**common_settings(config, name, full), "kv": ", ".join(kvs), "threads": threads, "shape": shape},
            COLUMNS,
            found,
            targets,
            (panel,),
            (
                "the rows are the last ones of the context; RoPE and writing the new rows included on both sides",
                f"memory of the same run: {bandwidth / 1e9:,.1f} GB/s read by all cores",
            ),
        )
    )


class Operator:
    """onnxruntime's GroupQueryAttention for one layer and a context, on the process's thread pool."""

    def __init__(self, geometry: Geometry, context_tokens: int) -> None:
        self._geometry = geometry
        self._tokens = context_tokens
        self._session = _session(geometry, context_tokens)
        import onnxruntime as ort

        shape = (1, geometry.num_kv_heads, context_tokens, geometry.head_dim)
        random = np.random.default_rng(0)
        nbytes = 8 * geometry.num_kv_heads * context_tokens * geometry.head_dim
        number = max(1, min(geometry.num_layers, round(BUFFER_BYTES / nbytes)))
        self._buffers = [
            [ort.OrtValue.ortvalue_from_numpy(random.random(shape, np.float32)) for _ in "kv"]
            for _ in range(number)
        ]
        self._next = 0

    def seconds(self, rows: int) -> float:
        """Seconds of one run over the last `rows` rows of the context."""
        geometry = self._geometry
        keys, values = self._buffers[self._next % len(self._buffers)]
        self._next += 1
        random = np.random.default_rng(1)
        binding = self._session.io_binding()
        widths = {"q": geometry.num_heads, "k": geometry.num_kv_heads, "v": geometry.num_kv_heads}
        for name, heads in widths.items():
            binding.bind_cpu_input(name, random.random((1, rows, heads * geometry.head_dim), np.float32))
        binding.bind_cpu_input("last", np.array([self._tokens - 1], np.int32))
        binding.bind_cpu_input("total", np.array(self._tokens, np.int32))
        binding.bind_ortvalue_input("past_k", keys)
        binding.bind_ortvalue_input("past_v", values)
        binding.bind_output("out", "cpu")
        binding.bind_ortvalue_output("now_k", keys)
        binding.bind_ortvalue_output("now_v", values)
        started = time.perf_counter()
        self._session.run_with_iobinding(binding)
        return time.perf_counter() - started


def layer_seconds(engine: Engine, table: list[int], context_tokens: int, rows: int) -> float:
    """A layer's seconds of attention in a step of the last `rows` rows of a context."""
    before = engine.seconds.attention
    tokens = as_tokens(np.arange(rows) % engine.geometry.vocab_size)
    engine.forward([Span(tokens, context_tokens - rows, table)])
    return (engine.seconds.attention - before) / engine.geometry.num_layers


def _session(geometry: Geometry, context_tokens: int) -> Any:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    frequencies, _ = geometry.rope.frequencies()
    angles = np.arange(context_tokens)[:, None] * frequencies[None]
    tables = [
        numpy_helper.from_array(np.cos(angles).astype(np.float32), "cosine"),
        numpy_helper.from_array(np.sin(angles).astype(np.float32), "sine"),
    ]
    heads, groups, width = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "last", "total", "cosine", "sine"],
        ["out", "now_k", "now_v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=groups,
        do_rotary=1,
        scale=float(width**-0.5),
    )

    def value(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    cache = [1, groups, context_tokens, width]
    graph = helper.make_graph(
        [node],
        "attention",
        [
            value("q", [1, "rows", heads * width]),
            value("k", [1, "rows", groups * width]),
            value("v", [1, "rows", groups * width]),
            value("past_k", cache),
            value("past_v", cache),
            value("last", [1], TensorProto.INT32),
            value("total", [], TensorProto.INT32),
        ],
        [value("out", [1, "rows", heads * width]), value("now_k", cache), value("now_v", cache)],
        tables,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _row(
    engine: Engine,
    kv: str,
    tokens: int,
    rows: int,
    times: dict[tuple[str, int, int], list[float]],
    bandwidth: float,
) -> Row:
    seconds, operator = median(times[kv, tokens, rows]), median(times["operator", tokens, rows])
    geometry = engine.geometry
    keys = rows * (tokens - rows) + rows * (rows + 1) / 2
    read = tokens * engine.pool.layout.layer_nbytes(1) / seconds
    return {
        "kv": kv,
        "tokens": tokens,
        "rows": rows,
        "ms": seconds * 1e3,
        "operator_ms": operator * 1e3,
        "ratio": seconds / operator,
        "gflops": 4 * geometry.num_heads * geometry.head_dim * keys / seconds / 1e9,
        "read_gb_s": read / 1e9 if rows == 1 else None,
        "share": read / bandwidth if rows == 1 else None,
    }
