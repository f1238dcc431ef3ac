"""Running token ids through an engine in chosen steps, and looking at the bits that come out."""

from collections.abc import Iterable

import numpy as np

from kestrel.engine.engine import Engine, Span


class Run:
    """A sequence of its own in the engine's pool."""

    def __init__(self, engine: Engine, tokens: np.ndarray):
        self.engine = engine
        self.tokens = tokens
        size = engine.pool.page_tokens
        self.table = [engine.pool.allocate() for _ in range(-(-len(tokens) // size))]
        self.position = 0
        self.logits: list[np.ndarray] = []

    def span(self, count: int) -> Span:
        """The next `count` tokens, with the logits of every one."""
        tokens = self.tokens[self.position : self.position + count]
        span = Span(tokens, self.position, self.table, len(tokens))
        self.position += len(tokens)
        return span

    def steps(self, counts: Iterable[int]) -> "Run":
        """Compute steps of these sizes, then the rest in the largest steps there are."""
        for count in [
            *counts,
            *[self.engine.chunk_tokens] * (len(self.tokens) // self.engine.chunk_tokens + 1),
        ]:
            if self.position < len(self.tokens):
                self.logits.append(self.engine.forward([self.span(count)]))
        return self

    def bits(self) -> bytes:
        """Every bit of this sequence's logits and of its rows of K and V, then its pages are given back."""
        parts = [np.concatenate(self.logits).tobytes()]
        pool = self.engine.pool
        for number, page in enumerate(self.table):
            rows = min(pool.page_tokens, len(self.tokens) - number * pool.page_tokens)
            for layer in range(pool.layout.num_layers):
                for array, axis in pool.layer_arrays(page, layer):
                    parts.append(np.take(array, range(rows), axis).tobytes())
        for page in self.table:
            pool.release(page)
        return b"".join(parts)


def random_tokens(engine: Engine, count: int, seed: int = 0) -> np.ndarray:
    """Token ids, int32 [count], the same for the same seed."""
    return np.random.default_rng(seed).integers(0, engine.geometry.vocab_size, count).astype(np.int32)
