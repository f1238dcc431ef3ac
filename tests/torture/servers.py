"""Real server processes that start fast, and what a client needs to reach them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 60


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One `kestrel serve`, forked by the nursery."""

    def __init__(self, nursery: "Nursery", number: int, port: int, log_path: Path) -> None:
        self._nursery, self._number, self._log_path = nursery, number, log_path
        self.url = f"http://127.0.0.1:{port}"
        self.pid = 0

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log_path.read_text(encoding="utf-8", errors="replace") if self._log_path.exists() else ""

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Return when the log holds `text`; fail with the log when the process ends or the time is over."""
        until = time.monotonic() + seconds
        while text not in self.log:
            ended = self.exit_code(0)
            if ended is None and time.monotonic() > until:
                self.send(signal.SIGUSR1)
                time.sleep(1)
                raise AssertionError(f"no {text!r} for {seconds:.0f} s in:\n{self.log}")
            assert ended is None, f"ended with {ended}, no {text!r} in:\n{self.log}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        if self.exit_code(0) is None:
            os.kill(self.pid, signal.SIGKILL)
            assert self.exit_code(30) is not None, "the server outlived SIGKILL"

    def exit_code(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it has not ended by then."""
        return self._nursery.exit_code(self._number, seconds)

    def rss_bytes(self) -> int:
        """Resident memory."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def number_of(self, name: str) -> float:
        """One number of /metrics, labels included in the name."""
        with httpx.Client(timeout=30) as client:
            for line in client.get(f"{self.url}/metrics").text.splitlines():
                if line.startswith(f"kestrel_{name} "):
                    return float(line.rpartition(" ")[2])
        raise KeyError(name)


class Nursery:
    """Starts servers of one model; a context manager, no server outlives it. Thread-safe."""

    def __init__(self, words: tuple[str, ...]) -> None:
        """words: settings that all servers share."""
        self.words = words
        self._changed = threading.Condition()
        self._born: dict[int, int] = {}
        self._dead: dict[int, int] = {}
        self._count = 0

    def __enter__(self) -> "Nursery":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.nursery", *self.words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, pid in self._born.items():
            if number not in self._dead:
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def start(self, folder: Path, *words: str, wait: bool = True, spell: str = "") -> Server:
        """Start a server in a folder; returns when it listens, or at once without `wait`.

        spell: Python code run in the new process first.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        log_path = folder / f"server-{port}-{time.monotonic_ns()}.log"
        order = {
            "words": [*self.words, f"server.port={port}", *words],
            "folder": str(folder),
            "log": str(log_path),
            "spell": spell,
        }
        assert self._process.stdin is not None
        with self._changed:
            server = Server(self, self._count, port, log_path)
            self._count += 1
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: server._number in self._born, START_SECONDS)
            server.pid = self._born[server._number]
        if wait:
            server.wait_for("kestrel: listening on")
        return server

    def exit_code(self, number: int, seconds: float) -> int | None:
        """How a server ended, None if it has not."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._dead, seconds)
            return self._dead.get(number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, number, value = line.split()
            with self._changed:
                (self._born if event == "born" else self._dead)[int(number)] = int(value)
                self._changed.notify_all()
