"""Promise: the queue is bounded, and nobody computes for a client that is gone."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import ServerProcess


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_words: tuple[str, ...]
) -> Iterator[ServerProcess]:
    """A server that answers one request at a time and lets another one wait."""
    folder = tmp_path_factory.mktemp("queue")
    running = ServerProcess(folder, *smollm2_words, "server.max_running=1", "server.max_queue=1")
    running.wait_for("kestrel: listening on")
    yield running
    running.stop()


LONG = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 2}


def queue(server: Any) -> tuple[int, int]:
    """(running, waiting) of the server."""
    counts = server.http.get("/health").json()["queue"]
    return counts["running"], counts["waiting"]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def streaming(server: Any) -> Iterator[None]:
    """A long streamed answer whose first bytes are here; leaving the block closes its connection."""
    body = LONG | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_raw()
        next(pieces)
        yield


def test_a_full_queue_answers_429_and_says_when_to_try_again(server: Any) -> None:
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=30))
    )
    with streaming(server):
        waiting.start()
        wait_until(lambda: queue(server) == (1, 1))
        refused = server.http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model="smollm2", prompt="a")
    waiting.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["kestrel"]["queue_ms"] > 0


def test_a_client_that_leaves_a_stream_frees_the_engine(server: Any) -> None:
    with streaming(server):
        assert queue(server) == (1, 0)
    wait_until(lambda: queue(server) == (0, 0))
    assert "outcome=cancelled" in server.log


def test_a_client_that_leaves_before_its_answer_frees_the_engine(server: Any) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.5)
    wait_until(lambda: queue(server) == (0, 0))


def test_a_client_that_leaves_the_queue_is_never_served(server: Any) -> None:
    with streaming(server):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.3)
        wait_until(lambda: queue(server) == (1, 0))
    wait_until(lambda: queue(server) == (0, 0))
