"""Promise: answers given side by side are those of a lone run, bit for bit, and none runs out of memory half-way."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kestrel.engine.sampling import Sampling
from kestrel.runtime import Delta, Finished, Request, Runtime
from kestrel.server.journal import Journal
from kestrel.server.worker import EngineWorker, QueueLimits, Ticket
from tests.server.conftest import OpenRuntime, tokens_of
from tests.server.tickets import next_event


def bodies() -> list[dict[str, Any]]:
    """Requests of mixed lengths and samplings; some are equal, some share a prefix, two have three choices."""
    made = []
    for n in range(24):
        made.append(
            {
                "prompt": tokens_of([400, 17, 130, 1, 300, 256, 90][n % 7], seed=n % 5) + [7] * (n % 3),
                "max_tokens": 5 + 3 * (n % 11),
                "temperature": (0, 0.8, 1.5)[n % 3],
                "top_p": (1, 0.9)[n % 2],
                "presence_penalty": (0, 0.7)[n % 4 == 1],
                "seed": n,
                "n": 3 if n in (4, 13) else 1,
                "ignore_eos": n % 2 == 0,
                "logprobs": 3 if n % 4 == 0 else None,
            }
        )
    return made


def choices(response: httpx.Response) -> Any:
    """What must not depend on company: texts, log probabilities (JSON keeps every bit), reasons."""
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_many_clients_get_the_answers_of_a_lone_run(start_server: Any, qwen_words: tuple[str, ...]) -> None:
    lone = start_server(*qwen_words, "cache=off", "server.max_running=1")
    expected = [choices(lone.http.post("/v1/completions", json=body)) for body in bodies()]
    lone.stop()
    server = start_server(*qwen_words, "cache.page_tokens=128", "server.prompt_rows=50")

    def ask(body: dict[str, Any]) -> Any:
        return choices(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    def leave_early(n: int) -> None:
        body = {"prompt": tokens_of(350, n), "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_raw())

    with ThreadPoolExecutor(32) as pool:
        for _ in range(2):  # the second time much of it is in memory
            leaving = [pool.submit(leave_early, n) for n in range(4)]
            assert list(pool.map(ask, bodies())) == expected
            for gone in leaving:
                gone.result()
    server.wait_for("outcome=cancelled")
    server.process.kill()
    restarted = start_server(*qwen_words, "cache.page_tokens=128")
    server = restarted
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, bodies())) == expected
    assert "[KV-DISK] loaded" in restarted.log


def serve(
    runtime: Runtime,
    check: Callable[[EngineWorker], Awaitable[None]],
    limits: QueueLimits | None = None,
) -> list[str]:
    """Run `check` beside a started worker; return what was logged."""
    log: list[str] = []
    limits = limits or QueueLimits(max_running=8, prompt_rows=64, max_waiting=64)
    worker = EngineWorker(runtime, limits, Journal(log.append), iter(()))
    worker.start()
    try:
        asyncio.run(check(worker))  # type: ignore[arg-type]
    finally:
        worker.close()
        worker.join()
    return log


async def collect(ticket: Ticket) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    while True:
        event = await next_event(ticket)
        if isinstance(event, Finished):
            return tokens, event
        tokens += event.tokens


def submit(worker: EngineWorker, *requests: Request) -> list[Ticket]:
    return [worker.submit([request], time.perf_counter())[0] for request in requests]


def alone(runtime: Runtime, request: Request) -> list[int]:
    events = list(runtime.generate(request))
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def test_a_pool_for_two_answers_serves_many_without_running_out(open_runtime: OpenRuntime) -> None:
    requests = [
        Request(tokens_of(100 + n, n), 90, Sampling(temperature=1, seed=n), ignore_eos=True) for n in range(9)
    ]
    reference = open_runtime("cache=off")
    expected = [alone(reference, request) for request in requests]
    page = 128 * reference.engine.geometry.kv_bytes_per_token
    runtime = open_runtime(f"engine.kv_ram_bytes={5 * page}")
    most = 0

    async def check(worker: EngineWorker) -> None:
        nonlocal most
        tickets = submit(worker, *requests)
        answers = [asyncio.ensure_future(collect(ticket)) for ticket in tickets]
        while not all(answer.done() for answer in answers):
            most = max(most, worker.num_running)
            await asyncio.sleep(0.001)
        assert [answer.result()[0] for answer in answers] == expected

    serve(runtime, check)
    assert most == 2  # two pages each: a third answer had to wait for one of them


def test_a_prompt_in_flight_is_computed_once(open_runtime: OpenRuntime) -> None:
    prompt = tokens_of(450, 3)
    requests = [Request(prompt, 4, Sampling(temperature=1, seed=n), ignore_eos=True) for n in range(4)]
    requests.append(Request(prompt[:300] + tokens_of(50, 9), 4, ignore_eos=True))
    other = Request(tokens_of(200, 5), 4, ignore_eos=True)
    reference = open_runtime("cache=off")
    expected = [alone(reference, request) for request in [*requests, other]]
    runtime = open_runtime("engine.chunk_tokens=100")

    async def check(worker: EngineWorker) -> None:
        answers = await asyncio.gather(*map(collect, submit(worker, *requests, other)))
        assert [tokens for tokens, _ in answers] == expected
        computed = [finished.stats.computed_tokens for _, finished in answers]
        assert computed[0] == 450
        assert computed[1:4] == [1, 1, 1]
        assert computed[4] == 50  # the page that both end in was found when the first prompt was complete
        assert computed[5] == 200

    serve(runtime, check)


def test_a_cancelled_prompt_frees_those_who_waited_for_it_and_keeps_its_pages(
    open_runtime: OpenRuntime,
) -> None:
    prompt = tokens_of(480, 4)
    runtime = open_runtime("engine.chunk_tokens=64")

    async def check(worker: EngineWorker) -> None:
        first, second = submit(worker, Request(prompt, 4), Request(prompt, 4, ignore_eos=True))
        while (
            worker.num_running == 0
            or first.generation is None
            or first.generation.sequence.num_computed < 200
        ):
            await asyncio.sleep(0.001)
        worker.cancel(first)
        assert (await collect(first))[1].finish_reason == "cancelled"
        _, finished = await collect(second)
        assert finished.stats.computed_tokens <= 480 - 128
        assert finished.stats.ram_tokens >= 128

    serve(runtime, check)


def test_a_long_prompt_does_not_stop_those_who_talk(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("cache=off")

    async def check(worker: EngineWorker) -> None:
        [talking] = submit(worker, Request(tokens_of(20), 60, ignore_eos=True))
        await next_event(talking)
        [long] = submit(worker, Request(tokens_of(480, 1), 1))
        events: list[str] = []

        async def note(name: str, ticket: Ticket) -> None:
            while not isinstance(await next_event(ticket), Finished):
                events.append(name)

        await asyncio.gather(note("talking", talking), note("long", long))
        # 480 tokens in steps of at most 64 prompt rows: at least 7 tokens of the other answer meanwhile
        assert events.index("long") >= 7

    serve(runtime, check)


def test_an_answer_being_read_from_disk_makes_nobody_wait(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kestrel.cache.restore as restore

    stored = Request(tokens_of(460, 8), 3, ignore_eos=True)
    expected = alone(open_runtime(), stored)
    runtime = open_runtime("cache.load=always")  # however long the disk takes, it is not given up
    assert runtime.writer is not None
    gate = threading.Event()
    read_layers = restore.read_layers

    def slow_disk(*arguments: Any) -> int:
        gate.wait(20)
        return read_layers(*arguments)

    monkeypatch.setattr(restore, "read_layers", slow_disk)

    async def check(worker: EngineWorker) -> None:
        talking, reading = submit(worker, Request(tokens_of(20), 60, ignore_eos=True), stored)
        twin = submit(worker, stored)[0]  # waits until it is read, rather than reading it again
        leaving = submit(worker, Request(tokens_of(460, 8)[:300], 3))[0]
        await collect(talking)  # ends although the disk gives nothing
        worker.cancel(leaving)
        gate.set()
        for ticket in (reading, twin):
            tokens, finished = await collect(ticket)
            assert tokens == expected
        assert finished.stats.ram_tokens == 459

    serve(runtime, check)


def test_nothing_is_left_behind(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("cache=off")

    async def check(worker: EngineWorker) -> None:
        tickets = submit(worker, *(Request(tokens_of(200, n), 20, ignore_eos=True) for n in range(20)))
        for ticket in tickets[::3]:
            worker.cancel(ticket)
        for n, ticket in enumerate(tickets):
            if n % 3:
                await collect(ticket)
        while worker.num_running or worker.num_waiting:
            await asyncio.sleep(0.001)

    serve(runtime, check)
    assert runtime.engine.pool.num_available == runtime.engine.pool.num_pages
