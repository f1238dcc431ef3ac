"""Run a prompt through Kestrel's engine, for comparison with a reference implementation."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.engine.engine import Engine, Span
from kestrel.identity import as_tokens
from kestrel.models.checkpoint import Checkpoint, open_checkpoint
from kestrel.models.weights import load_weights

PAGE_TOKENS = 128
TINY = Path(__file__).parent
NAMES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen3vl")


class Sequence:
    """One sequence of an engine of its own."""

    def __init__(
        self, source: Path | Checkpoint, recipe: str, converted: Path, context_tokens: int = 512
    ) -> None:
        checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
        weights = load_weights(checkpoint, recipe, converted, log=lambda line: None)
        self.engine = Engine(
            weights,
            kv_dtype="float32",
            page_tokens=PAGE_TOKENS,
            chunk_tokens=PAGE_TOKENS,
            kv_ram_bytes=1 << 28,
            context_tokens=context_tokens,
        )
        self.table = [self.engine.pool.allocate() for _ in range(context_tokens // PAGE_TOKENS)]
        self.length = 0

    def extend(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Append tokens; their logits, float32 [len(tokens), vocab]."""
        pending = as_tokens(np.asarray(tokens))
        logits = []
        while len(pending):
            chunk, pending = pending[:PAGE_TOKENS], pending[PAGE_TOKENS:]
            logits.append(self.engine.forward([Span(chunk, self.length, self.table, len(chunk))]))
            self.length += len(chunk)
        return np.concatenate(logits)

    def greedy(self, last: npt.NDArray[np.float32], count: int) -> list[int]:
        """The greedy continuation after the row of logits `last`."""
        chosen = [int(last.argmax())]
        while len(chosen) < count:
            chosen.append(int(self.extend([chosen[-1]])[-1].argmax()))
        return chosen


def reference(name: str) -> dict[str, npt.NDArray[Any]]:
    """What `make_tiny.py` noted of a tiny checkpoint."""
    with np.load(TINY / name / "reference.npz") as arrays:
        return dict(arrays)
