"""Pulling published pages when a prompt asks for them, without ever making it wait much longer than computing.

A thread pulls, in the order of the prompt; the request waits for it at most so many seconds and then goes on with
what has arrived. The rest keeps coming, for the next request. DVC is imported by the first pull, not before.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kestrel.errors import KestrelError
from kestrel.identity import Namespace, Tokens
from kestrel.sharing.exchange import open_repository, pull
from kestrel.sharing.listing import LOOK_SECONDS, Listing
from kestrel.sharing.mark import PublishedPage
from kestrel.sharing.repository import Repository
from kestrel.store.store import Store

RETRY_SECONDS = 30.0  # a remote that failed is left alone for so long

log = logging.getLogger("kestrel.sharing")


@dataclass(frozen=True)
class Pull:
    """What pulling did for one request."""

    num_tokens: int  # of the pages that arrived in time
    nbytes: int
    seconds: float  # that the request waited
    problem: str | None  # why not all of the published pages arrived


class _Job:
    """Pages on their way into the store."""

    def __init__(self, pages: list[PublishedPage]) -> None:
        self.pages = pages
        self.started = time.monotonic()
        self.done = threading.Event()
        self.problem: str | None = None


class OnDemand:
    """The published pages of a store, pulled as prompts need them. Thread-safe."""

    def __init__(self, store: Store, wait_seconds: float, min_gain: int, say: Callable[[str], None]) -> None:
        """wait_seconds: most a request waits. min_gain: tokens that make a pull worth it. `say` gets log lines."""
        self.listing = Listing(store.root)
        self._store = store
        self._wait_seconds = wait_seconds
        self._min_gain = min_gain
        self._say = say
        self._repository: Repository | None = None
        self._job: _Job | None = None
        self._failed: tuple[float, str] | None = None  # when, and why
        self._lock = threading.Lock()

    def extend(self, namespace: Namespace, tokens: Tokens, num_known: int) -> Pull | None:
        """Pull what is published and continues the first `num_known` tokens of a prompt; None if nothing is."""
        started = time.monotonic()
        try:
            pages = self.listing.refresh(LOOK_SECONDS).follow(namespace.digest, tokens)
        except OSError as error:
            return Pull(0, 0, 0.0, f"the published pages cannot be listed: {error}")
        covered = min(pages[-1].num_prefix_tokens, len(tokens) - 1) if pages else 0
        if covered < max(num_known + self._min_gain, 1):
            return None
        wanted = [page for page in pages if page.num_prefix_tokens > num_known]
        missing = [page for page in wanted if not page.is_here]
        problem = self._pull(wanted)  # those that are here may be unknown to the catalog yet
        arrived = [page for page in missing if page.is_here]
        return Pull(
            sum(page.num_tokens for page in arrived),
            sum(page.nbytes for page in arrived),
            time.monotonic() - started,
            problem,
        )

    def num_covered(self, namespace: Namespace, tokens: Tokens) -> int:
        """Tokens of a prompt, without its last one, that published pages hold; looks at what is known only."""
        pages = self.listing.follow(namespace.digest, tokens)
        return min(pages[-1].num_prefix_tokens, len(tokens) - 1) if pages else 0

    def _pull(self, pages: list[PublishedPage]) -> str | None:
        """Have these pages pulled and wait for it; the reason if they are not there in time."""
        with self._lock:
            job = self._job
            if job is not None and time.monotonic() - job.started > self._wait_seconds:
                seconds = time.monotonic() - job.started
                return f"not pulled: an earlier pull has been running for {seconds:.0f} s"
            if self._failed is not None and job is None:
                ago = time.monotonic() - self._failed[0]
                if ago < RETRY_SECONDS:
                    return f"not pulled: {self._failed[1]} ({ago:.0f} s ago; tried again after {RETRY_SECONDS:.0f} s)"
            if job is None:
                job = self._job = _Job(pages)
                threading.Thread(target=self._work, args=(job,), name="kestrel-pull", daemon=True).start()
        if not job.done.wait(self._wait_seconds):
            problem = f"not all pulled within {self._wait_seconds:g} s (cache.pull_seconds); the rest follows"
            self._say(f"[KV-DISK] {problem}")
            return problem
        if job.pages != pages and job.problem is None:
            return self._pull(pages)  # it was somebody else's
        return job.problem

    def _work(self, job: _Job) -> None:
        problem: str | None
        try:
            repository = self._repository = self._repository or open_repository(self._store.root)
            outcome = pull(self._store, repository, lambda: repository.remote(None), job.pages)
            seconds = time.monotonic() - job.started
            self._say(
                f"[KV-DISK] pulled {outcome.moved} published page(s), {outcome.moved_bytes / 1e6:.1f} MB "
                f"in {seconds:.2f} s"
            )
            problem = None
        except (KestrelError, OSError) as error:
            problem = f"not pulled: {error}"
            self._say(f"[KV-DISK] {problem}")
        except (
            Exception
        ) as error:  # a fault of ours or of DVC: the request is computed, the log has the traceback
            log.exception("pulling %d pages failed", len(job.pages))
            problem = f"not pulled: {type(error).__name__}: {error}"
        with self._lock:
            self._failed = (
                None if problem is None else (time.monotonic(), problem.removeprefix("not pulled: "))
            )
            self._job = None
            job.problem = problem
        job.done.set()


def published_pages(root: Path) -> Listing:
    """What is published below a store's root now."""
    return Listing(root).refresh()
