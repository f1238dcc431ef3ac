"""Prompt tokens a second by length of prompt and weights, and where the time goes: matrices, attention, the head."""

import time
from dataclasses import replace
from pathlib import Path

from kestrel.bench.measures.result import (
    Bars,
    Column,
    Observation,
    Result,
    Row,
    common_settings,
    median,
)
from kestrel.bench.measures.setting import (
    CONTEXTS,
    Prompts,
    filled_table,
    fitting,
    log_line,
    matmul_flops,
    open_engine,
)
from kestrel.config import Config
from kestrel.engine.engine import Engine, Span, StepSeconds
from kestrel.identity import as_tokens
from kestrel.models.fetch import resolve_model
from kestrel.store.layout import KvDtype

LENGTHS = (512, *CONTEXTS)
COLUMNS = (
    Column("weights", "weights"),
    Column("kv", "KV"),
    Column("tokens", "prompt", "{:,}"),
    Column("rate", "tok/s", "{:,.0f}"),
    Column("ms", "ms", "{:,.0f}"),
    Column("graphs_ms", "matrices, ms", "{:,.0f}"),
    Column("attention_ms", "attention, ms", "{:,.0f}"),
    Column("gflops", "GFLOP/s", "{:,.0f}"),
    Column("share", "of float32 matmul", "{:.2f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """512 and 2K tokens with the configured weights and KV. Full: 8K too, int8 and int4 weights, both KV dtypes."""
    observation = Observation(out)
    checkpoint, name = resolve_model(config.model)
    longest = config.model.context_tokens or checkpoint.geometry.context_tokens
    lengths = fitting(LENGTHS if full else LENGTHS[:2], longest, 0)
    weights = ("int8", "int4") if full else (config.engine.weights,)
    kvs: tuple[KvDtype, ...] = ("float32", "int8")
    variants = [(w, kv) for w in weights for kv in kvs if full or kv == config.engine.kv]
    engines = {(w, kv): open_engine(config, checkpoint, w, kv, max(lengths)) for w, kv in variants}
    tables = {variant: filled_table(engine, max(lengths)) for variant, engine in engines.items()}
    prompts = Prompts(checkpoint.geometry.vocab_size)
    times: dict[tuple[str, str, int], list[tuple[float, StepSeconds]]] = {}
    for turn in range(config.bench.repeats + 1):
        for length in lengths:
            for variant in variants if turn % 2 else variants[::-1]:
                if turn == 0 and length > lengths[0]:
                    continue  # one short round compiles the kernels
                log_line(f"prefill: {length} tokens, {variant[0]} weights, {variant[1]} KV")
                measured = prefill_seconds(engines[variant], tables[variant], prompts(length))
                if turn:
                    times.setdefault((*variant, length), []).append(measured)
    peak = matmul_flops()
    rows = [
        _row(engines[w, kv], w, kv, length, times[w, kv, length], peak)
        for w, kv in variants
        for length in lengths
    ]
    for engine in engines.values():
        engine.close()
    panel = Bars(
        "Prefill",
        "tok/s",
        [f"{row['weights']}, {row['kv']} KV, {row['tokens']:,}" for row in rows],
        {"tokens a second": [row["rate"] for row in rows]},
    )
    parts = Bars(
        "Where the time of a token goes",
        "ms a token",
        panel.labels,
        {
            "matrices": [row["graphs_ms"] / row["tokens"] for row in rows],
            "attention": [row["attention_ms"] / row["tokens"] for row in rows],
        },
    )
    return observation.publish(
        Result(
            "prefill",
            "Prompt tokens a second",
            {
                **common_settings(config, name, full),
                "weights": ", ".join(weights),
                "kv": ", ".join(dict.fromkeys(kv for _, kv in variants)),
                "chunk": config.engine.chunk_tokens,
            },
            COLUMNS,
            rows,
            (),
            (panel, parts),
            (
                "caliber: prefill, computing alone, the engine without store and server",
                f"float32 matmul of the same run: {peak / 1e9:,.0f} GFLOP/s",
                "beside llama.cpp: `kestrel bench peer`",
            ),
        )
    )


def prefill_seconds(engine: Engine, table: list[int], tokens: list[int]) -> tuple[float, StepSeconds]:
    """Seconds to compute a prompt in steps of `chunk_tokens`, with the logits after its last token."""
    before = replace(engine.seconds)
    started = time.perf_counter()
    for first in range(0, len(tokens), engine.chunk_tokens):
        chunk = as_tokens(tokens[first : first + engine.chunk_tokens])
        engine.forward([Span(chunk, first, table, int(first + len(chunk) == len(tokens)))])
    return time.perf_counter() - started, engine.seconds - before


def _row(
    engine: Engine,
    weights: str,
    kv: str,
    tokens: int,
    times: list[tuple[float, StepSeconds]],
    peak: float,
) -> Row:
    seconds = median([total for total, _ in times])
    geometry = engine.geometry
    embedding = geometry.vocab_size * geometry.hidden_size
    matrices = 2 * (geometry.num_parameters - embedding * (1 if geometry.tied_head else 2)) * tokens
    attention = 2 * geometry.num_layers * geometry.num_heads * geometry.head_dim * tokens * (tokens + 1)
    flops = (matrices + attention) / seconds
    return {
        "weights": weights,
        "kv": kv,
        "tokens": tokens,
        "rate": tokens / seconds,
        "ms": seconds * 1e3,
        "graphs_ms": median([spent.graphs for _, spent in times]) * 1e3,
        "attention_ms": median([spent.attention for _, spent in times]) * 1e3,
        "gflops": flops / 1e9,
        "share": flops / peak,
    }
