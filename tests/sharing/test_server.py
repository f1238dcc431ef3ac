"""Promise: a server in a clone without data pulls just what a prompt needs, stops nobody by it, and says so."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess
from tests.sharing.conftest import HOLD_LOCK, TEXTS, Board, free_port, pulled_pages, wait_for, wait_for_http

PROMPT = f"{TEXTS['manual']} What is said about person 9?"
SECONDS = "cache.pull_seconds=60"  # longer than anything that is waited for here

Serve = Callable[..., ServerProcess]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """serve(board, *words) -> a server in a board's folder that listens; it is killed in the end."""
    servers: list[ServerProcess] = []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "board")

    def start(board: Board, *words: str) -> ServerProcess:
        program = (
            "-X",
            "importtime",
            "-m",
            "kestrel",
            "serve",
        )  # the log tells every import, when it happens
        configured = [word for word in board.words if not word.startswith("prefixes.")]
        servers.append(ServerProcess(board.root, *configured, *words, program=program))
        servers[-1].wait_for("kestrel: listening on")
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def body(prompt: str, max_tokens: int = 8) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
    }


def complete(server: ServerProcess, prompt: str, max_tokens: int = 8) -> tuple[Any, dict[str, Any]]:
    """The answer with its log probabilities (JSON keeps every bit), and what the server says about it."""
    response = server.http.post("/v1/completions", json=body(prompt, max_tokens))
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"], found["kestrel"]


def has_imported_dvc(server: ServerProcess) -> bool:
    return re.search(r"^import time: .*\| +dvc$", server.log, re.MULTILINE) is not None


def cold_answer(serve: Serve, board: Board) -> Any:
    server = serve(board, "cache=off")
    choices, stats = complete(server, PROMPT)
    assert stats["matched_tokens"] == 0
    server.stop()
    return choices


def test_a_server_pulls_what_a_prompt_needs_once(
    serve: Serve, source: Board, other: Board, tmp_path: Path
) -> None:
    publisher = Board(tmp_path / "publisher", source.models)
    shutil.copytree(source.root, publisher.root)
    expected, there = complete(serve(publisher), PROMPT)
    assert there["restored_tokens"] > 300 and there["pulled_tokens"] == 0
    assert cold_answer(serve, other) == expected

    server = serve(other)
    assert "published: 6 page(s), 6 of them not here yet" in server.log
    _, stats = complete(server, "Nothing like this is published anywhere on earth, is it?")
    assert (stats["pulled_tokens"], stats["pull_problem"]) == (0, None)
    assert not has_imported_dvc(server)

    found, stats = complete(server, PROMPT)
    assert has_imported_dvc(server)
    assert found == expected
    here = [page for page in other.published() if page.is_here]
    assert {page.prefix for page in here} == {None, "manual"}
    assert pulled_pages(server.log) == len(here) == 4
    assert stats["pulled_bytes"] == sum(page.nbytes for page in here)
    assert stats["pulled_tokens"] == sum(page.num_tokens for page in here)
    assert stats["pull_problem"] is None and 0 < stats["pull_ms"] <= stats["queue_ms"]
    assert stats["restored_tokens"] >= stats["pulled_tokens"] - 1 and stats["computed_tokens"] < 32

    found, stats = complete(server, PROMPT)
    assert found == expected
    assert stats["pulled_tokens"] == 0 and stats["pull_ms"] == 0 and stats["computed_tokens"] < 32
    assert pulled_pages(server.log) == 4
    server.stop()
    other.check_store()


@pytest.mark.parametrize("fault", ["away", "corrupt"])
def test_a_bad_remote_is_named_and_costs_nothing_but_the_pull(serve: Serve, clone: Board, fault: str) -> None:
    expected = cold_answer(serve, clone)
    remote = clone.root.parent / "remote"
    if fault == "away":
        remote.rename(remote.with_name("moved"))
    for path in remote.glob("files/md5/*/*"):
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(30_000)
            file.write(b"\xff\x00\xff\x00")
    server = serve(clone)
    found, stats = complete(server, PROMPT)
    assert found == expected
    assert stats["pulled_tokens"] == stats["restored_tokens"] == 0
    reason = "cannot read from remote storage" if fault == "away" else "sent a damaged"
    assert reason in stats["pull_problem"] and f"[KV-DISK] {stats['pull_problem']}" in server.log
    assert not list((clone.root / ".dvc" / "cache").glob("files/md5/*/*"))
    assert not list((clone.root / ".dvc" / "cache").glob("kestrel/*"))
    _, stats = complete(server, f"{TEXTS['tools']} What")
    assert "tried again after" in stats["pull_problem"]
    server.stop()
    clone.check_store()  # of what was computed


class Gate:
    """A plain HTTP remote that does not answer before it is told to."""

    PROGRAM = """
import sys, time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
asked, go = Path(sys.argv[2]), Path(sys.argv[3])
class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        if "/md5/" in self.path:
            asked.touch()
            while not go.exists():
                time.sleep(0.01)
        super().do_GET()
    def log_message(self, *words):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

    def __init__(self, folder: Path, notes: Path) -> None:
        self._asked, self._go = notes / "asked", notes / "go"
        port = free_port()
        words = [str(port), str(self._asked), str(self._go)]
        self._process = subprocess.Popen([sys.executable, "-c", self.PROGRAM, *words], cwd=folder)
        self.url = f"http://127.0.0.1:{port}"
        wait_for_http(f"{self.url}/")

    def wait_until_asked(self) -> None:
        wait_for(self._asked.exists)

    def open(self) -> None:
        self._go.touch()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def gate(source: Board, clone: Board, tmp_path: Path) -> Iterator[Gate]:
    """The clone's remote, over the source's data, closed."""
    made = Gate(source.root / ".dvc" / "cache", tmp_path)
    clone.run("dvc", "remote", "modify", "storage", "url", made.url)
    yield made
    made.stop()


def stream(server: ServerProcess, prompt: str, max_tokens: int, first: threading.Event) -> int:
    """How many chunks a streamed answer had."""
    chunks = 0
    with server.http.stream(
        "POST", "/v1/completions", json={**body(prompt, max_tokens), "stream": True}
    ) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                chunks += 1
                first.set()
    return chunks


def queue(server: ServerProcess) -> tuple[int, int]:
    counts = server.http.get("/health").json()["queue"]
    return counts["running"], counts["waiting"]


def test_other_answers_go_on_while_a_pull_is_waited_for(serve: Serve, clone: Board, gate: Gate) -> None:
    expected = cold_answer(serve, clone)
    server = serve(clone, SECONDS)
    first = threading.Event()
    with ThreadPoolExecutor() as threads:
        earlier = threads.submit(stream, server, "It was there before", 400, first)
        assert first.wait(60)
        waiting = [threads.submit(complete, server, PROMPT) for _ in range(2)]  # they want the same pages
        gate.wait_until_asked()
        assert stream(server, "It came later", 200, threading.Event()) > 100
        assert earlier.result() > 200
        assert queue(server) == (0, 2) and not any(future.done() for future in waiting)
        gate.open()
        for future in waiting:
            found, stats = future.result()
            assert found == expected and stats["pull_problem"] is None and stats["computed_tokens"] < 32
    assert pulled_pages(server.log) == 4


def test_pulls_of_different_prefixes_wait_for_each_other(serve: Serve, clone: Board, gate: Gate) -> None:
    server = serve(clone, SECONDS)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(complete, server, f"{TEXTS[name]} So") for name in ("manual", "tools")]
        gate.wait_until_asked()
        wait_for(lambda: queue(server) == (0, 2))
        gate.open()
        assert [future.result()[1]["pulled_tokens"] > 200 for future in waiting] == [True, True]
    assert pulled_pages(server.log) == 6


def test_dvc_s_lock_is_waited_for_off_the_engine(serve: Serve, clone: Board) -> None:
    holder = clone.start("python", "-c", HOLD_LOCK)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    server = serve(clone, SECONDS)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(complete, server, PROMPT)
        wait_for(lambda: queue(server) == (0, 1))
        assert complete(server, "Meanwhile", 200)[1]["computed_tokens"] > 0
        assert not waiting.done()
        holder.kill()
        assert waiting.result()[1]["pulled_tokens"] > 300
    holder.communicate()


def test_a_pull_that_takes_too_long_is_computed(serve: Serve, clone: Board, gate: Gate) -> None:
    expected = cold_answer(serve, clone)
    server = serve(clone, "cache.pull_seconds=0.5")
    found, stats = complete(server, PROMPT)
    assert found == expected and stats["pulled_tokens"] == 0 and stats["pull_ms"] >= 500
    assert "not all pulled within 0.5 s (cache.pull_seconds)" in stats["pull_problem"]
    _, stats = complete(server, f"{TEXTS['tools']} What")
    assert "an earlier pull has been running" in stats["pull_problem"] and stats["pull_ms"] == 0
    gate.open()
    server.wait_for("[KV-DISK] pulled ")
    assert complete(server, f"{TEXTS['tools']} Which")[1]["pull_problem"] is None


def test_a_client_that_leaves_while_its_pages_are_pulled(serve: Serve, clone: Board, gate: Gate) -> None:
    server = serve(clone, SECONDS)
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/completions", json=body(PROMPT), timeout=1)
    gate.wait_until_asked()
    wait_for(lambda: queue(server) == (0, 0))
    gate.open()
    server.wait_for("[KV-DISK] pulled 4 published page(s)")
    _, stats = complete(server, PROMPT)
    assert stats["pulled_tokens"] == 0 and stats["computed_tokens"] < 32


def test_a_server_stops_while_a_remote_is_silent(serve: Serve, clone: Board, gate: Gate) -> None:
    server = serve(clone, SECONDS)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.http.post, "/v1/completions", json=body(PROMPT))
        gate.wait_until_asked()
        server.send(signal.SIGTERM)
        assert waiting.result().status_code == 503
    assert server.exit_code() == 0
    assert "Traceback" not in server.log


def test_prefixes_that_are_prepared_at_start_stop_nobody(serve: Serve, clone: Board, gate: Gate) -> None:
    server = serve(clone, SECONDS, "prefixes.manual.file=manual.txt", "server.warm=true")
    gate.wait_until_asked()
    assert complete(server, "Meanwhile", 50)[1]["computed_tokens"] > 0
    gate.open()
    server.wait_for("prefix manual: ready")
    assert pulled_pages(server.log) == 4
