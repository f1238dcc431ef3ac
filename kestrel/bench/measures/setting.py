"""What several measures need: contexts that fit the model, prompts, engines with filled pages, runtimes, read times."""

import dataclasses
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from kestrel.config import Config
from kestrel.engine.engine import Engine
from kestrel.generation import Finished, Request, Stats
from kestrel.models.checkpoint import Checkpoint
from kestrel.models.weights import load_weights
from kestrel.runtime import Runtime
from kestrel.store.layout import KvDtype, PageLayout

TAIL_TOKENS = 31  # a follow-up question
CONTEXTS = (2040, 8100)  # "2K" and "8K": a tail and an answer still fit behind them
WARM_UP_TOKENS = 24

_BLOCK_BYTES = 1 << 20


def log_line(text: str) -> None:
    """Write a line of progress to standard output at once."""
    print(f"[BENCH] {text}", flush=True)


def ignore_line(text: str) -> None:
    """Take a runtime's log line and show it to nobody."""


def fitting(wanted: Sequence[int], longest: int, room: int) -> list[int]:
    """Those of `wanted` that leave `room` tokens in a context of `longest`; if none does, the longest that does."""
    fits = [tokens for tokens in wanted if tokens + room <= longest]
    return fits or [max(1, longest - room)]


def with_parts(config: Config, **parts: dict[str, Any]) -> Config:
    """The configuration with some keys of some groups changed: with_parts(config, cache={"enabled": False})."""
    changed = {
        group: dataclasses.replace(getattr(config, group), **values) for group, values in parts.items()
    }
    return dataclasses.replace(config, prefixes={}, **changed)


def with_store(config: Config, root: Path, **cache: Any) -> Config:
    """The configuration with a store of the bench's own that never evicts and is read whatever that takes."""
    keys: dict[str, Any] = {
        "enabled": True,
        "root": str(root),
        "load": "always",
        "accept": "same",
        "pull_seconds": None,
        "max_bytes": 1 << 40,
        "max_files": None,
        "max_tokens": None,
        "max_prefix_tokens": None,
        "ttl_seconds": None,
    }
    return with_parts(config, cache=keys | cache)


class Prompts:
    """Prompts of random tokens: no two share a beginning, all are of ids the model takes."""

    def __init__(self, vocab_size: int, refused: Sequence[int] = (), seed: int = 0) -> None:
        """Ids below 300 are left out where the vocabulary is larger: special tokens and bytes."""
        allowed = np.setdiff1d(np.arange(300 if vocab_size > 600 else 3, vocab_size), np.array(refused, int))
        self._allowed = allowed
        self._random = np.random.default_rng(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        """The next prompt."""
        return cast(list[int], self._random.choice(self._allowed, num_tokens).tolist())


def prompts_for(runtime: Runtime, seed: int = 0) -> Prompts:
    """Prompts for a runtime's model."""
    return Prompts(runtime.engine.geometry.vocab_size, list(runtime.tokenizer.refused), seed)


@contextmanager
def opened(config: Config) -> Iterator[Runtime]:
    """A runtime that has answered a short request, so that kernels are compiled; memory is given back after use."""
    gc.collect()  # the one before: giving back its memory must not fall into a time that is measured
    runtime = Runtime.open(config, ignore_line)
    try:
        warm_up(runtime)
        yield runtime
    finally:
        runtime.close()
        del runtime
        gc.collect()


def warm_up(runtime: Runtime) -> None:
    """Answer a short request; nothing of it is saved."""
    tokens = prompts_for(runtime, seed=987)(min(WARM_UP_TOKENS, runtime.context_tokens // 4))
    answer(runtime, tokens, 3, persist=False)


def answer(runtime: Runtime, tokens: list[int], max_tokens: int = 1, persist: bool = True) -> Stats:
    """Answer one prompt to its end; the statistics."""
    request = Request(tokens, max_tokens, ignore_eos=True, persist=persist)
    for event in runtime.generate(request):
        if isinstance(event, Finished):
            return event.stats
    raise AssertionError("a generation ends with Finished")


def forget_ram(runtime: Runtime) -> None:
    """Let no later request find anything in memory."""
    runtime.engine.pool.forget([page.key for page in runtime.engine.pool.remembered()])


def read_seconds(paths: Sequence[Path]) -> tuple[float, int]:
    """Seconds and bytes of plainly reading files one after the other, in blocks of 1 MiB, into one buffer."""
    buffer = bytearray(_BLOCK_BYTES)
    nbytes = 0
    started = time.perf_counter()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while count := os.readv(descriptor, [buffer]):
                nbytes += count
        finally:
            os.close(descriptor)
    return time.perf_counter() - started, nbytes


def open_engine(
    config: Config,
    checkpoint: Checkpoint,
    weights: str,
    kv: KvDtype,
    context_tokens: int,
    chunk_tokens: int | None = None,
) -> Engine:
    """An engine alone, with room for one context. chunk_tokens: most rows of a step, as configured if None."""
    loaded = load_weights(checkpoint, weights, Path(config.model.root) / "converted")
    geometry, size = loaded.geometry, config.cache.page_tokens
    layout = PageLayout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, kv)
    return Engine(
        loaded,
        kv_dtype=kv,
        page_tokens=size,
        chunk_tokens=chunk_tokens or config.engine.chunk_tokens,
        kv_ram_bytes=max(2, -(-context_tokens // size)) * layout.page_nbytes(size),
        threads=config.engine.threads,
        context_tokens=context_tokens,
    )


def new_table(engine: Engine, num_tokens: int) -> list[int]:
    """Pages for a sequence of `num_tokens`."""
    return [engine.pool.allocate() for _ in range(-(-num_tokens // engine.pool.page_tokens))]


def filled_table(engine: Engine, num_tokens: int) -> list[int]:
    """The same, with numbers of the usual size in them: a step's time does not depend on which they are."""
    random = np.random.default_rng(0)
    table = new_table(engine, num_tokens)
    for page in table:
        for layer in range(engine.geometry.num_layers):
            for array, _ in engine.pool.layer_arrays(page, layer):
                if array.dtype == np.int8:
                    array[:] = random.integers(-127, 128, array.shape, np.int8)
                else:
                    array[:] = random.random(array.shape, np.float32)
    return table


def memory_bandwidth() -> float:
    """Bytes a second all cores together read from memory: the best of a few dot products of 256 MB of float32."""
    numbers = np.ones(1 << 26, np.float32)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        float(numbers @ numbers)
        seconds.append(time.perf_counter() - started)
    return numbers.nbytes / min(seconds)


def matmul_flops() -> float:
    """float32 multiplications and additions a second: the best of a few products of 2048 x 2048 matrices."""
    numbers = np.ones((2048, 2048), np.float32)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        numbers @ numbers
        seconds.append(time.perf_counter() - started)
    return float(2 * 2048**3 / min(seconds))
