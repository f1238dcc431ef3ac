"""What saving costs: the first turn's wall time, the speed of answers meanwhile, and the bytes each turn writes."""

import shutil
import threading
import time
from pathlib import Path

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
    TAIL_TOKENS,
    Prompts,
    answer,
    fitting,
    log_line,
    opened,
    prompts_for,
    with_parts,
    with_store,
)
from kestrel.cache.save import PageSave, SaveReport
from kestrel.config import Config
from kestrel.generation import Request, Stats
from kestrel.identity import as_tokens, page_key, prefix_sha256
from kestrel.runtime import Runtime

ANSWER_TOKENS = 32
BLOCK_TOKENS = 48  # decoded between two changes from saving to not saving
MOST_SAVES = 100  # pages for one block, more than are written meanwhile
MOST_PENDING = 4
TURNS = 8
COLUMNS = (
    Column("what", "what"),
    Column("tokens", "context", "{:,}"),
    Column("without", "without", "{:,.4g}"),
    Column("with", "with", "{:,.4g}"),
    Column("unit", "unit"),
    Column("ratio", "with / without", "{:.3f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """The first turn at 2K (full: 8K too) with the store on and off, decoding while a queue of saves is kept full, a
    session of several turns."""
    observation = Observation(out)
    root = out / "store"
    shutil.rmtree(root, ignore_errors=True)
    stored = with_store(config, root)
    plain = with_parts(config, cache={"enabled": False})
    rows: list[Row] = []
    with opened(stored) as with_it, opened(plain) as without:
        prompts = prompts_for(with_it)
        contexts = fitting(CONTEXTS if full else CONTEXTS[:1], with_it.context_tokens, 2 * BLOCK_TOKENS)
        for tokens in contexts:
            rows += _first_turn(with_it, without, prompts, tokens, config.bench.repeats)
        rows.append(_decoding(with_it, prompts, contexts[0], 2 * config.bench.repeats))
        turns, pieces = _turns(with_it, prompts, contexts[0])
        rows += turns
        name = with_it.name
    first = [row for row in rows if row["what"].startswith("first turn")]
    targets = [
        *(Target(f"{row['what']}, {row['tokens']:,} tokens", row["ratio"], 1.02) for row in first),
        *(Target(row["what"], row["ratio"], 0.95, False) for row in rows if row["what"].startswith("decode")),
        *(Target(row["what"], row["ratio"], 2.0) for row in turns),
    ]
    panels = [
        Bars(
            "Relative to no store: 1 is no cost (first turn: time; decode: speed)",
            "ratio",
            [f"{row['what']}, {row['tokens']:,}" for row in rows if row not in turns],
            {"with / without": [row["ratio"] for row in rows if row not in turns]},
        ),
        Bars("Bytes written by each turn", "MB", [f"turn {n}" for n in range(1, len(pieces) + 1)], {
            "written": [written / 1e6 for written, _ in pieces],
            "KV of its new tokens": [new / 1e6 for _, new in pieces],
        }),
    ]  # fmt: skip
    return observation.publish(
        Result(
            "save",
            "What saving costs",
            common_settings(config, name, full),
            COLUMNS,
            rows,
            targets,
            panels,
            (
                f"first turn: wall time of a new prompt and {ANSWER_TOKENS} answer tokens, store on and off in turns",
                "decode beside saves without end: the writer's queue is kept full all the while, as no session does",
                f"turns: a session goes on with {TAIL_TOKENS} tokens of question and {ANSWER_TOKENS} of answer a turn",
            ),
        )
    )


def _first_turn(with_it: Runtime, without: Runtime, prompts: Prompts, tokens: int, repeats: int) -> list[Row]:
    """Wall time of a new prompt and its answer, and the speed of that answer, while the prompt is still being saved."""
    found: dict[Runtime, list[Stats]] = {with_it: [], without: []}
    for turn in range(repeats):
        prompt = prompts(tokens)
        for runtime in (with_it, without) if turn % 2 else (without, with_it):
            log_line(f"save: first turn of {tokens} tokens, store {'on' if runtime.store else 'off'}")
            found[runtime].append(answer(runtime, prompt, ANSWER_TOKENS))
        _drain(with_it)
    wall_off, wall_on = (median([stats.wall_ms for stats in found[it]]) for it in (without, with_it))
    rate_off, rate_on = (median([_answer_rate(stats) for stats in found[it]]) for it in (without, with_it))
    return [
        _row("first turn (wall)", tokens, wall_off, wall_on, "ms"),
        _row("decode behind a new prompt", tokens, rate_off, rate_on, "tok/s"),
    ]


def _answer_rate(stats: Stats) -> float:
    """Tokens a second behind the first one."""
    return (stats.completion_tokens - 1) / (stats.wall_ms - stats.ttft_ms) * 1e3


def _decoding(runtime: Runtime, prompts: Prompts, tokens: int, repeats: int) -> Row:
    """Tokens a second of one answer, in blocks with and without pages being written."""
    log_line("save: decoding while pages are written")
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats):
        prompt = prompts(tokens)
        generation = runtime.start(Request(prompt, 2 * BLOCK_TOKENS, ignore_eos=True, persist=False))
        try:
            while generation.is_prefilling:
                runtime.step([generation])
            _drain(runtime)
            for saving in (True, False) if turn % 2 else (False, True):
                with _Saves(runtime, prompts, saving):
                    started = time.perf_counter()
                    num_steps = 0
                    while num_steps < BLOCK_TOKENS - 1 and not generation.finished:
                        runtime.step([generation])
                        num_steps += 1
                    rates[saving].append(num_steps / (time.perf_counter() - started))
        finally:
            generation.close()
    return _row("decode beside saves without end", tokens, median(rates[False]), median(rates[True]), "tok/s")


class _Saves:
    """Keeps the writer's queue filled with full pages of made-up prefixes while a `with` block runs."""

    def __init__(self, runtime: Runtime, prompts: Prompts, is_on: bool) -> None:
        self._runtime = runtime
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._submit, name="bench-saves", daemon=True)
        self._page = runtime.engine.pool.allocate()
        for array, _ in runtime.engine.pool.layer_arrays(self._page, 0):
            array[:] = 1
        # Made ahead, so that nothing but the writer takes time from the answer.
        self._pages = [self._page_of(prompts) for _ in range(MOST_SAVES if is_on else 0)]

    def _page_of(self, prompts: Prompts) -> PageSave:
        scope = self._runtime.cache.common
        root = scope.namespace.digest
        tokens = as_tokens(prompts(self._runtime.engine.pool.page_tokens))
        digest = prefix_sha256(tokens)
        return PageSave(self._page, scope, page_key(root, tokens), root, 0, tokens, digest, SaveReport())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        _drain(self._runtime)
        self._runtime.engine.pool.release(self._page)

    def _submit(self) -> None:
        writer = self._runtime.writer
        assert writer is not None
        for page in self._pages:
            while writer.num_pending >= MOST_PENDING:
                if self._stop.wait(0.02):
                    return
            if self._stop.is_set():
                return
            writer.submit(page)


def _turns(runtime: Runtime, prompts: Prompts, tokens: int) -> tuple[list[Row], list[tuple[int, int]]]:
    """A session of several turns: what turn 2 and the turns from the second on write, beside their new tokens' KV."""
    log_line("save: a session of several turns")
    per_token = runtime.engine.pool.layout.page_nbytes(1)
    room = runtime.context_tokens - (TURNS + 1) * (TAIL_TOKENS + ANSWER_TOKENS)
    session = prompts(max(1, min(tokens, room)))
    pieces: list[tuple[int, int]] = []
    known = 0
    writer = runtime.writer
    assert writer is not None
    for _ in range(TURNS):
        before = writer.bytes_written
        request = Request(session, ANSWER_TOKENS, ignore_eos=True)
        generation = runtime.start(request)
        try:
            while not generation.finished:
                runtime.step([generation])
            generation.close()
            session = list(generation.sequence.tokens)
        finally:
            generation.close()
        _drain(runtime)
        pieces.append((writer.bytes_written - before, (len(session) - known) * per_token))
        known = len(session)
        session += prompts(TAIL_TOKENS)
    later = pieces[1:]
    rows = [
        _row(
            "bytes of turn 2 / KV of its tokens", len(session), pieces[1][1] / 1e6, pieces[1][0] / 1e6, "MB"
        ),
        _row(
            f"bytes of turns 2 to {TURNS} / KV of their tokens",
            len(session),
            sum(new for _, new in later) / 1e6,
            sum(written for written, _ in later) / 1e6,
            "MB",
        ),
    ]
    return rows, pieces


def _row(what: str, tokens: int, without: float, with_it: float, unit: str) -> Row:
    return {
        "what": what,
        "tokens": tokens,
        "without": without,
        "with": with_it,
        "unit": unit,
        "ratio": with_it / without,
    }


def _drain(runtime: Runtime) -> None:
    if runtime.writer is not None:
        runtime.writer.drain()
