"""One process's part of an exactness check: the ways to compute one prompt, each seen as a digest of its bits.

All rows of K and V and the logits of the last rows go into a digest, so equal digests are equal results.
"""

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from kestrel.config import KEY_BLOCK_TOKENS, KV_DTYPES, Config
from kestrel.errors import KestrelError
from kestrel.identity import Tokens, as_tokens

if TYPE_CHECKING:
    from kestrel.cache.sequence import CachedSequence
    from kestrel.engine.layers import Floats
    from kestrel.runtime import Runtime

PROMPT_TOKENS = 540  # past one split of the attention kernel (512 keys), not a multiple of anything
FURTHER_TOKENS = 4  # decoded behind the prompt, each with its logits
SHORT_TOKENS = 140  # of the prompt: enough behind a match of one token
PAGE_TOKENS = KEY_BLOCK_TOKENS
_ODD = (1, 2, 3, 7, 31, 64, 77)  # rows of a step
_DECODED_TOKENS = 40  # of the prompt's end
_INSIDE_PAGE = 200
LEAST_TOKENS = 2 * PAGE_TOKENS + 64  # of a context that can show all of it


@dataclass(frozen=True)
class Trial:
    """What one process is to try, with pages kept below `store`.

    extent: "all" ways, filling the store; what a process "after" it can show from that store; or the prompt "whole"
    and nothing else. splits: how many ways to split the prompt into steps, and to mix it with strangers.
    """

    config: Config
    store: Path
    extent: Literal["all", "after", "whole"]
    splits: int = 1


@dataclass(frozen=True)
class Observation:
    """What a process saw with one KV dtype: digests (hex) by the way of computing, facts by name."""

    kv: str
    digests: dict[str, str]
    facts: dict[str, int | str | bool]


def answer_stdin() -> None:
    """What the processes run: read a pickled Trial from the parent's pipe, print one observation for each KV dtype."""
    trial = pickle.load(sys.stdin.buffer)
    for kv in KV_DTYPES:
        print(json.dumps(vars(observe(trial, kv))), flush=True)


def observe(trial: Trial, kv: str) -> Observation:
    """Compute the prompt in all ways of the trial, in this process."""
    from kestrel.runtime import Runtime

    config = trial.config
    cache = replace(
        config.cache,
        enabled=True,
        root=str(trial.store / kv),
        page_tokens=PAGE_TOKENS,
        min_match=1,
        max_files=None,
        max_tokens=None,
        max_prefix_tokens=None,
        ttl_seconds=None,
        min_free_bytes=0,
        write_bytes_per_hour=None,
        accept="same",
        load="always",
        pull_seconds=None,
    )
    engine = replace(config.engine, kv=kv, kv_touched_bytes=0)
    with Runtime.open(replace(config, cache=cache, engine=engine), _log) as runtime:
        digests = Ways(runtime, trial.splits).take(trial.extent)
        numerics = runtime.engine.numerics
        return Observation(
            kv,
            digests,
            {
                "probe": numerics.digest,
                "exact": numerics.exact,
                "least_rows": numerics.least_rows,
                "threads": runtime.engine.threads,
                "namespace": runtime.namespace.name,
            },
        )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Ways:
    """The prompt and the ways to compute it. Each returns a digest of the same rows of K and V and of logits."""

    def __init__(self, runtime: "Runtime", splits: int):
        self._runtime = runtime
        self._cache = runtime.cache
        self._chunk = runtime.engine.chunk_tokens
        drawn = prompt_of(runtime)
        self._prompt, self._further = drawn[:-FURTHER_TOKENS], drawn[-FURTHER_TOKENS:]
        self._splits = splits

    def take(self, extent: str) -> dict[str, str]:
        """The digests of all ways that belong to the extent of a trial."""
        if extent == "all":
            return self._try_all()
        if extent == "after":
            return self._try_after()
        return {"whole": self._whole(self._prompt)}

    def _try_all(self) -> dict[str, str]:
        """Everything one process can show; leaves the whole prompt in the store."""
        seen = {"whole": self._whole(self._prompt), "short": self._whole(self._prompt[:SHORT_TOKENS])}
        seen["split"] = self._same([self._split(number) for number in range(self._splits)])
        seen["strangers"] = self._same([self._beside_strangers(number) for number in range(self._splits)])
        seen["decoded"] = self._decoded()
        stranger = draw(self._runtime, PAGE_TOKENS, seed=9)
        short, prompt = self._prompt[:SHORT_TOKENS], self._prompt
        for way, stored, wanted, num_tokens in (
            ("restored one token", np.concatenate([prompt[:1], stranger]), short, 1),
            (
                "restored inside a page",
                np.concatenate([prompt[:_INSIDE_PAGE], stranger[:20]]),
                prompt,
                _INSIDE_PAGE,
            ),
            ("restored at a page boundary", prompt[: 2 * PAGE_TOKENS], prompt, 2 * PAGE_TOKENS),
            ("restored but for one", prompt, prompt, len(prompt) - 1),
        ):
            self._store(as_tokens(stored))
            seen[way] = self._restored(wanted, num_tokens)
        return seen

    def _try_after(self) -> dict[str, str]:
        """What a second process can show: the prompt computed whole, and restored from what the first one saved."""
        way = "restored but for one"
        return {"whole": self._whole(self._prompt), way: self._restored(self._prompt, len(self._prompt) - 1)}

    def _whole(self, prompt: Tokens) -> str:
        self._forget()
        return self._run(prompt, lambda sequence: None, use_store=False)

    def _split(self, number: int) -> str:
        """In steps of odd sizes; from the second way on, of random ones."""
        self._forget()
        random = np.random.default_rng(number)

        def steps(sequence: "CachedSequence") -> None:
            at = 0
            while sequence.num_pending > 1:
                rows = int(random.integers(1, 150)) if number else _ODD[at % len(_ODD)]
                self._cache.step([(sequence, min(rows, self._chunk, sequence.num_pending - 1))])
                at += 1

        return self._run(self._prompt, steps, use_store=False)

    def _beside_strangers(self, number: int) -> str:
        """Every step also holds the next rows of one stranger's prompt and a decoded row of another."""
        self._forget()
        random = np.random.default_rng(100 + number)
        strangers = [
            self._cache.open(draw(self._runtime, count, seed=20 + 2 * number + i).tolist(), persist=False)
            for i, count in enumerate((400, 5))
        ]

        def steps(sequence: "CachedSequence") -> None:
            while sequence.num_pending > 1:
                work = []
                room = self._chunk
                for one, most in ((strangers[0], 20), (sequence, 60), (strangers[1], 1)):
                    pending = one.num_pending - (1 if one is sequence else 0)
                    rows = min(int(random.integers(1, most + 1)), pending, room)
                    if rows:
                        work.append((one, rows))
                        room -= rows
                self._cache.step(work)
                if not strangers[1].num_pending and len(strangers[1].tokens) < len(self._prompt):
                    strangers[1].extend(int(self._further[0]))

        try:
            return self._run(self._prompt, steps, use_store=False)
        finally:
            for one in strangers:
                one.close()

    def _decoded(self) -> str:
        """The prompt's beginning from memory, its end one token at a time, as an answer is written."""
        self._forget()
        start = self._prompt[:-_DECODED_TOKENS]
        warm = self._cache.open(start.tolist(), persist=False)
        warm.prefill()
        warm.close()
        sequence = self._cache.open(start.tolist(), persist=False)
        try:
            self._expect("rows from memory", sequence.stats.ram_tokens, len(start) - 1)
            sequence.prefill()
            logits = [sequence.append(int(token)) for token in self._prompt[len(start) :]]
            return self._finish(sequence, logits[-1])
        finally:
            sequence.close()

    def _restored(self, prompt: Tokens, num_tokens: int) -> str:
        self._forget()

        def steps(sequence: "CachedSequence") -> None:
            self._expect("rows restored", sequence.stats.restored_tokens, num_tokens)

        return self._run(prompt, steps, use_store=True)

    def _run(self, prompt: Tokens, steps: Callable[["CachedSequence"], None], use_store: bool) -> str:
        """Open the prompt, take these steps, then compute what is left of it in the largest steps there are."""
        store = self._cache.store
        if not use_store:
            self._cache.store = None
        try:
            sequence = self._cache.open(prompt.tolist(), persist=False)
        finally:
            self._cache.store = store
        try:
            steps(sequence)
            return self._finish(sequence, sequence.prefill())
        finally:
            sequence.close()

    def _finish(self, sequence: "CachedSequence", logits: "Floats") -> str:
        """Decode the further tokens; digest all rows of K and V, and the logits from the prompt's last row on."""
        digest = xxhash.xxh3_128(logits.tobytes())
        for token in self._further:
            digest.update(sequence.append(int(token)).tobytes())
        pool = self._runtime.engine.pool
        num_tokens = len(sequence.tokens)
        for layer in range(pool.layout.num_layers):
            for number, page in enumerate(sequence.span(0).table):
                rows = min(pool.page_tokens, num_tokens - number * pool.page_tokens)
                for array, axis in pool.layer_arrays(page, layer):
                    digest.update(np.take(array, range(rows), axis).tobytes())
        return digest.hexdigest()

    def _store(self, prompt: Tokens) -> None:
        """Compute a prompt and wait until it is on disk."""
        self._runtime.prefill(prompt.tolist())
        assert self._runtime.writer is not None
        self._runtime.writer.drain()

    def _forget(self) -> None:
        """Empty the memory of pages, so that what is found next comes from the disk."""
        pool = self._runtime.engine.pool
        pool.forget([page.key for page in pool.remembered()])

    def _expect(self, what: str, found: int, expected: int) -> None:
        if found != expected:
            raise KestrelError(
                f"{what}: expected {expected}, found {found}; the check would have shown nothing"
            )

    def _same(self, digests: list[str]) -> str:
        """The digest that all of these are, or one that nothing else is."""
        return digests[0] if len(set(digests)) == 1 else "/".join(digests)


def prompt_of(runtime: "Runtime") -> Tokens:
    """The prompt and the FURTHER_TOKENS behind it, the same for every process with this model.

    Shorter than PROMPT_TOKENS where the context is.
    """
    num_tokens = min(PROMPT_TOKENS + FURTHER_TOKENS, runtime.context_tokens)
    if num_tokens < LEAST_TOKENS:
        raise KestrelError(
            f"the exactness check takes a context of {LEAST_TOKENS} tokens, found {runtime.context_tokens}; "
            "raise model.context_tokens"
        )
    return draw(runtime, num_tokens, seed=0)


def draw(runtime: "Runtime", count: int, seed: int) -> Tokens:
    """Token ids the model takes, the same for the same seed."""
    allowed = np.setdiff1d(np.arange(runtime.engine.geometry.vocab_size), list(runtime.tokenizer.refused))
    return as_tokens(np.random.default_rng(seed).choice(allowed, count))
