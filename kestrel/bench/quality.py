"""What int8 KV and quantised weights cost in quality, on real text, and what int8 KV gains in speed at long context.

The text is Python's own language reference (`pydoc_data.topics`). Two engines compute the same tokens step by step
and their distributions are compared row by row: a candidate's perplexity beside that of its reference, the mean
Kullback-Leibler divergence from the reference's distribution, and how often both prefer the same token.
"""

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from kestrel.bench.measures.setting import filled_table, new_table, open_engine
from kestrel.bench.prompts import manual
from kestrel.config import Config
from kestrel.engine.engine import Engine, Span
from kestrel.engine.layers import Floats
from kestrel.identity import Tokens, as_tokens
from kestrel.log import Log
from kestrel.models.checkpoint import Checkpoint
from kestrel.models.fetch import resolve_model
from kestrel.store.layout import KvDtype, PageLayout

OUT = Path("artifacts/bench/quality")
NUM_TOKENS = 4096  # of text whose next token is predicted
WINDOW_TOKENS = 2048  # tokens computed in one context; shorter where the model's own context is
SPEED_CONTEXT_TOKENS = 8192
SPEED_TAIL_TOKENS = 31
_SPEED_ROUNDS = 15
_STEP_ROWS = 128  # rows whose distributions are held at once: 50 MB for a vocabulary of 49152

Variant = tuple[str, KvDtype]  # weights, KV


@dataclass(frozen=True)
class Quality:
    """A candidate beside its reference, over the same tokens.

    perplexities: exp of the mean negative log likelihood of the next token. kl: mean divergence of the candidate's
    distribution from the reference's, in nats. top1: share of rows in which both have the same most likely token.
    """

    weights: str
    kv: str
    reference_weights: str
    reference_kv: str
    num_tokens: int
    reference_perplexity: float
    perplexity: float
    kl: float
    top1: float

    @property
    def perplexity_change(self) -> float:
        """Relative to the reference: 0.004 is 0.4 % more."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class KvSpeed:
    """Median milliseconds of a step over a long context, measured in turns: a decode step and a short prompt's tail."""

    weights: str
    context_tokens: int
    tail_tokens: int
    decode_ms: dict[str, float]  # by KV dtype
    tail_ms: dict[str, float]


@dataclass(frozen=True)
class QualityReport:
    """All that `kestrel bench quality` measures of one model."""

    model: str
    kv_bytes_per_token: dict[str, int]  # by KV dtype
    qualities: list[Quality]
    speed: KvSpeed


def run(config: Config, out: Path = OUT, log: Log = print) -> QualityReport:
    """Measure the configured model, print the tables and write them below `out` as JSON and Markdown."""
    checkpoint, name = resolve_model(config.model, log)
    weights = config.engine.weights
    pairs: list[tuple[Variant, Variant]] = [((weights, "float32"), (weights, "int8"))]
    pairs += [(("float32", "float32"), (other, "float32")) for other in ("int8", "int4")]
    tokens = text_tokens(checkpoint, NUM_TOKENS)
    qualities = []
    for reference, candidate in pairs:
        log(f"[QUALITY] {_shown(candidate)} against {_shown(reference)}: {len(tokens)} tokens")
        qualities.append(compare(config, checkpoint, reference, candidate, tokens))
    log(f"[QUALITY] speed at {SPEED_CONTEXT_TOKENS} tokens")
    geometry = checkpoint.geometry
    report = QualityReport(
        model=name,
        kv_bytes_per_token={
            dtype: PageLayout(
                geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, dtype
            ).page_nbytes(1)
            for dtype in ("float32", "int8")
        },
        qualities=qualities,
        speed=measure_speed(config, checkpoint),
    )
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quality.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    (folder / "quality.md").write_text(markdown(report), encoding="utf-8")
    print(f"\n{markdown(report)}\n{folder}: quality.md, quality.json")
    print(
        "Try next:\n"
        "  kestrel bench quality engine=int4   # int8 KV below other weights\n"
        "  kestrel serve engine.kv=int8        # a quarter of the memory for keys and values"
    )
    return report


def text_tokens(checkpoint: Checkpoint, count: int) -> Tokens:
    """The first `count` tokens of the language reference."""
    tokenizer = checkpoint.tokenizer()
    characters = 4 * count
    while len(tokens := tokenizer.encode(manual(characters))) < count:
        characters *= 2
    return as_tokens(tokens[:count])


def compare(
    config: Config, checkpoint: Checkpoint, reference: Variant, candidate: Variant, tokens: Tokens
) -> Quality:
    """Run both variants over `tokens` in contexts of WINDOW_TOKENS, in step."""
    window = min(WINDOW_TOKENS, checkpoint.geometry.context_tokens)
    engines = [
        open_engine(config, checkpoint, *variant, window, _STEP_ROWS) for variant in (reference, candidate)
    ]
    likelihoods = np.zeros(2)
    kl = agreed = 0.0
    rows = 0
    for first in range(0, len(tokens), window):
        context = tokens[first : first + window]
        tables = [new_table(engine, len(context)) for engine in engines]
        for start in range(0, len(context) - 1, _STEP_ROWS):
            step = context[start : min(start + _STEP_ROWS, len(context) - 1)]
            following = context[start + 1 : start + 1 + len(step)]
            logs = [
                _log_softmax(engine.forward([Span(step, start, table, len(step))]))
                for engine, table in zip(engines, tables, strict=True)
            ]
            likelihoods += [float(log[np.arange(len(step)), following].sum(dtype=np.float64)) for log in logs]
            kl += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(dtype=np.float64))
            agreed += float((logs[0].argmax(1) == logs[1].argmax(1)).sum())
            rows += len(step)
        for engine, table in zip(engines, tables, strict=True):
            for page in table:
                engine.pool.release(page)
    _close(engines)
    before, after = np.exp(-likelihoods / rows)
    return Quality(*candidate, *reference, rows, float(before), float(after), kl / rows, agreed / rows)


def measure_speed(config: Config, checkpoint: Checkpoint) -> KvSpeed:
    """Time steps of one row and of a tail behind a context that is there already, float32 and int8 KV in turns."""
    context = min(SPEED_CONTEXT_TOKENS, checkpoint.geometry.context_tokens)
    dtypes: tuple[KvDtype, ...] = ("float32", "int8")
    weights = config.engine.weights
    engines = {
        dtype: open_engine(config, checkpoint, weights, dtype, context, SPEED_TAIL_TOKENS + 1)
        for dtype in dtypes
    }
    tables = {dtype: filled_table(engine, context) for dtype, engine in engines.items()}
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(_SPEED_ROUNDS + 1):
        for dtype in dtypes if turn % 2 else reversed(dtypes):
            for rows in (1, SPEED_TAIL_TOKENS):
                tokens = as_tokens(np.arange(rows) % checkpoint.geometry.vocab_size)
                span = Span(tokens, context - rows, tables[dtype], 1)
                started = time.perf_counter()
                engines[dtype].forward([span])
                if turn:  # the first one compiles and binds
                    seconds.setdefault((dtype, rows), []).append(time.perf_counter() - started)
    _close(list(engines.values()))
    decode, tail = (
        {str(dtype): 1e3 * statistics.median(seconds[dtype, rows]) for dtype in dtypes}
        for rows in (1, SPEED_TAIL_TOKENS)
    )
    return KvSpeed(weights, context, SPEED_TAIL_TOKENS, decode, tail)


def markdown(report: QualityReport) -> str:
    """The report as Markdown tables."""
    float32, int8 = (report.kv_bytes_per_token[dtype] for dtype in ("float32", "int8"))
    lines = [
        f"# Quality: {report.model}",
        "",
        "Text: Python's language reference. KL in nats. Perplexity of the candidate beside that of its reference.",
        "",
        "| candidate | reference | tokens | perplexity | change | KL | same top token |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in report.qualities:
        candidate = _shown((one.weights, cast(KvDtype, one.kv)))
        reference = _shown((one.reference_weights, cast(KvDtype, one.reference_kv)))
        lines.append(
            f"| {candidate} | {reference} | {one.num_tokens} | {one.reference_perplexity:.4f} -> "
            f"{one.perplexity:.4f} | {100 * one.perplexity_change:+.3f} % | {one.kl:.6f} | {100 * one.top1:.2f} % |"
        )
    speed = report.speed
    lines += [
        "",
        f"KV of a token: {float32} bytes as float32, {int8} as int8 ({int8 / float32:.3f} of it).",
        "",
        f"Steps behind {speed.context_tokens} tokens, {speed.weights} weights, medians of {_SPEED_ROUNDS} in turns:",
        "",
        "| step | float32 KV | int8 KV | int8 / float32 |",
        "|---|---:|---:|---:|",
    ]
    for title, times in (
        ("one token (decode)", speed.decode_ms),
        (f"{speed.tail_tokens} tokens (tail)", speed.tail_ms),
    ):
        ratio = times["int8"] / times["float32"]
        lines.append(f"| {title} | {times['float32']:.1f} ms | {times['int8']:.1f} ms | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _shown(variant: Variant) -> str:
    return f"{variant[0]} weights, {variant[1]} KV"


def _log_softmax(logits: Floats) -> Floats:
    """Natural logarithms of the probabilities of each row."""
    shifted = logits - logits.max(1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )
    return result


def _close(engines: list[Engine]) -> None:
    for engine in engines:
        engine.close()
    engines.clear()
    gc.collect()  # sessions hold packed weights
