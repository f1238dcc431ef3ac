"""Real server processes for the tests of this folder, and the stock OpenAI client to talk to them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from kestrel.config import load_config
from kestrel.runtime import Runtime

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "oracle" / "llama"
TINY_QWEN = ROOT / "tests" / "oracle" / "qwen3"
START_SECONDS = 60
SHARED_LIMITS = ("server.max_body_bytes=200000", "server.default_max_tokens=20")

StartServer = Callable[..., "ServerProcess"]
OpenRuntime = Callable[..., Runtime]


class ServerProcess:
    """`kestrel serve` in a folder of its own; stderr and stdout go to one log file."""

    def __init__(
        self, folder: Path, *words: str, program: tuple[str, ...] = ("-m", "kestrel", "serve")
    ) -> None:
        """Start it and return at once; words: settings, `key=value`. program: what Python runs."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / f"server-{self.port}.log"
        self.clients: list[openai.OpenAI] = []
        with open(self._log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, f"server.port={self.port}", *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def client(self, key: str) -> openai.OpenAI:
        """A client with an API key."""
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60))
        return self.clients[-1]

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Return when the log holds `text`; fail with the log when the process ends or the time is over first."""
        until = time.monotonic() + seconds
        while text not in self.log:
            assert self.process.poll() is None and time.monotonic() < until, f"no {text!r} in:\n{self.log}"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 30) -> int:
        """Wait for the process to end."""
        return self.process.wait(seconds)

    def stop(self) -> None:
        """Kill it if it still runs, and close the connections."""
        self.http.close()
        for client in (self.openai, *self.clients):
            client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers in the test's folder (so that they share a store); they are gone when the test ends."""
    servers: list[ServerProcess] = []

    def start(*words: str, program: tuple[str, ...] = ("-m", "kestrel", "serve")) -> ServerProcess:
        servers.append(ServerProcess(tmp_path, *words, program=program))
        servers[-1].wait_for("kestrel: listening on")
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def smollm2_words(smollm2: Path) -> tuple[str, ...]:
    """Settings that serve the default model without fetching or converting it again."""
    return f"model.path={smollm2}", f"model.root={smollm2.parent}", "model.name=smollm2"


@pytest.fixture(scope="session")
def tiny_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that serve a tiny model with random weights, where what it says does not matter."""
    return f"model.path={TINY}", f"model.root={tmp_path_factory.mktemp('models')}", "model.name=tiny"


@pytest.fixture(scope="session")
def qwen_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that serve another tiny model, whose chat template takes tools and enable_thinking."""
    path = ROOT / "tests" / "oracle" / "qwen3"
    return f"model.path={path}", f"model.root={tmp_path_factory.mktemp('models')}", "model.name=tiny"


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_words: tuple[str, ...]
) -> Iterator[ServerProcess]:
    """One server with the default model and a store, shared by the tests that do not stop it."""
    folder = tmp_path_factory.mktemp("server")
    running = ServerProcess(folder, *smollm2_words, *SHARED_LIMITS)
    running.wait_for("kestrel: listening on")
    yield running
    running.stop()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Random tokens of the tiny checkpoints' vocabulary."""
    return np.random.default_rng(seed).integers(5, 300, count).tolist()


@pytest.fixture
def open_runtime(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenRuntime]:
    """open_runtime("key=value", …) -> Runtime on <tmp_path>/kv."""
    opened: list[Runtime] = []

    def opening(*words: str) -> Runtime:
        base = (f"model.path={TINY_QWEN}", f"model.root={tmp_path_factory.getbasetemp() / 'models'}")
        store = (f"cache.root={tmp_path / 'kv'}", "cache.page_tokens=128", "cache.min_free_bytes=0")
        opened.append(Runtime.open(load_config([*base, *store, "engine.kv_ram_bytes=64MiB", *words])))
        return opened[-1]

    yield opening
    for runtime in opened:
        runtime.close()
