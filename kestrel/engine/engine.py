"""The layer loop: embeddings in, logits out, KV written to pages on the way.

One step takes any mix of spans (a prefill chunk of one sequence, a decode row of another) and gives
each row the bits it would have had alone.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kestrel.engine import numerics
from kestrel.engine.layers import Floats, LayerGraphs, share_resources
from kestrel.engine.memory import heap_in_huge_pages
from kestrel.engine.pool import PagePool
from kestrel.engine.priority import Activity
from kestrel.engine.records import name_record, new_records
from kestrel.engine.rope import RopeTable
from kestrel.errors import RequestError
from kestrel.identity import Tokens
from kestrel.models.weights import Weights
from kestrel.store.layout import KvDtype, PageLayout

_FIRST_POSITIONS = 8192  # of the rotary table, worked out at the start: 10 ms that no first token waits for


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

    def __sub__(self, earlier: "StepSeconds") -> "StepSeconds":
        """What came between two readings."""
        return StepSeconds(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


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

        kv_touched_bytes: most KV memory committed ahead of a restore.
        """
        geometry = weights.geometry
        self.weights = weights
        self.geometry = geometry
        self.context_tokens = context_tokens or geometry.context_tokens
        self.chunk_tokens = chunk_tokens
        self.threads = min(threads or _num_cores(), _num_cores())
        self.activity = Activity()
        share_resources(self.threads)
        layout = PageLayout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, kv_dtype)
        self.pool = PagePool(layout, page_tokens, kv_ram_bytes, min(kv_touched_bytes, kv_ram_bytes))
        records = new_records(geometry.num_layers)
        most_rows = max(chunk_tokens, numerics.MOST_LEAST_ROWS)
        names = [name_record(records, layer) for layer in range(geometry.num_layers)]
        # Packing the weights leaves the interpreter free for the rest.
        with heap_in_huge_pages(self.activity), ThreadPoolExecutor(1) as beside:
            graphs = beside.submit(LayerGraphs, weights, most_rows, names, self.threads)
            from kestrel.engine.attention import LOG2E, Attention

            self._rope = RopeTable(geometry, self.context_tokens)
            self._attention = Attention(
                self.pool,
                geometry.num_heads,
                [(_copy(w.q_norm), _copy(w.k_norm)) for w in weights.layers],
                self._rope.cosine,
                self._rope.sine,
                geometry.norm_eps,
                geometry.head_dim**-0.5 * LOG2E,
                chunk_tokens,
                self.threads,
                records,
            )
            self._rope.reach(min(_FIRST_POSITIONS, self.context_tokens))
            self.graphs = graphs.result()
            self.numerics = numerics.measure(weights, kv_dtype, self.graphs)
        self.seconds = StepSeconds()

    def forward(self, spans: Sequence[Span], layer_ready: Callable[[int], None] | None = None) -> Floats:
        """Compute one step; return float32 [sum of num_logits, vocab_size] in the order of the spans.

        At most `chunk_tokens` rows in all. layer_ready(l) is called before layer l reads its pages and
        may block until a restore has filled them; what it raises ends the step, leaving only rows of
        the spans themselves undefined. RequestError for more rows or positions than there is room for.
        """
        rows = sum(len(span.tokens) for span in spans)
        if not 0 < rows <= self.chunk_tokens:
            raise RequestError(f"a step takes 1 to {self.chunk_tokens} rows, found {rows}")
        end = max(span.start + len(span.tokens) for span in spans)
        if end > self.context_tokens:
            raise RequestError(f"a sequence may hold {self.context_tokens} tokens")
        with self.activity:
            return self._compute(spans, rows, end, layer_ready)

    def close(self) -> None:
        """End what runs beside the steps; no step may follow."""
        self.activity.end()
        self.pool.close()

    def _compute(
        self, spans: Sequence[Span], rows: int, end: int, layer_ready: Callable[[int], None] | None
    ) -> Floats:
        """A step of `rows` rows up to position `end`, see `forward`."""
        graphs, clock = self.graphs, time.perf_counter
        step = _Step(spans, self.pool.page_tokens)
        padded = max(rows, self.numerics.least_rows)
        graphs.residual[:rows] = self.weights.embed(step.tokens)
        graphs.residual[rows:padded] = 0
        self._rope.reach(end)
        t0 = clock()
        self._attention.plan(
            step.bounds,
            step.starts,
            step.tables,
            step.places,
            step.positions,
            padded,
            layer_ready,
            graphs.stop,
        )
        graphs.run(padded)
        t1 = clock()
        attended, waited = self._attention.finish()
        self.seconds.attention += attended
        self.seconds.waiting += waited
        self.seconds.graphs += t1 - t0 - attended - waited
        if not step.picked:
            return np.zeros((0, self.geometry.vocab_size), np.float32)
        logits = graphs.logits(step.picked, self.numerics.least_rows)
        self.seconds.head += clock() - t1
        return logits


def _copy(norm: Floats | None) -> Floats:
    """A norm's weights; none if there is no norm. A byte read from the mapped file may bring 2 MB of it into memory."""
    return np.array(() if norm is None else norm, np.float32)


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
        self.picked = [
            int(self.bounds[i + 1]) - span.num_logits + j
            for i, span in enumerate(spans)
            for j in range(span.num_logits)
        ]
