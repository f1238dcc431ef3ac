"""Writing finished pages to the store behind the requests' backs."""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from kestrel.cache.restore import cut_page
from kestrel.cache.scope import Scope
from kestrel.engine.pool import PagePool
from kestrel.engine.priority import BEHIND_ANSWERS, Activity, give_way
from kestrel.errors import KestrelError, StoreError
from kestrel.identity import Tokens
from kestrel.store.store import Store

# While answers are computed the writer rests so many times as long as it has computed: a step whose threads lose a core
# for a millisecond takes up to two longer. 7 pages a second of 12 MB are written all the same.
RESTS = 30
_LOOKS_SECONDS = 0.02  # apart, whether the rest may end


@dataclass(frozen=True)
class Keeping:
    """What becomes of the pages a request computes.

    persist: they are saved; if not, they stay in memory only. pin: the last one, and thereby those before it, is not
    evicted. ttl_seconds: those it saved leave when they are unused for so long.
    """

    persist: bool = True
    pin: bool = False
    ttl_seconds: float | None = None


@dataclass
class SaveReport:
    """What has been written for one request so far; filled in by the writer thread."""

    bytes_written: int = 0
    pages_written: int = 0
    dropped_at: int | None = (
        None  # first position that is not saved; what follows it is out of reach, so not either
    )
    is_store_failing: bool = False  # that is why; else the queue was full


@dataclass(frozen=True)
class PageSave:
    """A page to write: its rows in the pool, its place in the prefix, and whose request it belongs to."""

    page: int
    scope: Scope
    key: bytes
    parent: bytes
    first: int
    tokens: Tokens
    prefix_sha256: str
    report: SaveReport = field(repr=False)
    ttl_seconds: float | None = None  # it leaves when it is unused for so long


@dataclass(frozen=True)
class RequestEnd:
    """Marks the end of a request's saves: its prefix of `num_tokens` is in the store once this is reached."""

    num_tokens: int
    scope: Scope  # of the last page
    key: bytes
    report: SaveReport
    pin: bool  # it is not evicted


class Writer:
    """One thread and a bounded queue. Pages in the queue are referenced, so they stay as they are.

    Nothing here ever fails or delays a request: a full queue drops the page, a store that cannot be
    written is reported once until it works again.
    """

    def __init__(
        self,
        store: Store,
        pool: PagePool,
        queue_pages: int,
        activity: Activity,
        log: Callable[[str], None],
    ):
        """activity: of the engine whose answers come first."""
        self._store = store
        self._activity = activity
        self._most_at_rest = queue_pages // 2  # pages waiting; with more the queue might get full
        self._pool = pool
        self._log = log
        self._queue: queue.Queue[PageSave | RequestEnd | threading.Event | None] = queue.Queue()
        self._room = threading.Semaphore(queue_pages)
        self._dropped_at: int | None = None  # num_dropped when the store began to fail; None while it works
        self._failed_tokens = 0  # of the longest page that could not be saved since
        self.num_dropped = 0
        self.bytes_written = 0
        self._thread = threading.Thread(target=self._write_all, name="kestrel-writer", daemon=True)
        self._thread.start()

    def submit(self, save: PageSave) -> bool:
        """Queue a page; False when it is dropped: the queue is full, or a page before it was dropped."""
        report = save.report
        if report.dropped_at is not None or not self._room.acquire(blocking=False):
            report.dropped_at = save.first if report.dropped_at is None else report.dropped_at
            self.num_dropped += 1
            return False
        self._pool.retain(save.page)
        self._queue.put(save)
        return True

    def end_request(self, end: RequestEnd) -> None:
        """Have the `saved` line printed when the pages queued so far are written."""
        self._queue.put(end)

    @property
    def num_pending(self) -> int:
        """Entries not yet worked through."""
        return self._queue.unfinished_tasks

    def drain(self) -> None:
        """Wait until everything queued so far is written, whatever is queued meanwhile."""
        reached = threading.Event()
        self._queue.put(reached)
        while not reached.wait(1.0) and self._thread.is_alive():
            pass  # at the end of the process there may be nobody left to reach it

    def close(self) -> None:
        """Write what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        give_way(BEHIND_ANSWERS)
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, RequestEnd):
                    self._report(item)
                else:
                    began = time.thread_time()
                    self._write(item)
            finally:
                self._queue.task_done()
            if isinstance(item, PageSave):
                self._rest(RESTS * (time.thread_time() - began))

    def _rest(self, seconds: float) -> None:
        """Leave the cores to the answers that are computed, unless somebody waits for the writer or for its pages."""
        end = time.monotonic() + seconds
        while self._activity.is_busy and time.monotonic() < end:
            with self._queue.mutex:
                waiting = list(self._queue.queue)
            if (
                len(waiting) > self._most_at_rest
                or 2 * self._pool.num_available < self._pool.num_pages
                or any(item is None or isinstance(item, threading.Event) for item in waiting)
            ):
                break
            time.sleep(_LOOKS_SECONDS)

    def _write(self, save: PageSave) -> None:
        try:
            dropped_at = save.report.dropped_at
            if dropped_at is not None and save.first > dropped_at:
                self.num_dropped += 1
                return
            if self._is_covered(save):
                return
            written = self._store.publish(
                save.scope.namespace,
                save.scope.identity,
                self._pool.layout,
                save.key,
                save.parent,
                save.first,
                save.tokens,
                save.prefix_sha256,
                cut_page(self._pool, save.page, len(save.tokens)),
                save.ttl_seconds,
            )
            if written:
                save.report.bytes_written += written
                save.report.pages_written += 1
                self.bytes_written += written
            self._store.remove_covered(save.scope.namespace, save.parent, save.tokens)
            # A page that was there already says nothing about whether writing works, and a small one little.
            if written and len(save.tokens) >= self._failed_tokens:
                self._note_recovery()
        except Exception as error:  # the cache is an optimisation: say it once, go on
            self._note_failure(error, len(save.tokens))
            save.report.dropped_at = save.first  # of this request's pages those come in order
            save.report.is_store_failing = True
        finally:
            self._pool.release(save.page)
            self._room.release()

    def _note_failure(self, error: Exception, num_tokens: int) -> None:
        if self._dropped_at is None:
            self._dropped_at = self.num_dropped
            self._log(f"[KV-DISK] not saved, pages are dropped until the store works again: {error}")
            if not isinstance(error, KestrelError):
                self._log(traceback.format_exc())  # a fault of ours, not of the disk
        self._failed_tokens = max(self._failed_tokens, num_tokens)
        self.num_dropped += 1

    def _note_recovery(self) -> None:
        if self._dropped_at is not None:
            num_lost = self.num_dropped - self._dropped_at
            self._log(f"[KV-DISK] the store works again: saving; {num_lost} page(s) were not saved meanwhile")
            self._dropped_at, self._failed_tokens = None, 0

    def _is_covered(self, save: PageSave) -> bool:
        """Whether a longer page of the same place holds all of a partial page's tokens already."""
        if len(save.tokens) == self._pool.page_tokens:
            return False
        return self._store.covers(save.scope.namespace, save.parent, save.tokens)

    def _report(self, end: RequestEnd) -> None:
        if end.pin:
            self._pin(end)
        if end.report.is_store_failing:
            return  # which was said
        if end.report.dropped_at is not None:
            self._log(
                f"[KV-DISK] saved {end.report.dropped_at} of {end.num_tokens} tokens only, the disk is too slow: "
                "raise cache.save_queue_pages if this happens often"
            )
        elif end.report.pages_written and self._dropped_at is None:
            path = self._store.page_path(end.scope.namespace.digest, end.key)
            self._log(f"[KV-DISK] saved {end.num_tokens}-token KV -> {path}")

    def _pin(self, end: RequestEnd) -> None:
        """Pin what the request wants pinned."""
        try:
            problem = None if self._store.pin([end.key]) else "its last page is not in the store"
        except StoreError as error:
            problem = str(error)
        if problem is not None:
            self._log(f"[KV-DISK] {end.num_tokens} tokens are not pinned: {problem}")
