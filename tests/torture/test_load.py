"""Promise: many clients at once, rude ones among them, each get their own answer, and memory stays flat.

How long they take is measured by `kestrel bench serve`.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.torture.servers import Nursery, Server
from tests.torture.talks import Answer, Refused, Turn, ask, events_of

NUM_CLIENTS = 64


def percentiles(values: Sequence[float], unit: float = 1e3) -> str:
    """p50, p95, p99 and the largest, in milliseconds."""
    ordered = sorted(values)
    named = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return ", ".join(
        f"{name} {ordered[min(len(ordered) - 1, int(share * len(ordered)))] * unit:.0f} ms"
        for name, share in named.items()
    )


@dataclass
class Crowd:
    """What the clients saw; guarded by its lock."""

    walls: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1


def be_a_client(server: Server, talks: list[list[Turn]], crowd: Crowd, seed: int, until: float) -> None:
    """Send requests until the time is over: patient, slow to read, or gone before the end."""
    rng = random.Random(seed)
    manner = ("whole", "stream", "slow", "leaves")[seed % 4]
    try:
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < until:
                turn = rng.choice(rng.choice(talks))
                started = time.perf_counter()
                try:
                    if manner == "whole":
                        assert ask(client, server.url, turn, stream=False) is not None
                    else:
                        stay = rng.random() if manner == "leaves" else 1.0
                        first = read_stream(client, server, turn, stay, 0.02 if manner == "slow" else 0.0)
                        with crowd.lock:
                            crowd.firsts.append(first - started)
                        if stay < 1.0:
                            crowd.count("left")
                            continue
                    with crowd.lock:
                        crowd.walls.append(time.perf_counter() - started)
                    crowd.count(manner)
                except Refused as refused:
                    assert refused.status == 429
                    crowd.count("refused")
                    time.sleep(0.1)
    except BaseException as error:
        with crowd.lock:
            crowd.failures.append(error)


def read_stream(client: httpx.Client, server: Server, turn: Turn, stay: float, pause: float) -> float:
    """Read a share of a streamed answer, slowly or not, and check it; returns when its first piece came."""
    answer, first = Answer(), None
    wanted = int(stay * len(turn.expected.tokens))
    for event in events_of(client, server.url, turn.body):
        first = first or time.perf_counter()
        if event.get("choices"):
            answer.add(event["choices"][0])
        if stay < 1.0 and len(answer.tokens) >= wanted:
            break
        time.sleep(pause)
    assert first is not None
    if stay < 1.0:
        assert answer.begins(turn.expected), (answer, turn.expected)
    else:
        assert answer == turn.expected, (answer, turn.expected)
    return first


def test_many_clients(
    nursery: Nursery, folder: Path, talks: list[list[Turn]], scale: Callable[[int, int], int]
) -> None:
    seconds = scale(60, 600)
    server = nursery.start(folder, f"server.max_queue={NUM_CLIENTS}", "cache.max_files=200")
    crowd, started = Crowd(), time.monotonic()
    threads = [
        threading.Thread(target=be_a_client, args=(server, talks, crowd, seed, started + seconds))
        for seed in range(NUM_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    memory = []
    while time.monotonic() < started + seconds:
        time.sleep(seconds / 40)
        memory.append(server.rss_bytes() / 1e6)
    for thread in threads:
        thread.join()
    assert not crowd.failures, crowd.failures[0]
    seconds_taken = time.monotonic() - started
    settled, last = statistics.mean(memory[10:15]), statistics.mean(memory[-5:])
    num_whole = sum(count for what, count in crowd.counts.items() if what not in ("left", "refused"))
    print(
        f"\n{NUM_CLIENTS} clients, {seconds_taken:.0f} s: {crowd.counts}, {num_whole / seconds_taken:.1f} answers/s"
    )
    print(f"whole answers: {percentiles(crowd.walls)}; first tokens: {percentiles(crowd.firsts)}")
    print(f"memory {settled:.0f} MB after a third, {last:.0f} MB at the end")
    assert {"whole", "stream", "slow", "left"} <= set(crowd.counts)
    assert last < settled + max(25.0, 0.1 * settled)
    with httpx.Client(timeout=30) as client:
        until = time.monotonic() + 30
        while sum(
            client.get(f"{server.url}/health").json()["queue"][name] for name in ("running", "waiting")
        ):
            assert time.monotonic() < until, "clients that left are still served"
            time.sleep(0.1)
    assert "Traceback" not in server.log and "the engine failed" not in server.log, server.log[-4000:]
    server.kill()
