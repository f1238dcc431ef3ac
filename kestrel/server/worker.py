"""The engine thread: the only thread that calls the runtime while the server runs.

It goes round one loop: start the waiting requests that fit, compute one step for all that run, hand over what
became final. Requests wait in a bounded queue, also while published pages are fetched for them. What the engine
produces is handed to the event loop of whoever waits for it, so routes stay asynchronous and a slow client never
stops the engine.
"""

import asyncio
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from kestrel.engine.pool import common_prefix
from kestrel.errors import CapacityError, KestrelError
from kestrel.identity import as_tokens
from kestrel.runtime import Delta, Finished, Generation, Request, Runtime
from kestrel.server.journal import Journal
from kestrel.server.metrics import Totals
from kestrel.sharing.ondemand import Fetch

POLL_SECONDS = 0.002  # between two looks at what ends without telling: a read, a save that holds pages


class ShuttingDown(KestrelError):
    """The server is stopping and takes no more requests (HTTP 503)."""


class EngineFailure(KestrelError):
    """The engine failed on this request; the log has the traceback, and the server goes on (HTTP 500)."""


@dataclass(frozen=True)
class QueueLimits:
    """How much may be in the server at once; None does not limit.

    max_running: answers side by side. prompt_rows: most prompt tokens of a step in which answers are generated.
    max_waiting: requests beyond those that run; max_waiting_nbytes: KV they will take. max_per_key: requests of
    one API key, running or waiting.
    """

    max_running: int
    prompt_rows: int
    max_waiting: int
    max_waiting_nbytes: int | None = None
    max_per_key: int | None = None


Event = Delta | Finished
# What the engine makes of a client's request, and of which of its answers.
Inbox = asyncio.Queue[tuple[int, Event | Exception]]


class Ticket:
    """One answer on its way through the engine; made by `EngineWorker.submit` and read in one event loop."""

    def __init__(
        self, request: Request, arrived: float, key: str, label: str, index: int, inbox: Inbox
    ) -> None:
        """key: whose request it is; label: what log lines call it; index: which of the answers in the inbox."""
        self.request = request
        self.tokens = as_tokens(request.tokens)
        self.arrived = arrived  # this and the next in seconds of time.perf_counter
        self.key = key
        self.label = label
        self.started: float | None = None  # when the engine took it
        self.fetch: Fetch | None = None  # of published pages, once it came up
        self.generation: Generation | None = None  # while it runs
        self.found: tuple[int, int] | None = None  # tokens in memory and on disk when it first came up
        self._cancelled = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.index = index
        self.inbox = inbox  # shared with the other answers to the request

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    @property
    def queue_seconds(self) -> float:
        """Time from arrival until the engine took it; 0 while it waits."""
        return 0.0 if self.started is None else self.started - self.arrived

    def abandon(self) -> None:
        """Note that nobody waits any more: the engine stops after the step it is at."""
        self._cancelled.set()

    def hand_over(self, event: Event | Exception) -> None:
        """Make `event` the next one read. May be called from any thread; nothing happens if the reader is gone."""
        _deliver([(self, event)])


def _deliver(events: Sequence[tuple[Ticket, Event | Exception]]) -> None:
    """Make these the next ones their tickets' readers get, in this order.

    An event loop is woken once for all: each time it may take the interpreter from the engine.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event | Exception]]] = {}
    for ticket, event in events:
        by_loop.setdefault(ticket.loop, []).append((ticket, event))
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, items)
        except RuntimeError:  # the event loop is closed
            for ticket, _ in items:
                ticket.abandon()


def _put_all(items: Sequence[tuple[Ticket, Event | Exception]]) -> None:
    for ticket, event in items:
        ticket.inbox.put_nowait((ticket.index, event))


async def events_of(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Event]]:
    """What the engine makes of all answers to one request, as it comes: (index of the answer, its next piece).

    Each answer's last one is `Finished`. Raises what the engine raised.
    """
    num_unfinished = len(tickets)
    while num_unfinished:
        index, event = await tickets[0].inbox.get()
        if isinstance(event, Exception):
            raise event
        num_unfinished -= isinstance(event, Finished)
        yield index, event


class EngineWorker:
    """A thread that answers requests, many at a time, and works through `background` while there are none.

    background: an iterator whose steps are short; between two steps a request that came goes first. A step may
    call the runtime. An exception ends the background work, is logged, and harms no request.
    """

    def __init__(
        self, runtime: Runtime, limits: QueueLimits, journal: Journal, background: Iterator[None]
    ) -> None:
        self.limits = limits
        self.totals = Totals(runtime.engine.pool.token_nbytes)
        self._runtime = runtime
        self._journal = journal
        self._background: Iterator[None] | None = background
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._closing = False
        self._mean_seconds = 1.0  # how long answers took lately
        self._refused: tuple[object, ...] = ()  # what was tried in vain, and in which circumstances
        self._changed = threading.Condition()  # guards all of the above
        self._thread = threading.Thread(target=self._work, name="kestrel-engine")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Answers in the engine."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Answers in the queue."""
        return len(self._waiting)

    @property
    def closing(self) -> bool:
        """Whether new requests are refused because the server stops."""
        return self._closing

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended, and with it every answer."""
        return not self._thread.is_alive()

    @property
    def retry_after_seconds(self) -> int:
        """A guess, in whole seconds (at least 1), of when a place in the queue will be free."""
        return max(1, ceil(self._mean_seconds / max(1, self.num_running)))

    def submit(
        self, requests: Sequence[Request], arrived: float, key: str = "", label: str = ""
    ) -> list[Ticket]:
        """Queue the answers to one request that came at `arrived` (time.perf_counter): all of them, or none.

        Call in the event loop that reads them. Raises CapacityError beyond the limits, ShuttingDown after `close`.
        """
        inbox: Inbox = asyncio.Queue()
        tickets = [Ticket(request, arrived, key, label, n, inbox) for n, request in enumerate(requests)]
        with self._changed:
            if self._closing:
                raise ShuttingDown("the server is shutting down; send the request again when it is back")
            self._check_limits(tickets, key)
            self._waiting += tickets
            self._changed.notify_all()
        return tickets

    def _check_limits(self, tickets: Sequence[Ticket], key: str) -> None:
        limits, retry = self.limits, f"try again in about {self.retry_after_seconds} s"
        num_places = limits.max_running + limits.max_waiting
        num_taken = self.num_running + self.num_waiting
        if num_taken and num_taken + len(tickets) > num_places:
            self.totals.add_refused("queue")
            raise CapacityError(
                f"{self.num_waiting} requests are waiting and {self.num_running} running "
                f"(server.max_queue={limits.max_waiting}, server.max_running={limits.max_running}); {retry}"
            )
        num_own = sum(ticket.key == key for ticket in (*self._running, *self._waiting))
        if limits.max_per_key is not None and num_own and num_own + len(tickets) > limits.max_per_key:
            self.totals.add_refused("key")
            raise CapacityError(
                f"{num_own} requests of this key are in the server "
                f"(server.max_running_per_key={limits.max_per_key}); {retry}"
            )
        nbytes = sum(map(self._nbytes, (*self._waiting, *tickets)))
        if self._waiting and limits.max_waiting_nbytes is not None and nbytes > limits.max_waiting_nbytes:
            self.totals.add_refused("bytes")
            raise CapacityError(
                f"the waiting requests and this one take {nbytes:,} bytes of KV "
                f"(server.max_queue_bytes={limits.max_waiting_nbytes:,}); {retry}"
            )

    def _nbytes(self, ticket: Ticket) -> int:
        longest = len(ticket.tokens) + ticket.request.max_tokens
        return min(longest, self._runtime.context_tokens) * self._runtime.engine.pool.token_nbytes

    def cancel(self, ticket: Ticket) -> None:
        """Stop working on an answer: at once when it still waits, after the present step when it runs."""
        ticket.abandon()
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self.totals.add_outcome("cancelled")

    def close(self) -> None:
        """Refuse new requests and those that wait; the running ones are finished, then the thread ends."""
        with self._changed:
            self._closing = True
            refused, self._waiting = self._waiting, []
            self._changed.notify_all()
        for ticket in refused:
            ticket.hand_over(ShuttingDown("the server began to shut down while this request was waiting"))

    def cancel_running(self) -> None:
        """Stop the running answers after the present step, whoever waits for them."""
        with self._changed:
            for ticket in self._running:
                ticket.abandon()

    def join(self) -> None:
        """Wait until the thread has ended, if it was ever started; call `close` first."""
        if self._thread.ident is not None:
            self._thread.join()

    # -- the loop -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing or self._background is not None):
                    self._changed.wait()
                if self._closing and not self._running:
                    return
            try:
                self._go_round()
            except Exception:  # a fault of the loop itself: those it hits learn of it, the next are served
                self._fail_all()

    def _go_round(self) -> None:
        self._cancel_abandoned()
        self._admit()
        ready = self._ready()
        if ready:
            self._step(ready)
        elif self._waiting or self._running:
            time.sleep(POLL_SECONDS)  # for a read that nobody needs any more, or the writer to free pages
        else:
            self._step_background()

    def _fail_all(self) -> None:
        """Log the exception being handled and end every answer with it."""
        with self._changed:
            tickets = [*self._running, *self._waiting]
            self._running, self._waiting = [], []
        for ticket in tickets:
            self.totals.add_outcome("failed")
            ticket.hand_over(self._failure(ticket))
            if ticket.generation is not None:
                try:
                    ticket.generation.close()
                except Exception:
                    self._journal.line(f"kestrel: pages of {ticket.label} are lost\n{traceback.format_exc()}")

    def _cancel_abandoned(self) -> None:
        """Finish what nobody waits for; what is still being read is left alone until that ends."""
        for ticket in self._running:
            generation = _running(ticket)
            if ticket.cancelled and not generation.sequence.is_reading:
                generation.cancel()
                self._hand_over([ticket])

    def _admit(self) -> None:
        """Start waiting requests, first come first served, as long as there are places and pages for them."""
        with self._changed:
            candidates = list(self._waiting)
        for ticket in candidates:
            running = [_running(other) for other in self._running]
            if len(running) >= self.limits.max_running:
                return
            if any(self._is_computing_for(other, ticket) for other in running):
                continue  # those behind it may go first: it is served sooner by waiting
            if not self._is_fetched(ticket):
                continue  # they need not wait for what it needs from elsewhere
            circumstances = (ticket, len(running), self._runtime.engine.pool.num_available)
            if circumstances == self._refused:
                return
            with self._changed:
                if ticket not in self._waiting:
                    continue  # cancelled meanwhile, or the server is closing
                self._waiting.remove(ticket)
                self._running.append(ticket)
            if not self._start(ticket, running):
                self._refused = circumstances
                return

    def _is_fetched(self, ticket: Ticket) -> bool:
        """Whether the published pages of a waiting request are here, or late; begins to fetch them."""
        try:
            if ticket.fetch is None:
                ticket.fetch = self._runtime.fetch(ticket.request)
            return ticket.fetch.is_over
        except KestrelError:  # `_start` meets it again, and fails the request
            pass
        except Exception:  # a fault of ours: it is computed
            self._journal.line(f"kestrel: nothing is pulled for {ticket.label}\n{traceback.format_exc()}")
        ticket.fetch = Fetch(iter(()))
        return True

    def _start(self, ticket: Ticket, running: Sequence[Generation]) -> bool:
        """Start one request or fail it; False if there are no pages for it now, and it goes on waiting."""
        now = time.perf_counter()
        error: Exception | None = None
        try:
            ticket.generation = self._runtime.admit(ticket.request, running, ticket.fetch)
        except KestrelError as problem:
            error = problem
        except Exception:  # a fault of ours: its request fails, the others go on
            error = self._failure(ticket)
        if ticket.generation is not None:
            ticket.started = now
            return True
        with self._changed:
            self._running.remove(ticket)
            if error is None and not self._closing:
                if not ticket.cancelled:
                    self._waiting.insert(0, ticket)
                return False
        self.totals.add_outcome("failed")
        ticket.hand_over(
            error or ShuttingDown("the server began to shut down while this request was waiting")
        )
        return True

    def _is_computing_for(self, other: Generation, ticket: Ticket) -> bool:
        """Whether a running prompt is computing, or reading, pages that a waiting request could use.

        So a prefix that several requests in flight have in common is computed once.
        """
        is_restoring = other.sequence.restore is not None  # read or not, nobody can find it yet
        if ticket.request.prompt_logprobs or (not other.is_prefilling and not is_restoring):
            return False
        runtime = self._runtime
        scope = ticket.request.scope or runtime.cache.common
        if scope.namespace != other.sequence.scope.namespace:
            return False
        least = runtime.config.cache.min_match
        page_tokens = runtime.engine.pool.page_tokens
        num_prompt = len(other.request.tokens)
        num_common = common_prefix(as_tokens(other.request.tokens), ticket.tokens[:-1])
        # Found by others are full pages as they are completed, and the rest when the prompt is.
        num_full = num_common // page_tokens * page_tokens
        wanted = min(num_full + page_tokens, num_prompt) if num_common - num_full >= least else num_full
        if other.sequence.num_computed >= wanted and not is_restoring:
            return False
        if ticket.found is None:
            course = runtime.cache.course(ticket.tokens, ticket.request.scope)
            in_ram = sum(rows for _, rows in runtime.cache.find_in_ram(ticket.tokens, course))
            stored = runtime.cache.find(ticket.tokens, ticket.request.scope).num_tokens
            ticket.found = in_ram, stored
        in_ram, stored = ticket.found
        # What the other one is reading need not be read twice.
        known = in_ram if is_restoring else max(in_ram, stored)
        return min(num_common, wanted) - known >= least

    def _ready(self) -> list[Ticket]:
        """Whom the next step is for: nobody waits for another one's disk, unless there is nothing else to do."""
        ready = [ticket for ticket in self._running if not _running(ticket).sequence.is_reading]
        if ready:
            return ready
        return [ticket for ticket in self._running if not ticket.cancelled][:1]

    def _step(self, tickets: Sequence[Ticket]) -> None:
        generations = [_running(ticket) for ticket in tickets]
        is_mixed = any(not generation.is_prefilling for generation in generations)
        rows = self.limits.prompt_rows if is_mixed else None
        try:
            self._runtime.step(generations, rows)
        except Exception:  # find out whose it is, so that the others go on
            self._journal.line(f"kestrel: a step failed, going on one by one\n{traceback.format_exc()}")
            for ticket in tickets:
                self._step_alone(ticket)
        self.totals.add_step(len(tickets))
        self._hand_over(tickets)

    def _step_alone(self, ticket: Ticket) -> None:
        generation = _running(ticket)
        try:
            if generation.sequence.num_pending == 0:
                raise RuntimeError("the failed step has lost the logits of this sequence")
            self._runtime.step([generation])
        except Exception as error:
            generation.fail(error)

    def _hand_over(self, tickets: Sequence[Ticket]) -> None:
        """Give the readers what became final; whatever happens, each one's last event is Finished or an error."""
        events = [(ticket, event) for ticket in tickets for event in self._take(ticket)]
        for ticket, event in events:
            if isinstance(event, Finished):
                self._note_end(ticket, event)
            elif isinstance(event, Exception):
                self.totals.add_outcome("failed")
        finished = {ticket for ticket in tickets if _running(ticket).finished}
        with self._changed:  # before their readers know, so that their places are free by then
            self._running = [ticket for ticket in self._running if ticket not in finished]
        _deliver(events)

    def _take(self, ticket: Ticket) -> list[Event | Exception]:
        """What became final of one answer, or why it failed."""
        try:
            return list(_running(ticket).take())
        except KestrelError as error:
            return [error]
        except Exception:
            return [self._failure(ticket)]

    def _note_end(self, ticket: Ticket, finished: Finished) -> None:
        stats = finished.stats
        self.totals.add_finished(finished, ticket.queue_seconds)
        self._mean_seconds += 0.2 * (stats.wall_ms / 1e3 - self._mean_seconds)
        queue_ms = ticket.queue_seconds * 1e3
        self._journal.event(
            "answer",
            id=ticket.label,
            key=ticket.key,
            outcome=finished.finish_reason,
            prompt_tokens=stats.prompt_tokens,
            restored_tokens=stats.restored_tokens,
            ram_tokens=stats.ram_tokens,
            computed_tokens=stats.computed_tokens,
            answer_tokens=stats.completion_tokens,
            queue_ms=round(queue_ms),
            ttft_ms=round(queue_ms + stats.ttft_ms),
            wall_ms=round(queue_ms + stats.wall_ms),
        )

    def _failure(self, ticket: Ticket) -> EngineFailure:
        """Log the exception being handled, and what the client gets instead of it."""
        self._journal.line(f"kestrel: the engine failed on request {ticket.label}\n{traceback.format_exc()}")
        return EngineFailure("the engine failed on this request; the server's log says why")

    def _step_background(self) -> None:
        background = self._background
        if background is None:
            return
        try:
            next(background)
        except StopIteration:
            self._background = None
        except Exception:  # preparing prefixes is a convenience: without it requests are only slower
            self._journal.line(f"kestrel: background work failed and is given up\n{traceback.format_exc()}")
            self._background = None


def _running(ticket: Ticket) -> Generation:
    """The generation of a ticket among those that run."""
    if ticket.generation is None:
        raise RuntimeError(f"request {ticket.label} is not running")
    return ticket.generation
