"""The first token after a restart, beside the two things it cannot be faster than: reading, and computing the tail.

For each KV dtype and context a session is computed and saved. Then, in turns: the matched artifacts are read plainly,
a new runtime with empty memory answers the session's continuation, and the same runtime answers another continuation
whose prefix is in memory by then (the tail alone). What was measured against is `max(read, tail)`: with reading and
computing overlapped layer by layer, the first token comes little later than the slower of the two.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from kestrel.bench.measures.result import (
    Bars,
    Column,
    Observation,
    Panel,
    Points,
    Result,
    Row,
    Spans,
    Target,
    common_settings,
    median,
)
from kestrel.bench.measures.setting import (
    CONTEXTS,
    TAIL_TOKENS,
    answer,
    fitting,
    log_line,
    opened,
    prompts_for,
    read_seconds,
    with_parts,
    with_store,
)
from kestrel.bench.process import drop_from_page_cache
from kestrel.bench.records import BenchError
from kestrel.cache.restore import Timeline
from kestrel.config import Config
from kestrel.generation import Request, Stats
from kestrel.runtime import Runtime

BOUND = 1.25  # times max(read, tail)
COLUMNS = (
    Column("kv", "KV"),
    Column("tokens", "context", "{:,}"),
    Column("page_cache", "page cache"),
    Column("megabytes", "MB", "{:,.1f}"),
    Column("read_ms", "read alone, ms", "{:,.1f}"),
    Column("tail_ms", "tail alone, ms", "{:,.1f}"),
    Column("ttft_ms", "TTFT, ms", "{:,.1f}"),
    Column("ratio", "TTFT / max", "{:.2f}"),
    Column("cold_ms", "TTFT without store, ms", "{:,.0f}"),
    Column("speedup", "speed-up (TTFT)", "{:.1f}x"),
)


@dataclass
class Case:
    """What was measured of one KV dtype, context and state of the page cache, milliseconds."""

    kv: str
    tokens: int
    page_cache: str
    cold_ms: float
    nbytes: int
    read: list[float]
    tail: list[float]
    ttft: list[float]

    def row(self) -> Row:
        """Medians and their ratio."""
        read, tail, ttft = median(self.read), median(self.tail), median(self.ttft)
        return {
            "kv": self.kv,
            "tokens": self.tokens,
            "page_cache": self.page_cache,
            "megabytes": self.nbytes / 1e6,
            "read_ms": read,
            "tail_ms": tail,
            "ttft_ms": ttft,
            "ratio": ttft / max(read, tail),
            "cold_ms": self.cold_ms,
            "speedup": self.cold_ms / ttft,
        }


def run(config: Config, out: Path, full: bool = False) -> Result:
    """Both KV dtypes, contexts of 2K and 8K, the page cache dropped and warm. Full: twice as many repeats."""
    observation = Observation(out)
    repeats = config.bench.repeats * (2 if full else 1)
    cases: list[Case] = []
    timelines: list[tuple[Case, Timeline, Stats]] = []
    name = ""
    for kv in ("float32", "int8"):
        root = out / "stores" / kv
        shutil.rmtree(root, ignore_errors=True)
        variant = with_store(with_parts(config, engine={"kv": kv}), root)
        with opened(variant) as runtime:
            name = runtime.name
            prompts = prompts_for(runtime)
            sessions = []
            for tokens in fitting(CONTEXTS, runtime.context_tokens, TAIL_TOKENS + 2):
                prefix = prompts(tokens)
                log_line(f"restore: {kv} KV, computing and saving {tokens} tokens")
                sessions.append((prefix, answer(runtime, prefix).ttft_ms))
        for prefix, cold_ms in sessions:
            pair = [Case(kv, len(prefix), state, cold_ms, 0, [], [], []) for state in ("dropped", "warm")]
            for turn in range(repeats):
                for case in pair if turn % 2 == 0 else pair[::-1]:
                    timeline, stats = _measure_once(variant, case, prefix, prompts(2 * TAIL_TOKENS))
                    if turn == 0:
                        timelines.append((case, timeline, stats))
            cases += pair
            log_line(
                f"restore: {kv} KV, {len(prefix)} tokens: {median(pair[0].ttft):.0f} ms, page cache dropped"
            )
    rows = [case.row() for case in cases]
    targets = [
        Target(
            f"TTFT / max(read, tail), {row['kv']} KV, {row['tokens']:,} tokens, page cache {row['page_cache']}",
            row["ratio"],
            BOUND,
        )
        for row in rows
    ]
    longest = max(row["tokens"] for row in rows)
    bars = Bars(
        "Time to the first token, and the two bounds below it",
        "ms",
        [f"{row['kv']}, {row['tokens']:,}, {row['page_cache']}" for row in rows],
        {
            "TTFT after a restart": [row["ttft_ms"] for row in rows],
            "read alone": [row["read_ms"] for row in rows],
            "tail alone": [row["tail_ms"] for row in rows],
        },
    )
    panels: list[Panel] = [bars]
    panels += [_timeline_panel(*each) for each in timelines if each[0].tokens == longest]
    return observation.publish(
        Result(
            "restore",
            "First token after a restart",
            {**common_settings(config, name, full), "kv": "float32, int8", "tail": TAIL_TOKENS},
            COLUMNS,
            rows,
            targets,
            panels,
            (
                "caliber: TTFT, from the request to the first token chosen; each in a new runtime with empty memory",
                "read alone: the same files read into one buffer, the page cache in the same state",
            ),
        )
    )


def _measure_once(config: Config, case: Case, prefix: list[int], tails: list[int]) -> tuple[Timeline, Stats]:
    """Read, restore and compute a tail once, and add the times to the case."""
    with opened(config) as runtime:
        first, second = prefix + tails[:TAIL_TOKENS], prefix + tails[TAIL_TOKENS:]
        paths = [page.path for page in runtime.find(first).pages]
        _prepare(paths, case.page_cache)
        seconds, case.nbytes = read_seconds(paths)
        case.read.append(seconds * 1e3)
        _prepare(paths, case.page_cache)
        timeline, stats = _restore(runtime, first)
        case.ttft.append(stats.ttft_ms)
        tail = answer(runtime, second, persist=False)
        if stats.restored_tokens != len(prefix) or tail.ram_tokens != len(prefix):
            raise BenchError(
                f"expected {len(prefix)} tokens restored and then found in memory, found {stats.restored_tokens} and "
                f"{tail.ram_tokens}; raise engine.kv_ram_bytes if the context does not fit in it"
            )
        case.tail.append(tail.ttft_ms)
        return timeline, stats


def _prepare(paths: list[Path], state: str) -> None:
    if state == "dropped":
        drop_from_page_cache(paths)
    else:
        read_seconds(paths)


def _restore(runtime: Runtime, tokens: list[int]) -> tuple[Timeline, Stats]:
    """Answer one token of a prompt that is on disk; what its reader and its step did when."""
    generation = runtime.start(Request(tokens, 1, ignore_eos=True, persist=False))
    restore = generation.sequence.restore
    try:
        while not generation.finished:
            runtime.step([generation])
        stats = generation.stats()
    finally:
        generation.close()
    return restore.timeline if restore is not None else Timeline(), stats


def _timeline_panel(case: Case, timeline: Timeline, stats: Stats) -> Spans:
    """What reader and step did in each layer. A step waits in a layer from asking for it until it is ready."""
    begin = stats.find_ms
    ready = [begin + 1e3 * seconds for _, seconds in sorted(timeline.ready.items())]
    asked = [begin + 1e3 * seconds for _, seconds in sorted(timeline.asked.items())]
    read: Points = list(zip([begin, *ready], ready, strict=False))
    waits = [(a, r) for a, r in zip(asked, ready, strict=False) if r > a]
    starts = [max(a, r) for a, r in zip(asked, ready, strict=False)]
    # Behind a layer's attention comes the matrix work up to the next question; behind the last one, the head.
    work: Points = list(zip([begin, *starts], [*asked, stats.ttft_ms], strict=False))
    return Spans(
        f"{case.kv} KV, {case.tokens:,} tokens, page cache {case.page_cache}: a piece is a layer; first token after "
        f"{stats.ttft_ms:.0f} ms",
        {"reader": read, "step computes": work, "step waits": waits},
    )
