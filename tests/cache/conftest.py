"""A runtime on a tiny checkpoint and a store of its own, opened as often as a test likes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kestrel.config import load_config
from kestrel.runtime import Runtime
from tests.engine.conftest import TINY

Boot = Callable[..., Runtime]


@pytest.fixture
def boot(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boot]:
    """boot("key=value", …, model="qwen3") -> Runtime on <tmp_path>/kv; its log is `runtime.lines`.

    Booting again closes the one before and begins with empty memory, as a new process would.
    """
    opened: list[Runtime] = []

    def open_runtime(
        *overrides: str, model: str = "qwen3", log: Callable[[str], None] | None = None
    ) -> Runtime:
        for runtime in opened:
            runtime.close()
        opened.clear()
        lines: list[str] = []
        config = load_config(
            [
                f"model.path={TINY / model}",
                f"model.root={tmp_path_factory.getbasetemp() / 'models'}",
                f"cache.root={tmp_path / 'kv'}",
                "cache.page_tokens=128",
                "cache.min_free_bytes=0",
                "engine.kv_ram_bytes=64MiB",
                "engine.kv_touched_bytes=0",
                *overrides,
            ]
        )
        runtime = Runtime.open(config, log or lines.append)
        runtime.lines = lines  # type: ignore[attr-defined]
        opened.append(runtime)
        return runtime

    yield open_runtime
    for runtime in opened:
        runtime.close()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Token ids every tiny checkpoint knows, the same for the same seed."""
    return np.random.default_rng(seed).integers(5, 300, count).tolist()


def logits_bits(runtime: Runtime, tokens: list[int], further: int = 3) -> tuple[bytes, object]:
    """Bits of the logits after a prompt and after a few more tokens, and the prefill's statistics."""
    sequence = runtime.cache.open(tokens)
    try:
        logits = [sequence.prefill()]
        logits += [sequence.append(7 + n) for n in range(further)]
    finally:
        sequence.close()
    if runtime.writer is not None:
        runtime.writer.drain()
    return b"".join(row.tobytes() for row in logits if row is not None), sequence.stats
