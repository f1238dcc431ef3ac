"""What answers cost each other in one server: a stream while a long prompt is computed, and streams side by side."""

import itertools
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kestrel.bench.client import Arrivals, arrivals
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
from kestrel.bench.measures.setting import CONTEXTS, Prompts, fitting, log_line, with_parts, with_store
from kestrel.bench.process import ServerProcess, with_free_port
from kestrel.config import Config
from kestrel.models.fetch import resolve_model

STREAMS = (1, 2, 4, 8)
PROMPT_TOKENS = 64  # of each stream
ANSWER_TOKENS = (128, 384)  # of each stream, quick and full
GAP_BOUND = 2.0  # p95 of the gaps between two tokens, in chunks of the prompt beside
SPEEDUP_BOUND = 3.0  # of the most streams over one
COLUMNS = (
    Column("what", "what"),
    Column("streams", "streams", "{:,}"),
    Column("prompt", "prompt beside", "{:,}"),
    Column("rate", "tok/s, all", "{:,.1f}"),
    Column("speedup", "x of one", "{:.2f}"),
    Column("p50_ms", "gap p50, ms", "{:,.1f}"),
    Column("p95_ms", "gap p95, ms", "{:,.1f}"),
    Column("chunk_ms", "chunk, ms", "{:,.1f}"),
    Column("ratio", "gap p95 / chunk", "{:.2f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """A prompt of 2K beside a stream, streams of 128 tokens. Full: 8K too, streams of 384 tokens."""
    observation = Observation(out)
    checkpoint, name = resolve_model(config.model)
    longest = config.model.context_tokens or checkpoint.geometry.context_tokens
    lengths = fitting(CONTEXTS if full else CONTEXTS[:1], longest, 2)
    answer_tokens = min(ANSWER_TOKENS[full], longest - PROMPT_TOKENS - 1)
    prompts = Prompts(checkpoint.geometry.vocab_size, list(checkpoint.tokenizer().refused))
    store = out / "store"
    server_config = with_free_port(
        with_parts(with_store(config, store), engine={"speculate": 0}, server={"max_running": max(STREAMS)})
    )
    gaps: dict[int, list[tuple[list[float], float]]] = {length: [] for length in lengths}
    rates: dict[int, list[tuple[float, list[float]]]] = {count: [] for count in STREAMS}
    with ServerProcess(server_config, out / "server.log", log_line) as server:
        bench = _Bench(server, prompts, config.server.prompt_rows, longest)
        bench.side_by_side(max(STREAMS), 8)  # kernels are compiled
        for turn in range(config.bench.repeats):
            log_line(f"serve: round {turn + 1} of {config.bench.repeats}")
            for count in STREAMS if turn % 2 else STREAMS[::-1]:
                rates[count].append(bench.side_by_side(count, answer_tokens))
            for length in lengths:
                gaps[length].append(bench.beside_a_prompt(length))
        server.stop()
    shutil.rmtree(store, ignore_errors=True)
    rows = [_stream_row(count, rates) for count in STREAMS] + [
        _gap_row(length, found) for length, found in gaps.items()
    ]
    targets = [
        Target(
            f"{max(STREAMS)} streams against one, tokens a second",
            rows[len(STREAMS) - 1]["speedup"],
            SPEEDUP_BOUND,
            at_most=False,
        ),
        *(
            Target(
                f"p95 gap of a stream beside {row['prompt']:,} prompt tokens, in chunks",
                row["ratio"],
                GAP_BOUND,
            )
            for row in rows[len(STREAMS) :]
        ),
    ]
    panels = (
        Bars(
            "Streams side by side",
            "tok/s",
            [str(count) for count in STREAMS],
            {"all streams together": [row["rate"] for row in rows[: len(STREAMS)]]},
        ),
        Bars(
            "A stream while a prompt is computed",
            "ms",
            [f"{row['prompt']:,} tokens" for row in rows[len(STREAMS) :]],
            {
                "gap p50": [row["p50_ms"] for row in rows[len(STREAMS) :]],
                "gap p95": [row["p95_ms"] for row in rows[len(STREAMS) :]],
                "a chunk of the prompt": [row["chunk_ms"] for row in rows[len(STREAMS) :]],
            },
        ),
    )
    return observation.publish(
        Result(
            "serve",
            "Answers beside each other",
            {
                **common_settings(config, name, full),
                "answer": answer_tokens,
                "prompt_rows": config.server.prompt_rows,
            },
            COLUMNS,
            rows,
            targets,
            panels,
            (
                "tok/s: from the first event of any stream to the last of all; prompts of "
                f"{PROMPT_TOKENS} tokens that are in memory by then; client and server share the processors",
                "no drafts (engine.speculate=0): a step is a token of each stream",
                "chunk: the time of the prompt over its steps of server.prompt_rows tokens, the stream's token in each",
            ),
        )
    )


class _Bench:
    """One running server and what is asked of it."""

    def __init__(self, server: ServerProcess, prompts: Prompts, prompt_rows: int, longest: int) -> None:
        self._server, self._prompts = server, prompts
        self._prompt_rows, self._longest = prompt_rows, longest

    def _ask(self, prompt: list[int], max_tokens: int, over: threading.Event | None = None) -> Arrivals:
        return arrivals(self._server.host, self._server.port, prompt, max_tokens, over)

    def side_by_side(self, count: int, answer_tokens: int) -> tuple[float, list[float]]:
        """Tokens a second of so many streams together, and the seconds between two events of each."""
        prompts = [self._prompts(PROMPT_TOKENS) for _ in range(count)]
        for prompt in prompts:
            self._ask(prompt, 1)
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(lambda prompt: self._ask(prompt, answer_tokens), prompts))
        seconds = max(each.times[-1] for each in found) - min(each.times[0] for each in found)
        gaps = [gap for each in found for gap in _gaps(each.times)]
        return count * (answer_tokens - 1) / seconds, gaps

    def beside_a_prompt(self, num_tokens: int) -> tuple[list[float], float]:
        """Seconds between two tokens of a stream while a prompt is computed, and the seconds of one of its chunks."""
        over, begun = threading.Event(), threading.Event()
        prompt = self._prompts(PROMPT_TOKENS // 2)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(
                arrivals,
                self._server.host,
                self._server.port,
                prompt,
                self._longest - len(prompt) - 1,
                over,
                begun,
            )
            try:
                begun.wait(60)
                asked = self._ask(self._prompts(num_tokens), 1)
            finally:
                over.set()
            times = stream.result().times
        inside = [at for at in times if asked.sent <= at <= asked.times[-1]]
        num_chunks = -(-num_tokens // self._prompt_rows)
        return _gaps(inside), (asked.times[-1] - asked.sent) / num_chunks


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _stream_row(count: int, rates: dict[int, list[tuple[float, list[float]]]]) -> Row:
    gaps = [gap for _, found in rates[count] for gap in found]
    rate, one = (median([rate for rate, _ in rates[number]]) for number in (count, 1))
    return {
        "what": "side by side",
        "streams": count,
        "prompt": None,
        "rate": rate,
        "speedup": rate / one,
        "p50_ms": _quantile(gaps, 0.5) * 1e3,
        "p95_ms": _quantile(gaps, 0.95) * 1e3,
        "chunk_ms": None,
        "ratio": None,
    }


def _gap_row(length: int, found: list[tuple[list[float], float]]) -> Row:
    """Medians over the rounds."""
    return {
        "what": "beside a prompt",
        "streams": 1,
        "prompt": length,
        "rate": None,
        "speedup": None,
        "p50_ms": median([_quantile(gaps, 0.5) for gaps, _ in found]) * 1e3,
        "p95_ms": median([_quantile(gaps, 0.95) for gaps, _ in found]) * 1e3,
        "chunk_ms": median([chunk for _, chunk in found]) * 1e3,
        "ratio": median([_quantile(gaps, 0.95) / chunk for gaps, chunk in found]),
    }
