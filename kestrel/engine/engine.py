"""The layer loop: embeddings in, logits out, KV written to pages on the way.

One step takes any mix of spans (a prefill chunk of one sequence, a decode row of another) and gives
each row the bits it would have had alone.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kestrel.engine import attention, numerics
from kestrel.engine.layers import Floats, LayerGraphs, share_resources
from kestrel.engine.memory import with_huge_pages
from kestrel.engine.pool import PagePool
from kestrel.errors import RequestError
from kestrel.identity import Tokens
from kestrel.models.weights import Weights
from kestrel.store.layout import KvDtype, PageLayout

# Below this many multiply-adds waking a second thread costs more than it saves (about 10 us a wake-up).
_WORTH_A_THREAD = 200_000


@dataclass(frozen=True)
class Span:
    """New rows of one sequence in a step: token ids for positions [start, start + len(tokens)).

    table: the sequence's pages, from position 0 on, with room for the new rows; pages the rows are
    written to must belong to this sequence alone. num_logits: how many of the last rows' logits are wanted.
    """

    tokens: Tokens
    start: int
    table: Sequence[int]
    num_logits: int = 0


@dataclass
class StepSeconds:
    """Where the time of the steps so far went, in seconds; `waiting` is time spent on a restore's reader."""

    graphs: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    waiting: float = 0.0


class Engine:
    """A model ready to compute: layer graphs, page pool and the numerics found on this CPU."""

    def __init__(
        self,
        weights: Weights,
        *,
        kv_dtype: KvDtype,
        page_tokens: int,
        chunk_tokens: int,
        kv_ram_bytes: int,
        kv_touched_bytes: int = 0,
        threads: int | None = None,
        context_tokens: int | None = None,
    ):
        """chunk_tokens: most rows of one step. threads: None for all cores. context_tokens: longest sequence.

        kv_touched_bytes: KV memory committed ahead of use.
        """
        geometry = weights.geometry
        self.weights = weights
        self.geometry = geometry
        self.context_tokens = context_tokens or geometry.context_tokens
        self.chunk_tokens = chunk_tokens
        self.threads = min(threads or _num_cores(), _num_cores())
        share_resources(self.threads)
        attention.use_threads(self.threads)
        layout = PageLayout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, kv_dtype)
        self.pool = PagePool(layout, page_tokens, kv_ram_bytes, min(kv_touched_bytes, kv_ram_bytes))
        self.graphs = with_huge_pages(
            lambda: LayerGraphs(weights, max(chunk_tokens, numerics.MOST_LEAST_ROWS))
        )
        self.numerics = numerics.measure(weights, kv_dtype, self.graphs)
        self.seconds = StepSeconds()
        self._q: Floats = np.zeros((chunk_tokens, geometry.num_heads, geometry.head_dim), np.float32)
        self._cosine, self._sine = numerics.rope_table(geometry, self.context_tokens)
        self._q_scale = np.float32(geometry.head_dim**-0.5 * attention.LOG2E)
        self._norms = [
            (no_norm if w.q_norm is None else w.q_norm, no_norm if w.k_norm is None else w.k_norm)
            for w in weights.layers
            for no_norm in (np.zeros(0, np.float32),)
        ]

    def forward(self, spans: Sequence[Span], layer_ready: Callable[[int], None] | None = None) -> Floats:
        """Compute one step; return float32 [sum of num_logits, vocab_size] in the order of the spans.

        At most `chunk_tokens` rows in all. layer_ready(l) is called before layer l reads its pages and
        may block until a restore has filled them; what it raises ends the step, leaving only rows of
        the spans themselves undefined. RequestError for more rows or positions than there is room for.
        """
        rows = sum(len(span.tokens) for span in spans)
        if not 0 < rows <= self.chunk_tokens:
            raise RequestError(f"a step takes 1 to {self.chunk_tokens} rows, found {rows}")
        if any(span.start + len(span.tokens) > self.context_tokens for span in spans):
            raise RequestError(f"a sequence may hold {self.context_tokens} tokens")
        graphs, geometry = self.graphs, self.geometry
        step = _Step(spans, self.pool.page_tokens)
        padded = max(rows, self.numerics.least_rows)
        graphs.residual[:rows] = self.weights.embed(step.tokens)
        if padded > rows:
            graphs.residual[rows:padded] = 0
            graphs.attended[rows:padded] = 0
        q = self._q[:rows]
        attended = graphs.attended[:rows].reshape(q.shape)
        small = step.work * geometry.num_heads * geometry.head_dim < _WORTH_A_THREAD
        threads = attention.use_threads(1 if small else self.threads)
        pool, clock = self.pool, time.perf_counter
        for layer in range(geometry.num_layers):
            t0 = clock()
            graphs.project(layer, padded)
            t1 = clock()
            if layer_ready is not None:
                layer_ready(layer)
            t2 = clock()
            offsets = pool.layer_offsets(layer)
            attention.write(
                graphs.qkv[:rows], *self._norms[layer], np.float32(geometry.norm_eps), self._cosine, self._sine,
                pool.kv, pool.scales, pool.quantised, step.places, step.positions, pool.page_size,
                pool.page_tokens, *offsets, geometry.num_kv_heads, self._q_scale, threads, q,
            )  # fmt: skip
            attention.attend(
                q, pool.kv, pool.scales, pool.quantised, step.tables, step.bounds, step.starts, pool.page_size,
                pool.page_tokens, *offsets, geometry.num_kv_heads, threads, attended,
            )  # fmt: skip
            t3 = clock()
            self.seconds.graphs += t1 - t0
            self.seconds.waiting += t2 - t1
            self.seconds.attention += t3 - t2
        if not step.picked:
            return np.zeros((0, geometry.vocab_size), np.float32)
        t0 = clock()
        logits = graphs.logits(step.picked, self.numerics.least_rows)
        self.seconds.head += clock() - t0
        return logits


@functools.cache
def _num_cores() -> int:
    """Cores this process may use, counted once: the thread pools are made for good."""
    return len(os.sched_getaffinity(0))


class _Step:
    """The spans of one step as the arrays the kernels take."""

    def __init__(self, spans: Sequence[Span], page_tokens: int):
        counts = [len(span.tokens) for span in spans]
        self.tokens: Tokens = np.concatenate([span.tokens for span in spans])
        self.bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.starts = np.array([span.start for span in spans], np.int64)
        self.positions: npt.NDArray[np.int32] = np.concatenate(
            [
                np.arange(span.start, span.start + n, dtype=np.int32)
                for span, n in zip(spans, counts, strict=True)
            ]
        )
        self.tables = np.zeros((len(spans), max(len(span.table) for span in spans)), np.int32)
        for i, span in enumerate(spans):
            self.tables[i, : len(span.table)] = span.table
        owner = np.repeat(np.arange(len(spans)), counts)
        self.places = np.empty((len(self.tokens), 2), np.int32)
        self.places[:, 0] = self.tables[owner, self.positions // page_tokens]
        self.places[:, 1] = self.positions % page_tokens
        self.work = int(self.positions.sum()) + len(self.positions)  # keys seen by all rows together
        self.picked = [
            int(self.bounds[i + 1]) - span.num_logits + j
            for i, span in enumerate(spans)
            for j in range(span.num_logits)
        ]
