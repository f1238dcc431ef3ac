"""Pulling published pages when a prompt asks for them, without ever making it wait much longer than computing.

A thread pulls, one prompt after the other and each in its order; a request waits for it at most so many seconds and
then goes on with what has arrived. The rest keeps coming, for the next request. DVC is imported by the first pull,
not before.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
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
    """Pages on their way into the store, for everybody who wants just these."""

    def __init__(self, pages: list[PublishedPage]) -> None:
        self.pages = pages
        self.asked = self.started = time.monotonic()  # when somebody asked last, and when pulling began
        self.done = threading.Event()
        self.problem: str | None = None


class Pulling:
    """A pull that a request waits for, until it is over or the time is."""

    def __init__(
        self, job: _Job | None, missing: list[PublishedPage], wait_seconds: float, problem: str | None
    ) -> None:
        """job None: nothing is pulled, and `problem` says why. missing: what the request counts as pulled."""
        self._job = job
        self._missing = missing
        self._wait_seconds = wait_seconds
        self._problem = problem
        self._began = time.monotonic()

    def poll(self) -> Pull | None:
        """What came of it; None while it is still to be waited for."""
        job, waited = self._job, time.monotonic() - self._began
        if job is None:
            return Pull(0, 0, 0.0, self._problem)
        if job.done.is_set():
            problem = job.problem
        elif waited < self._wait_seconds:
            return None
        else:
            problem = f"not all pulled within {self._wait_seconds:g} s (cache.pull_seconds); the rest follows"
        arrived = [page for page in self._missing if page.is_here]
        return Pull(
            sum(page.num_tokens for page in arrived), sum(page.nbytes for page in arrived), waited, problem
        )

    def wait(self) -> Pull:
        """Wait until it is over; what came of it."""
        while (pull := self.poll()) is None:
            assert self._job is not None
            self._job.done.wait(self._began + self._wait_seconds - time.monotonic())
        return pull


class Fetch:
    """All the pulls of one prompt, one after the other, and what they came to."""

    def __init__(self, pullings: Iterator[Pulling]) -> None:
        """pullings: is asked for the next one when the one before is over."""
        self.num_tokens = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.problem: str | None = None  # of the last pull
        self._pullings = pullings
        self._pulling = next(pullings, None)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for. Never waits itself."""
        while self._pulling is not None:
            pull = self._pulling.poll()
            if pull is None:
                return False
            self._note(pull)
        return True

    def wait(self) -> None:
        """Wait for all of it."""
        while self._pulling is not None:
            self._note(self._pulling.wait())

    def _note(self, pull: Pull) -> None:
        self.num_tokens += pull.num_tokens
        self.nbytes += pull.nbytes
        self.seconds += pull.seconds
        self.problem = pull.problem
        self._pulling = next(self._pullings, None)


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
        self._jobs: list[_Job] = []  # the first is being pulled
        self._failed: tuple[float, str] | None = None  # when, and why
        self._lock = threading.Lock()  # guards the last two

    def begin(self, namespace: Namespace, tokens: Tokens, num_known: Callable[[], int]) -> Pulling | None:
        """Begin to pull what is published and goes on along a prompt; None if that is no gain.

        num_known: how many tokens of the prompt are here already; asked only if something is published.
        """
        try:
            pages = self.listing.refresh(LOOK_SECONDS).follow(namespace.digest, tokens)
        except OSError as error:
            return Pulling(None, [], 0.0, f"the published pages cannot be listed: {error}")
        covered = min(pages[-1].num_prefix_tokens, len(tokens) - 1) if pages else 0
        if covered < self._min_gain:
            return None
        known = num_known()
        if covered < max(known + self._min_gain, 1):
            return None
        wanted = [page for page in pages if page.num_prefix_tokens > known]
        # What is here may still be unknown to the catalog.
        missing = [page for page in wanted if not page.is_here]
        job, problem = self._job(wanted)
        return Pulling(job, missing, self._wait_seconds, problem)

    def num_covered(self, namespace: Namespace, tokens: Tokens) -> int:
        """Tokens of a prompt, without its last one, that published pages hold; looks at what is known only."""
        pages = self.listing.follow(namespace.digest, tokens)
        return min(pages[-1].num_prefix_tokens, len(tokens) - 1) if pages else 0

    def _job(self, pages: list[PublishedPage]) -> tuple[_Job | None, str | None]:
        """The job that pulls these pages, a new one if there is none; or why they are not pulled."""
        with self._lock:
            if not self._jobs and (problem := self._still_failed()) is not None:
                return None, problem
            now = time.monotonic()
            seconds = now - self._jobs[0].started if self._jobs else 0.0
            if seconds > self._wait_seconds:
                return None, f"not pulled: an earlier pull has been running for {seconds:.0f} s"
            job = next((job for job in self._jobs if job.pages == pages), None)
            if job is None:
                job = _Job(pages)
                self._jobs.append(job)
                if len(self._jobs) == 1:
                    try:
                        threading.Thread(target=self._work, name="kestrel-pull", daemon=True).start()
                    except RuntimeError as error:  # the process may have no more threads
                        self._jobs.clear()
                        return None, f"not pulled: {error}"
            job.asked = now
            return job, None

    def _still_failed(self) -> str | None:
        """Why nothing is pulled at present, if the last pull failed only just now."""
        if self._failed is None or (ago := time.monotonic() - self._failed[0]) >= RETRY_SECONDS:
            return None
        return f"not pulled: {self._failed[1]} ({ago:.0f} s ago; tried again after {RETRY_SECONDS:.0f} s)"

    def _work(self) -> None:
        """Pull, one job after the other, until there is none."""
        while True:
            with self._lock:
                job = self._jobs[0]
                job.started = time.monotonic()
                job.problem = self._still_failed()
                if job.started - job.asked > self._wait_seconds:
                    job.problem = "not pulled: earlier pulls took too long"  # nobody waits for it any more
            if job.problem is None:
                job.problem = self._pull(job)
                with self._lock:
                    self._failed = None
                    if job.problem is not None:
                        self._failed = time.monotonic(), job.problem.removeprefix("not pulled: ")
            with self._lock:
                self._jobs.remove(job)
                is_last = not self._jobs  # whoever comes from now on starts another thread
            job.done.set()
            if is_last:
                return

    def _pull(self, job: _Job) -> str | None:
        """Pull the pages of a job; the reason if they did not come."""
        started = time.monotonic()
        try:
            repository = self._repository = self._repository or open_repository(self._store.root)
            outcome = pull(self._store, repository, lambda: repository.remote(None), job.pages)
        except (KestrelError, OSError) as error:
            self._repository = None  # what was wrong may be put right in DVC's configuration
            problem = f"not pulled: {error}"
            self._say(f"[KV-DISK] {problem}")
            return problem
        except (
            Exception
        ) as error:  # a fault of ours or of DVC: the request is computed, the log has the traceback
            self._repository = None
            log.exception("pulling %d pages failed", len(job.pages))
            return f"not pulled: {type(error).__name__}: {error}"
        self._say(
            f"[KV-DISK] pulled {outcome.moved} published page(s), {outcome.moved_bytes / 1e6:.1f} MB "
            f"in {time.monotonic() - started:.2f} s"
        )
        return None


def published_pages(root: Path) -> Listing:
    """What is published below a store's root now."""
    return Listing(root).refresh()
