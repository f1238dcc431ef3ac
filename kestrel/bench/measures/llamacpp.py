"""llama.cpp as a server process of its own, from the xllamacpp wheel: `python -m kestrel.bench.measures.llamacpp JSON`.

It is run as its users run it, but for what makes the comparison fair: the same number of threads, one slot, no cache
of other prompts in memory, and only the flags that a variant names.
"""

import dataclasses
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.bench.client import ANSWER_SECONDS
from kestrel.bench.records import BenchError

START_SECONDS = 300.0
SLOT_FILE = "session.bin"


@dataclass(frozen=True)
class Flags:
    """What a llama.cpp server is started with. kv: f16 or q8_0; slots: folder for saved sessions."""

    model: str
    context_tokens: int
    threads: int
    flash_attention: bool
    kv: str
    slots: str | None = None

    @property
    def name(self) -> str:
        """Short name of the variant."""
        return f"{self.kv} KV, flash attention {'on' if self.flash_attention else 'off'}"


class LlamaServer:
    """A context manager around one server process."""

    def __init__(self, flags: Flags, log_path: Path) -> None:
        self.flags = flags
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> "LlamaServer":
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(self.flags))]
        with self._log_path.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        started = time.perf_counter()
        while not self._port:
            log = self._log_path.read_text(errors="replace")
            if found := re.search(r"^LISTENING \S+:(\d+)$", log, re.MULTILINE):
                self._port = int(found[1])
            elif self._process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                self._end()
                tail = "\n".join(f"  | {line}" for line in log.splitlines()[-15:])
                raise BenchError(f"llama.cpp did not start; {self._log_path} ends with\n{tail}")
            else:
                time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()

    def complete(self, tokens: list[int], max_tokens: int) -> tuple[float, dict[str, Any]]:
        """Milliseconds, by this side's clock, of a greedy answer of exactly `max_tokens`; llama.cpp's own timings."""
        body = {
            "prompt": tokens,
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "id_slot": 0,
        }
        milliseconds, answer = self._post("/completion", body)
        timings: dict[str, Any] = answer["timings"]
        return milliseconds, timings

    def save(self) -> int:
        """Save the slot's session; bytes written."""
        return int(self._post("/slots/0?action=save", {"filename": SLOT_FILE})[1]["n_written"])

    def restore(self) -> float:
        """Restore the saved session; milliseconds by this side's clock."""
        return self._post("/slots/0?action=restore", {"filename": SLOT_FILE})[0]

    def _post(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        return post("127.0.0.1", self._port, path, body)


def post(host: str, port: int, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Send JSON and read the whole answer: milliseconds from connecting to the end, and the answer. BenchError."""
    encoded = json.dumps(body).encode()
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", path, encoded, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        milliseconds = (time.perf_counter() - started) * 1e3
    finally:
        connection.close()
    if response.status != 200:
        raise BenchError(f"{path} answered {response.status}: {content[:500].decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(content)
    return milliseconds, answer


def serve(flags: Flags) -> None:
    """Run a server in this process until it is killed."""
    import xllamacpp

    flash, kinds = xllamacpp.llama_flash_attn_type, xllamacpp.ggml_type
    parameters = xllamacpp.CommonParams()
    parameters.model.path = flags.model
    parameters.n_ctx = flags.context_tokens
    parameters.n_parallel = 1
    parameters.cache_ram_mib = 0
    parameters.fit_params = False
    parameters.ctx_shift = False
    parameters.port = 0
    parameters.cpuparams.n_threads = flags.threads
    parameters.cpuparams_batch.n_threads = flags.threads
    parameters.flash_attn_type = (
        flash.LLAMA_FLASH_ATTN_TYPE_ENABLED if flags.flash_attention else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    parameters.cache_type_k = parameters.cache_type_v = kinds.__members__[f"GGML_TYPE_{flags.kv.upper()}"]
    if flags.slots is not None:
        parameters.endpoint_slots = True
        parameters.slot_save_path = flags.slots.rstrip("/") + "/"
    server = xllamacpp.Server(parameters)
    print(f"LISTENING {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(Flags(**json.loads(sys.argv[1])))
