"""A hit on a slow disk: whether reading it makes the first token later than computing it would.

The store's reader is slowed down to rates around the one at which reading takes as long as computing. At each rate a
new process meets the hit first (nothing is measured yet), then again with what it has learned; between, prompts that
nothing is stored of are computed. The bound is on the time to the first token beside computing.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
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
    answer,
    fitting,
    forget_ram,
    log_line,
    opened,
    prompts_for,
    with_store,
)
from kestrel.config import Config
from kestrel.generation import Stats
from kestrel.runtime import Runtime
from kestrel.store.layout import PageLayout
from kestrel.store.match import PageRef
from kestrel.store.store import OpenPage, Store

BOUND = 1.05
# Of the rate at which reading takes as long as computing; None: not slowed.
FRACTIONS = (None, 4.0, 1.0, 0.25, 0.05)
COLUMNS = (
    Column("tokens", "context", "{:,}"),
    Column("disk", "disk"),
    Column("rate", "MB/s", "{:,.1f}"),
    Column("knows", "process"),
    Column("compute_ms", "computing, ms", "{:,.0f}"),
    Column("ttft_ms", "TTFT, ms", "{:,.0f}"),
    Column("ratio", "TTFT / computing", "{:.3f}"),
    Column("restored", "tokens read", "{:,}"),
    Column("load", "decision"),
)

UNWATCHED_PART_NBYTES = 1 << 16  # read at once where nobody watches the progress


class SlowDisk:
    """So many bytes a second for all who read together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0  # when what is asked for so far has been read

    def wait(self, nbytes: int) -> None:
        """Return no sooner than the disk could have brought so many more bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._bytes_per_second
            due = self._free_at
        time.sleep(max(0.0, due - time.perf_counter()))


class SlowPage(OpenPage):
    """An artifact on a slow disk."""

    def __init__(self, fd: int, path: Path, layout: PageLayout, disk: SlowDisk) -> None:
        self._disk = disk
        super().__init__(fd, path, layout)

    @property
    def progress(self) -> Callable[[int], int]:
        """Waits for the disk with each part, then tells whoever watches."""
        told = self._told

        def wait(nbytes: int) -> int:
            if nbytes:
                self._disk.wait(nbytes)
            return UNWATCHED_PART_NBYTES if told is None else told(nbytes)

        return wait

    @progress.setter
    def progress(self, told: Callable[[int], int] | None) -> None:
        self._told = told


class SlowStore(Store):
    """A store whose artifacts are read at a limited rate."""

    disk = SlowDisk(1e12)

    def open_page(self, ref: PageRef, layout: PageLayout) -> OpenPage:
        """As the store's own, but slow to read."""
        with super().open_page(ref, layout) as page:
            return SlowPage(os.dup(page.fd), page.path, layout, self.disk)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """A context of 2K, three rates. Full: 8K too, all rates."""
    observation = Observation(out)
    root = out / "store"
    shutil.rmtree(root, ignore_errors=True)
    variant = with_store(config, root, load="auto")
    rows: list[Row] = []
    with opened(variant) as runtime:
        name = runtime.name
        prompts = prompts_for(runtime)
        contexts = fitting(CONTEXTS if full else CONTEXTS[:1], runtime.context_tokens, TAIL_TOKENS + 2)
        sessions = [prompts(tokens) for tokens in contexts]
        for prefix in sessions:
            log_line(f"worth: computing and saving {len(prefix)} tokens")
            answer(runtime, prefix)
        assert runtime.writer is not None
        runtime.writer.drain()
        per_token = runtime.engine.pool.layout.page_nbytes(1)
        computing = [answer(runtime, prompts(tokens), persist=False).ttft_ms for tokens in contexts]
    for prefix, compute_ms in zip(sessions, computing, strict=True):
        even = len(prefix) * per_token / (compute_ms / 1e3)
        for fraction in FRACTIONS if full else (None, 1.0, 0.05):
            rate = None if fraction is None else fraction * even
            rows += measure_rate(variant, prefix, fraction, rate, config.bench.repeats)
    targets = [
        Target(
            f"TTFT / computing, {row['tokens']:,} tokens, disk {row['disk']}, {row['knows']}",
            row["ratio"],
            BOUND,
        )
        for row in rows
    ]
    panel = Bars(
        "Time to the first token beside computing everything",
        "TTFT / computing",
        [f"{row['tokens']:,}, disk {row['disk']}, {row['knows']}" for row in rows],
        {"ratio": [row["ratio"] for row in rows]},
    )
    return observation.publish(
        Result(
            "worth",
            "A hit on a slow disk: read it or compute it",
            common_settings(config, name, full),
            COLUMNS,
            rows,
            targets,
            (panel,),
            (
                "caliber: TTFT; computing: the same number of tokens, nothing of them stored",
                "disk 1x: reading the whole hit takes as long as computing it",
            ),
        )
    )


def measure_rate(
    config: Config, prefix: list[int], fraction: float | None, bytes_per_second: float | None, repeats: int
) -> list[Row]:
    """One rate: what a new process does, and what one does that has computed and read before."""
    disk = "as it is" if fraction is None else f"{fraction:g}x"
    log_line(f"worth: {len(prefix)} tokens, disk {disk}")
    hits: dict[str, list[Stats]] = {"new": [], "learned": []}
    # Computed for each as well: a new process meets memory that it never used before.
    computed: dict[str, list[Stats]] = {"new": [], "learned": []}
    for turn in range(repeats):
        with opened(config) as runtime:
            _slow_down(runtime, bytes_per_second)
            prompts = prompts_for(runtime, seed=turn + 1)
            hits["new"].append(_hit(runtime, prefix + prompts(TAIL_TOKENS)))
            computed["learned"].append(_hit(runtime, prompts(len(prefix) + TAIL_TOKENS)))
            hits["learned"].append(_hit(runtime, prefix + prompts(TAIL_TOKENS)))
        with opened(config) as runtime:
            prompts = prompts_for(runtime, seed=repeats + turn + 1)
            computed["new"].append(_hit(runtime, prompts(len(prefix) + TAIL_TOKENS)))
    compute_ms = {knows: median([stats.ttft_ms for stats in found]) for knows, found in computed.items()}
    return [
        {
            "tokens": len(prefix),
            "disk": disk,
            "rate": None if bytes_per_second is None else bytes_per_second / 1e6,
            "knows": knows,
            "compute_ms": compute_ms[knows],
            "ttft_ms": median([stats.ttft_ms for stats in found]),
            "ratio": median([stats.ttft_ms for stats in found]) / compute_ms[knows],
            "restored": median([stats.restored_tokens for stats in found]),
            "load": found[-1].load,
        }
        for knows, found in hits.items()
    ]


def _slow_down(runtime: Runtime, bytes_per_second: float | None) -> None:
    """Let a runtime read through a slow reader from now on."""
    assert runtime.store is not None
    if bytes_per_second is not None:
        store = SlowStore(runtime.store.root, runtime.store.limits)
        store.disk = SlowDisk(bytes_per_second)
        runtime.cache.store = store.open()


def _hit(runtime: Runtime, tokens: list[int]) -> Stats:
    """Answer one token with nothing in memory, saving nothing."""
    forget_ram(runtime)
    return answer(runtime, tokens, persist=False)
