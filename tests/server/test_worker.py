"""Promise: background work gives way to requests between two of its steps, and its failure harms none of them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kestrel.config import load_config
from kestrel.errors import CapacityError
from kestrel.runtime import Delta, Finished, Request, Runtime
from kestrel.server.journal import Journal
from kestrel.server.worker import EngineWorker, QueueLimits, ShuttingDown
from tests.server.tickets import next_event

TINY = Path(__file__).parent.parent / "oracle" / "llama"
REQUEST = Request(tokens=[50, 51, 52], max_tokens=4, ignore_eos=True)
LIMITS = QueueLimits(max_running=1, prompt_rows=64, max_waiting=2)
LONG = Request(tokens=[50, 51, 52], max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    words = [f"model.path={TINY}", f"model.root={tmp_path_factory.mktemp('models')}", "cache=off"]
    with Runtime.open(load_config(words)) as opened:
        yield opened


async def answer(worker: EngineWorker) -> list[Delta | Finished]:
    [ticket] = worker.submit([REQUEST], time.perf_counter())
    events = [await next_event(ticket)]
    while not isinstance(events[-1], Finished):
        events.append(await next_event(ticket))
    assert ticket.queue_seconds > 0
    return events


def run(runtime: Runtime, background: Iterator[None], check: Callable[[EngineWorker], object]) -> list[str]:
    """Run `check` (a coroutine function) beside a started worker; return what was logged."""
    log: list[str] = []
    worker = EngineWorker(runtime, LIMITS, Journal(log.append), background)
    worker.start()
    try:
        asyncio.run(check(worker))  # type: ignore[arg-type]
    finally:
        worker.close()
        worker.join()
    assert worker.stopped
    return log


def test_requests_go_before_background_work_that_never_ends(runtime: Runtime) -> None:
    steps = 0

    def endless() -> Iterator[None]:
        nonlocal steps
        while True:
            steps += 1
            yield

    async def check(worker: EngineWorker) -> None:
        for _ in range(3):
            before = steps
            assert len(await answer(worker)) == 5
            while steps == before:  # and the background work goes on afterwards
                await asyncio.sleep(0.001)

    run(runtime, endless(), check)


def test_background_work_that_fails_is_logged_and_harms_no_request(runtime: Runtime) -> None:
    def failing() -> Iterator[None]:
        yield
        raise RuntimeError("broken, for the test")

    async def check(worker: EngineWorker) -> None:
        for _ in range(2):
            assert len(await answer(worker)) == 5

    log = run(runtime, failing(), check)
    assert sum("broken, for the test" in line for line in log) == 1


def test_closing_refuses_those_that_wait_and_those_that_come(runtime: Runtime) -> None:
    async def check(worker: EngineWorker) -> None:
        tickets = [worker.submit([request], time.perf_counter())[0] for request in (LONG, REQUEST, REQUEST)]
        with pytest.raises(CapacityError, match="server.max_queue=2"):
            worker.submit([REQUEST], time.perf_counter())
        worker.close()
        with pytest.raises(ShuttingDown):
            worker.submit([REQUEST], time.perf_counter())
        for ticket in tickets[1:]:
            with pytest.raises(ShuttingDown):
                await next_event(ticket)
        worker.cancel(tickets[0])

    run(runtime, iter(()), check)
