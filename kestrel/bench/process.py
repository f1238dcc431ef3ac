"""A real server process for a measurement: started as a user starts it, watched by its log, killed without warning."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kestrel.bench.client import get_json
from kestrel.bench.records import BenchError
from kestrel.config import Config, load_config, resolved_dict
from kestrel.log import Log

BOOT_SECONDS = 900.0  # quantising a large checkpoint for the first time takes minutes
SAVE_SECONDS = 300.0  # for a session's last page after its answer
STOP_SECONDS = 60.0  # for draining the save queue on SIGTERM

_TOLD = ("[KV-DISK]", "[PREFILL-TIMING]")  # lines of the server worth passing on
_SAVED = re.compile(r"\[KV-DISK\] saved (\d+)-token KV")


class ServerProcess:
    """`python -m kestrel serve` in a process of its own, with its output in a file.

    A context manager: no process outlives it.
    The log lines `[KV-DISK] …` and `[PREFILL-TIMING] …` are passed on to `log` as they are found.
    """

    def __init__(self, config: Config, log_path: Path, log: Log) -> None:
        self.host = config.server.host
        self.port = config.server.port
        self.boot_ms = 0.0
        self._command = [sys.executable, "-m", "kestrel", "serve", *server_words(config)]
        self._log_path = log_path
        self._log = log
        self._told = 0  # bytes of the log file already looked at
        self._saved: list[int] = []  # tokens of the sessions saved so far
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until /health answers. Raises BenchError with the end of its log otherwise."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log(f"$ python {' '.join(self._command[1:])}")
        started = time.perf_counter()
        with self._log_path.open("wb") as file:
            self._process = subprocess.Popen(
                self._command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        told = started
        while True:
            try:
                self.health()
                break
            except OSError:
                time.sleep(0.01)
            now = time.perf_counter()
            self._check_alive("before it was ready")
            if now - started > BOOT_SECONDS:
                raise self._failure(f"did not answer /health within {BOOT_SECONDS:.0f} s")
            if now - told > 10:
                told = now
                self._log(f"waiting for the server ({now - started:.0f} s): {self._last_line()}")
        self.boot_ms = (time.perf_counter() - started) * 1000
        self.tell()

    @property
    def pid(self) -> int:
        """The running process's number. BenchError when it was not started."""
        return self._running().pid

    def health(self) -> dict[str, Any]:
        """The answer of /health. Raises OSError while nothing listens."""
        return get_json(self.host, self.port, "/health")

    def wait_until_saved(self, num_tokens: int) -> None:
        """Wait for the log line that says a session of at least `num_tokens` tokens is on disk.

        Raises BenchError when the process ends or the line does not come.
        """
        started = time.perf_counter()
        while True:
            self.tell()
            if any(saved >= num_tokens for saved in self._saved):
                return
            self._check_alive("while saving")
            if time.perf_counter() - started > SAVE_SECONDS:
                raise self._failure(
                    f"did not log `[KV-DISK] saved N-token KV` with N >= {num_tokens} within {SAVE_SECONDS:.0f} s"
                )
            time.sleep(0.01)

    def wait_until_quiet(self) -> None:
        """Wait until nothing runs, nothing waits and the store has stopped growing."""
        last: object = None
        while True:
            health = self.health()
            now = (health["queue"]["running"], health["queue"]["waiting"], health["store"])
            if now == last and now[:2] == (0, 0):
                return
            last = now
            self._check_alive("between two requests")
            time.sleep(0.2)

    def kill(self) -> None:
        """End the process with SIGKILL: no handler runs, nothing is flushed."""
        self._running().kill()
        self._running().wait()
        self._log("SIGKILL")

    def stop(self) -> None:
        """End the process with SIGTERM and wait for it. Raises BenchError when it does not end cleanly."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._failure(f"was still there {STOP_SECONDS:.0f} s after SIGTERM") from None
        self.tell()
        if code not in (0, -signal.SIGTERM):
            raise self._failure(f"ended with exit code {code} after SIGTERM")

    def tell(self) -> None:
        """Pass on what is new in the log."""
        with self._log_path.open("rb") as file:
            file.seek(self._told)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._told += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if found := _SAVED.search(line):
                self._saved.append(int(found[1]))
            if any(mark in line for mark in _TOLD):
                self._log(f"  {line.strip()}")

    def __enter__(self) -> "ServerProcess":
        try:
            self.start()
        except BaseException:  # nobody calls __exit__ for a context that was not entered
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BenchError("the server was not started")
        return self._process

    def _check_alive(self, when: str) -> None:
        code = self._running().poll()
        if code is not None:
            raise self._failure(f"ended {when} with exit code {code}")

    def _failure(self, what: str) -> BenchError:
        tail = self._log_path.read_text(errors="replace").splitlines()[-15:]
        shown = "\n".join(f"  | {line}" for line in tail) or "  | (nothing)"
        return BenchError(f"the server {what}; its log {self._log_path} ends with\n{shown}")

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output yet"


def server_words(config: Config) -> list[str]:
    """The fewest overrides that make a server of `config` (without its prefixes), in a stable order."""
    base = load_config(["model=custom"] if config.model.declared is None else [])
    words = ["model=custom"] if config.model.declared is None else []
    wanted, present = resolved_dict(config), resolved_dict(base)
    for group in ("model", "engine", "cache", "server"):
        words += _differences(group, wanted[group], present[group])
    return words


def _differences(key: str, wanted: Any, present: Any) -> list[str]:
    """Overrides that turn `present` into `wanted`, leaf by leaf."""
    if wanted == present:
        return []
    if isinstance(wanted, dict):
        below = present if isinstance(present, dict) else {}
        return [
            word
            for name in wanted
            for word in _differences(f"{key}.{name}", wanted[name], below.get(name, _ABSENT))
        ]
    return [f"{key}={_word(wanted)}"]


_ABSENT = object()


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_free_port(config: Config) -> Config:
    """The configuration with a loopback address and a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return dataclasses.replace(
        config,
        server=dataclasses.replace(config.server, host="127.0.0.1", port=port, warm=False),
        prefixes={},
    )


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the contents of files, so that reading them reads the disk, as after a reboot."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are still to be written would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
