"""Whether a token's result depends on anything but its prefix, tried out on one model and one CPU.

Processes of their own compute one prompt in every way a server may come to compute it (in steps of any size, beside
strangers, token by token, restored from a real store, on another number of threads, after a restart) and print
digests of the bits: every row of K and V, and the logits of the last rows. `check` compares them and says which
guarantees hold. The interpreter of those processes can be an emulator's, so that other CPUs are tried the same way.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
_ODD = (1, 2, 3, 7, 31, 64, 77)  # rows of a step
_DECODED_TOKENS = 40  # of the prompt's end
_INSIDE_PAGE = 200
_PAGE = KEY_BLOCK_TOKENS
_CHILD = "from kestrel.exactness import answer_stdin; answer_stdin()"


@dataclass(frozen=True)
class Guarantee:
    """One promise and for which KV dtypes it was kept. `text` says what was compared."""

    name: str
    text: str
    kept: dict[str, bool]  # by KV dtype
    problem: str = ""  # what was found instead, where it was not kept

    @property
    def holds(self) -> bool:
        """Whether it was kept everywhere."""
        return all(self.kept.values())


@dataclass(frozen=True)
class Trial:
    """What one process is to try. first: everything, filling a store; else only what a second process can show.

    splits: how many random ways to split the prompt into steps, and to mix it with strangers.
    """

    config: Config
    store: Path
    first: bool
    splits: int


@dataclass(frozen=True)
class Observation:
    """What a process saw with one KV dtype: digests (hex) by the way of computing, facts by name."""

    kv: str
    digests: dict[str, str]
    facts: dict[str, int | str | bool]


# The ways a first process tries, and what each of them promises.
WAYS = {
    "split": "computed in odd steps of 1 to 77 tokens",
    "strangers": "computed in one step with other sequences",
    "decoded": "continued token by token behind what is in memory",
    "restored at a page boundary": "restored from disk up to a page boundary",
    "restored inside a page": "restored from disk up to the middle of a page",
    "restored but for one": "restored from disk but for the last token",
    "restored one token": "restored from disk up to its first token",
}


def check(
    config: Config,
    interpreter: Sequence[str] = (sys.executable,),
    environment: Mapping[str, str] | None = None,
    *,
    splits: int = 1,
    store: Path | None = None,
) -> Iterator[Guarantee]:
    """Try the model, weights and threads of `config` with both KV dtypes; yield the guarantees, kept or not.

    interpreter: the command that runs Python, e.g. an emulator and its Python. store: where the pages go, to be kept;
    None for a temporary folder. KestrelError when a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="kestrel-exactness-") as folder:
        trial = Trial(config, store or Path(folder), True, splits)
        first = _observe(trial, interpreter, environment)
        yield from compare_ways(first, splits)
        threads = _other_threads(next(iter(first.values())))
        other = replace(config, engine=replace(config.engine, threads=threads))
        second = _observe(Trial(other, trial.store, False, splits), interpreter, environment)
        yield from compare_processes(first, second)


def compare_ways(seen: Mapping[str, Observation], splits: int = 1) -> Iterator[Guarantee]:
    """The guarantees that one process can show, from its observations by KV dtype."""
    rows = {kv: int(one.facts["least_rows"]) for kv, one in seen.items()}
    kept = {kv: bool(one.facts["exact"]) for kv, one in seen.items()}
    text = f"the kernels give a row the same bits in steps of {max(rows.values())} rows or more"
    yield Guarantee("kernels", text, kept, "the start-up check found no number of rows from which they do")
    for way, text in WAYS.items():
        kept, problems = {}, []
        for kv, one in seen.items():
            short = way == "restored one token"
            found, whole = one.digests[way], one.digests["short" if short else "whole"]
            kept[kv] = found == whole
            if not kept[kv]:
                problems.append(f"{kv} KV: bits differ from those of one whole step")
        if way in ("split", "strangers"):
            text += f" ({splits} ways)" if splits > 1 else ""
        yield Guarantee(way, text, kept, "; ".join(problems))


def compare_processes(
    first: Mapping[str, Observation], second: Mapping[str, Observation]
) -> Iterator[Guarantee]:
    """The guarantees that it takes a second process to show."""
    before, after = (next(iter(seen.values())).facts["threads"] for seen in (first, second))
    threads = f"{before} and on {after}" if before != after else f"{before} (there is no other number here)"
    for name, text, way in (
        ("threads", f"computed in two processes, on threads: {threads}", "whole"),
        ("restart", "restored in a second process from the files of the first", "restored but for one"),
    ):
        kept = {kv: second[kv].digests[way] == first[kv].digests["whole"] for kv in first}
        problem = "the second process got other bits"
        yield Guarantee(name, text, kept, "" if all(kept.values()) else problem)
    kept = {kv: second[kv].facts["probe"] == first[kv].facts["probe"] for kv in first}
    yield Guarantee(
        "probe", "the numerics probe is the same in both processes", kept, "the probes differ: no page is ever found"
    )


def _other_threads(seen: Observation) -> int:
    """Another number of threads than the first process had, where there is one."""
    if int(seen.facts["threads"]) > 1:
        return 1
    return min(2, len(os.sched_getaffinity(0)))


def _observe(
    trial: Trial, interpreter: Sequence[str], environment: Mapping[str, str] | None
) -> dict[str, Observation]:
    """Run one process; its observations by KV dtype."""
    done = subprocess.run(
        [*interpreter, "-c", _CHILD],
        input=pickle.dumps(trial),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if environment is None else {**os.environ, **environment},
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise KestrelError(
            f"the exactness check failed in its own process (exit code {done.returncode}): "
            f"{' | '.join(lines[-3:]) or 'it printed nothing'}"
        )
    seen = [Observation(**json.loads(line)) for line in done.stdout.decode().splitlines()]
    return {one.kv: one for one in seen}


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
        page_tokens=_PAGE,
        min_match=1,
        max_files=None,
        max_tokens=None,
        max_prefix_tokens=None,
        ttl_seconds=None,
        min_free_bytes=0,
        accept="same",
        pull_seconds=None,
    )
    engine = replace(config.engine, kv=kv, kv_touched_bytes=0)
    with Runtime.open(replace(config, cache=cache, engine=engine), _log) as runtime:
        ways = _Ways(runtime, trial.splits)
        digests = ways.try_all() if trial.first else ways.try_again()
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


class _Ways:
    """The prompt and the ways to compute it. Each returns a digest of the same rows of K and V and of logits."""

    def __init__(self, runtime: "Runtime", splits: int):
        self._runtime = runtime
        self._cache = runtime.cache
        self._chunk = runtime.engine.chunk_tokens
        room = min(PROMPT_TOKENS, runtime.context_tokens - FURTHER_TOKENS)
        drawn = self._draw(room + FURTHER_TOKENS, seed=0)
        self._prompt, self._further = drawn[:room], drawn[room:]
        self._splits = splits

    def try_all(self) -> dict[str, str]:
        """Everything one process can show; leaves the whole prompt in the store."""
        seen = {"whole": self._whole(self._prompt), "short": self._whole(self._prompt[:SHORT_TOKENS])}
        seen["split"] = self._same([self._split(number) for number in range(self._splits)])
        seen["strangers"] = self._same([self._beside_strangers(number) for number in range(self._splits)])
        seen["decoded"] = self._decoded()
        stranger = self._draw(_PAGE, seed=9)
        short, prompt = self._prompt[:SHORT_TOKENS], self._prompt
        for way, stored, wanted, num_tokens in (
            ("restored one token", np.concatenate([prompt[:1], stranger]), short, 1),
            (
                "restored inside a page",
                np.concatenate([prompt[:_INSIDE_PAGE], stranger[:20]]),
                prompt,
                _INSIDE_PAGE,
            ),
            ("restored at a page boundary", prompt[: 2 * _PAGE], prompt, 2 * _PAGE),
            ("restored but for one", prompt, prompt, len(prompt) - 1),
        ):
            self._store(as_tokens(stored))
            seen[way] = self._restored(wanted, num_tokens)
        return seen

    def try_again(self) -> dict[str, str]:
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
            self._cache.open(self._draw(count, seed=20 + 2 * number + i), persist=False)
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
        warm = self._cache.open(start, persist=False)
        warm.prefill()
        warm.close()
        sequence = self._cache.open(start, persist=False)
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
            sequence = self._cache.open(prompt, persist=False)
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
            raise KestrelError(f"{what}: expected {expected}, found {found}; the check would have shown nothing")

    def _draw(self, count: int, seed: int) -> Tokens:
        """Token ids the model takes, the same for the same seed."""
        vocab = self._runtime.engine.geometry.vocab_size
        allowed = np.setdiff1d(np.arange(vocab), list(self._runtime.tokenizer.refused))
        return as_tokens(np.random.default_rng(seed).choice(allowed, count))

    def _same(self, digests: list[str]) -> str:
        """The digest that all of these are, or one that nothing else is."""
        return digests[0] if len(set(digests)) == 1 else "/".join(digests)
