"""How finding, opening and evicting grow with the number of artifacts; the pages are made up, the store is real.

Find: an 8K prompt whose session is stored whole, one that departs from a stored session in the middle of a page, and
one that nothing is stored of. Open: with its catalog, and with the catalog rebuilt from the files alone. Evict: 1,000
pages leave while another thread goes on finding, as requests do.
"""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from kestrel.bench.measures.result import Bars, Column, Lines, Observation, Result, Row, Target, median
from kestrel.bench.measures.setting import log_line
from kestrel.bench.measures.synthetic import PAGE_TOKENS, SESSION_PAGES, SyntheticStore, write_store
from kestrel.bench.records import BenchError
from kestrel.config import Config
from kestrel.identity import Tokens, as_tokens
from kestrel.store.store import Limits, Store

T = TypeVar("T")

SIZES = (1_000, 10_000, 100_000)
NUM_EVICTED = 1_000
NUM_FINDS = 200
STALL_MS = 50.0  # a find that takes longer while pages are evicted is one that people notice
COLUMNS = (
    Column("pages", "artifacts", "{:,}"),
    Column("find_ms", "find 8K, ms", "{:.2f}"),
    Column("find_p99_ms", "p99", "{:.2f}"),
    Column("diverged_ms", "diverging, ms", "{:.2f}"),
    Column("miss_ms", "miss, ms", "{:.3f}"),
    Column("open_ms", "open, ms", "{:,.0f}"),
    Column("rebuild_s", "rebuild, s", "{:,.2f}"),
    Column("evicted", "evicted", "{:,}"),
    Column("evict_ms", "evict, ms", "{:,.0f}"),
    Column("busy_find_ms", "find meanwhile, ms", "{:.2f}"),
    Column("busy_most_ms", "longest", "{:.1f}"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """1,000 and 10,000 artifacts. Full: 100,000 too. The configured model does not matter."""
    observation = Observation(out)
    rows = []
    for size in SIZES if full else SIZES[:2]:
        rows.append(measure_size(out / "stores" / str(size), size, config.bench.repeats))
        shutil.rmtree(out / "stores")
    most = rows[-1]
    targets = [
        Target(f"find for an 8K prompt among {most['pages']:,}, ms", most["find_ms"], 2.0),
        Target(f"open {most['pages']:,} with the catalog, ms", most["open_ms"], 1000.0),
        Target(f"rebuild the catalog of {most['pages']:,}, s", most["rebuild_s"], 60.0),
        Target(f"longest find while {most['evicted']:,} are evicted, ms", most["busy_most_ms"], STALL_MS),
    ]

    def curve(key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(row["pages"], row[key] * factor) for row in rows]

    panels = (
        Lines(
            "Growth",
            "artifacts",
            "ms",
            {
                "rebuild from files": curve("rebuild_s", 1e3),
                "open with the catalog": curve("open_ms"),
                "find 8K": curve("find_ms"),
                "find 8K, diverging": curve("diverged_ms"),
                "miss": curve("miss_ms"),
            },
        ),
        Bars(
            f"Finding while up to {NUM_EVICTED:,} pages are evicted",
            "ms",
            [f"among {row['pages']:,}" for row in rows],
            {
                "median, quiet": [row["find_ms"] for row in rows],
                "median, meanwhile": [row["busy_find_ms"] for row in rows],
                "longest, meanwhile": [row["busy_most_ms"] for row in rows],
            },
        ),
    )
    settings = {
        "pages of": f"{PAGE_TOKENS} tokens",
        "repeats": config.bench.repeats,
        "cases": "all" if full else "quick",
    }
    notes = (
        f"sessions of {SESSION_PAGES} pages, some with a common beginning; a page has {PAGE_TOKENS} tokens",
        "find looks at the catalog; open compares it with the folders; rebuild reads every header and all token ids",
    )
    return observation.publish(
        Result("store", "A store of many artifacts", settings, COLUMNS, rows, targets, panels, notes)
    )


def measure_size(root: Path, num_pages: int, repeats: int) -> Row:
    """Everything about a store of so many artifacts, which is made at `root`."""
    log_line(f"store: writing {num_pages:,} artifacts")
    made = write_store(root, num_pages)
    log_line(f"store: {num_pages:,} artifacts, rebuilding the catalog")
    store = Store(root, Limits())
    rebuild, _ = _timed(store.open)
    num_found = store.usage().files
    store.close()
    if num_found != num_pages:
        raise BenchError(f"wrote {num_pages} artifacts, the store counts {num_found}")
    opening = []
    for _ in range(repeats):
        store = Store(root, Limits())
        opening.append(_timed(store.open)[0])
        store.close()
    num_evicted = min(NUM_EVICTED, num_pages // 2)
    with Store(root, Limits(max_files=num_pages - num_evicted)) as store:
        prompts = _prompts(made)
        hits, diverging, missing = (
            [_find_seconds(store, made, prompt) for prompt in prompts[kind]] for kind in range(3)
        )
        log_line(f"store: {num_pages:,} artifacts, evicting {num_evicted:,} while finding")
        evict, meanwhile = _evict_while_finding(store, made, prompts[0], num_evicted)
    return {
        "pages": num_pages,
        "find_ms": median(hits) * 1e3,
        "find_p99_ms": float(np.quantile(hits, 0.99)) * 1e3,
        "diverged_ms": median(diverging) * 1e3,
        "miss_ms": median(missing) * 1e3,
        "open_ms": median(opening) * 1e3,
        "rebuild_s": rebuild,
        "evicted": num_evicted,
        "evict_ms": evict * 1e3,
        "busy_find_ms": median(meanwhile) * 1e3,
        "busy_most_ms": max(meanwhile) * 1e3,
    }


def _prompts(made: SyntheticStore) -> tuple[list[Tokens], list[Tokens], list[Tokens]]:
    """Prompts of 8K: stored whole, departing from a stored session within a page, not stored."""
    random = np.random.default_rng(1)
    tail = as_tokens(np.full(31, 7))
    chosen = [made.sessions[number] for number in random.integers(0, len(made.sessions), NUM_FINDS)]
    hits = [np.concatenate([session, tail]) for session in chosen]
    diverging = []
    for session in chosen:
        changed = session.copy()
        changed[len(session) // 2 + 100 :] = 5
        diverging.append(changed)
    missing = [as_tokens(random.integers(0, 150_000, 8192)) for _ in range(NUM_FINDS)]
    return hits, diverging, missing


def _find_seconds(store: Store, made: SyntheticStore, prompt: Tokens) -> float:
    started = time.perf_counter()
    store.find_prefix(made.namespace, prompt, PAGE_TOKENS, 16)
    return time.perf_counter() - started


def _evict_while_finding(
    store: Store, made: SyntheticStore, prompts: list[Tokens], num_evicted: int
) -> tuple[float, list[float]]:
    """Seconds that a sweep took, and seconds of every find meanwhile."""
    seconds: list[float] = []
    evicted: list[int] = []

    def sweep() -> None:
        started = time.perf_counter()
        evicted.append(len(store.sweep()))
        seconds.append(time.perf_counter() - started)

    thread = threading.Thread(target=sweep, name="bench-sweep")
    thread.start()
    finds: list[float] = []
    number = 0
    while thread.is_alive() or not finds:
        finds.append(_find_seconds(store, made, prompts[number % len(prompts)]))
        number += 1
    thread.join()
    if evicted != [num_evicted]:
        raise BenchError(f"expected {num_evicted} evictions, found {evicted}")
    return seconds[0], finds


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result
