"""Answer tokens a second at several contexts, weights and KV dtypes, and the memory bandwidth of attention."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

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
from kestrel.engine.engine import Engine, Span, StepSeconds
from kestrel.identity import as_tokens
from kestrel.models.fetch import resolve_model
from kestrel.store.layout import KvDtype

LENGTHS = (128, *CONTEXTS)
BLOCK_TOKENS = 24  # steps of a variant before it is another one's turn
BANDWIDTH_BOUND = 0.6  # of what the machine reads, for attention of one row behind a long context
COLUMNS = (
    Column("weights", "weights"),
    Column("kv", "KV"),
    Column("tokens", "context", "{:,}"),
    Column("rate", "tok/s", "{:,.1f}"),
    Column("ms", "ms a token", "{:,.2f}"),
    Column("graphs_ms", "matrices, ms", "{:,.2f}"),
    Column("attention_ms", "attention, ms", "{:,.2f}"),
    Column("head_ms", "head, ms", "{:,.2f}"),
    Column("attention_gb_s", "attention reads, GB/s", "{:,.1f}"),
    Column("share", "of memory", "{:.2f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """Contexts of 128 and 2K, float32 and int8 KV, the configured weights. Full: 8K too, int8 and int4 weights."""
    observation = Observation(out)
    checkpoint, name = resolve_model(config.model)
    longest = config.model.context_tokens or checkpoint.geometry.context_tokens
    lengths = fitting(LENGTHS if full else LENGTHS[:2], longest, 1)
    weights = ("int8", "int4") if full else (config.engine.weights,)
    kvs: tuple[KvDtype, ...] = ("float32", "int8")
    variants = [(w, kv) for w in weights for kv in kvs]
    engines = {(w, kv): open_engine(config, checkpoint, w, kv, max(lengths) + 1) for w, kv in variants}
    tables = {variant: filled_table(engine, max(lengths) + 1) for variant, engine in engines.items()}
    times: dict[tuple[str, str, int], list[tuple[float, StepSeconds]]] = {}
    for turn in range(config.bench.repeats + 1):
        log_line(f"decode: round {turn} of {config.bench.repeats}")
        for length in lengths:
            for variant in variants if turn % 2 else variants[::-1]:
                steps = BLOCK_TOKENS if turn else 2  # the first round compiles the kernels
                measured = [step_seconds(engines[variant], tables[variant], length) for _ in range(steps)]
                if turn:
                    times.setdefault((*variant, length), []).extend(measured)
    bandwidth = memory_bandwidth()
    rows = [
        _row(engines[w, kv], w, kv, length, times[w, kv, length], bandwidth)
        for w, kv in variants
        for length in lengths
    ]
    for engine in engines.values():
        engine.close()
    targets = [
        Target(
            f"attention of one row, {row['kv']} KV, {row['weights']} weights, {row['tokens']:,} tokens: share of "
            "memory bandwidth",
            row["share"],
            BANDWIDTH_BOUND,
            at_most=False,
        )
        for row in rows
        if row["tokens"] == max(lengths)
    ]
    labels = [f"{row['weights']}, {row['kv']} KV, {row['tokens']:,}" for row in rows]
    panels = (
        Bars("Decode", "tok/s", labels, {"tokens a second": [row["rate"] for row in rows]}),
        Bars(
            "Where the time of a token goes",
            "ms",
            labels,
            {
                "matrices": [row["graphs_ms"] for row in rows],
                "attention": [row["attention_ms"] for row in rows],
                "head": [row["head_ms"] for row in rows],
            },
        ),
    )
    return observation.publish(
        Result(
            "decode",
            "Answer tokens a second",
            {
                **common_settings(config, name, full),
                "weights": ", ".join(weights),
                "kv": ", ".join(kvs),
                "steps": BLOCK_TOKENS * config.bench.repeats,
            },
            COLUMNS,
            rows,
            targets,
            panels,
            (
                "caliber: a step of the engine with one row, without sampling and server",
                f"memory of the same run: {bandwidth / 1e9:,.1f} GB/s read by all cores",
                "beside llama.cpp: `kestrel bench peer`",
            ),
        )
    )


def step_seconds(engine: Engine, table: list[int], context_tokens: int) -> tuple[float, StepSeconds]:
    """Seconds of a step with one row behind so many tokens, and their parts."""
    before = replace(engine.seconds)
    span = Span(as_tokens(np.array([5])), context_tokens, table, 1)
    started = time.perf_counter()
    engine.forward([span])
    return time.perf_counter() - started, engine.seconds - before


def _row(
    engine: Engine,
    weights: str,
    kv: str,
    tokens: int,
    times: list[tuple[float, StepSeconds]],
    bandwidth: float,
) -> Row:
    seconds = median([total for total, _ in times])
    attention = median([spent.attention for _, spent in times])
    read = (tokens + 1) * engine.pool.layout.page_nbytes(1) / attention
    return {
        "weights": weights,
        "kv": kv,
        "tokens": tokens,
        "rate": 1 / seconds,
        "ms": seconds * 1e3,
        "graphs_ms": median([spent.graphs for _, spent in times]) * 1e3,
        "attention_ms": attention * 1e3,
        "head_ms": median([spent.head for _, spent in times]) * 1e3,
        "attention_gb_s": read / 1e9,
        "share": read / bandwidth,
    }
