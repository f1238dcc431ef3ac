"""From the start of the process to a server that listens, what the time is spent on, and memory by then and later.

The store holds 10,000 made-up artifacts, and its catalog is there, as after any restart; the weights are in the page
cache. Memory is what the kernel counts for the process (RSS), beside what it should come to: the weights as stored,
the KV in use, and the rest.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kestrel.bench.client import complete
from kestrel.bench.measures.result import (
    Bars,
    Column,
    Observation,
    Result,
    Row,
    Target,
    common_settings,
    median,
)
from kestrel.bench.measures.setting import CONTEXTS, Prompts, fitting, log_line, with_parts, with_store
from kestrel.bench.measures.synthetic import write_store
from kestrel.bench.process import ServerProcess, with_free_port
from kestrel.config import Config
from kestrel.models.fetch import resolve_model
from kestrel.models.weights import load_weights
from kestrel.store.layout import KvDtype, PageLayout

NUM_ARTIFACTS = 10_000
LISTENING_MS = 2000.0
OTHER_BYTES = 350_000_000  # RSS beside weights and KV
REQUEST_BYTES = 50_000_000  # what requests may need beside KV
NUM_SESSIONS = 8  # idle ones, of which half fit into the memory for KV
NUM_PACKAGES = 8  # shown of those that take longest to import
COLUMNS = (
    Column("what", "what"),
    Column("value", "value", "{:,.1f}"),
    Column("unit", "unit"),
    Column("share", "of", "{}"),
)
IMPORTED = "import kestrel.server.app"  # what `kestrel serve` imports
_IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")


def run(config: Config, out: Path, full: bool = False) -> Result:
    """As many starts as `bench.repeats` (full: three times as many); sessions of 512 tokens (full: 2K)."""
    observation = Observation(out)
    root = out / "store"
    log_line(f"startup: a store of {NUM_ARTIFACTS:,} artifacts")
    write_store(root, NUM_ARTIFACTS)
    checkpoint, name = resolve_model(config.model)
    weights = load_weights(checkpoint, config.engine.weights, Path(config.model.root) / "converted")
    weights_nbytes, geometry = weights.nbytes, weights.geometry
    longest = config.model.context_tokens or geometry.context_tokens
    session_tokens = fitting(CONTEXTS[:1] if full else (512,), longest, 2)[0]
    layout = PageLayout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, _kv(config))
    size = config.cache.page_tokens
    pages = -(-session_tokens // size)  # its one token of answer has no KV
    session_nbytes = pages * layout.page_nbytes(size)
    kv_nbytes = session_nbytes * (NUM_SESSIONS // 2)
    variant = with_parts(
        with_store(config, root),
        engine={
            "kv_ram_bytes": kv_nbytes,
            "kv_touched_bytes": min(config.engine.kv_touched_bytes, kv_nbytes),
        },
    )
    starts = []
    rows: list[Row] = []
    for number in range(config.bench.repeats * (3 if full else 1) + 1):
        server = ServerProcess(with_free_port(variant), out / "server.log", log_line)
        with server:
            if number == 0:
                rows = _memory(server, geometry.vocab_size, session_tokens, session_nbytes)
            else:
                starts.append(server.boot_ms)  # the first one rebuilt the catalog
            server.stop()
    shutil.rmtree(root)
    bare, imports = _process_seconds("pass", 5), _process_seconds(IMPORTED, 3)
    packages = import_seconds()
    listening = median(starts)
    times = [
        (
            "process start to listening",
            listening,
            f"{len(starts)} starts, {min(starts):,.0f} to {max(starts):,.0f}",
        ),
        ("Python itself", bare * 1e3, ""),
        (
            "imports",
            (imports - bare) * 1e3,
            "of the server's modules; in part beside the opening of the model",
        ),
        *((f"import {package}", seconds * 1e3, "its own modules") for package, seconds in packages),
    ]
    timed: list[Row] = [
        {"what": what, "value": value, "unit": "ms", "share": share} for what, value, share in times
    ]
    rows = timed + rows
    resident = {row["what"]: row["value"] * 1e6 for row in rows if row["unit"] == "MB"}
    other = resident["RSS after one session"] - weights_nbytes - session_nbytes
    grown = resident["RSS after all sessions"] - resident["RSS after one session"]
    rows += [
        {"what": "weights as stored", "value": weights_nbytes / 1e6, "unit": "MB", "share": ""},
        {"what": "engine.kv_ram_bytes of this run", "value": kv_nbytes / 1e6, "unit": "MB", "share": ""},
        {"what": "RSS - weights - KV of one session", "value": other / 1e6, "unit": "MB", "share": ""},
    ]
    targets = (
        Target(f"listening with {NUM_ARTIFACTS:,} artifacts, ms", listening, LISTENING_MS),
        Target("RSS beside weights and KV in use, MB", other / 1e6, OTHER_BYTES / 1e6),
        Target(
            f"growth by {NUM_SESSIONS - 1} more sessions beyond engine.kv_ram_bytes, MB",
            (session_nbytes + grown - kv_nbytes) / 1e6,
            REQUEST_BYTES / 1e6,
        ),
    )
    panels = (
        Bars("Start", "ms", [what for what, _, _ in times], {"ms": [value for _, value, _ in times]}),
        Bars(
            "Memory",
            "MB",
            [row["what"] for row in rows if row["unit"] == "MB"],
            {"MB": [row["value"] for row in rows if row["unit"] == "MB"]},
        ),
    )
    return observation.publish(
        Result(
            "startup",
            "Start-up and memory",
            {
                **common_settings(config, name, full),
                "artifacts": f"{NUM_ARTIFACTS:,}",
                "session": session_tokens,
            },
            COLUMNS,
            rows,
            targets,
            panels,
            (
                "listening: until /health answers, asked every 10 ms",
                "RSS counts the memory-mapped weights that were touched; the catalog is there, the page cache warm",
            ),
        )
    )


def _kv(config: Config) -> KvDtype:
    return "int8" if config.engine.kv == "int8" else "float32"


def _memory(server: ServerProcess, vocab_size: int, session_tokens: int, session_nbytes: int) -> list[Row]:
    """RSS of a server that listens, after one session, and after more than its memory for KV can hold."""
    log_line(f"startup: {NUM_SESSIONS} sessions of {session_tokens} tokens")
    prompts = Prompts(vocab_size)
    found = [("RSS when listening", resident_nbytes(server.pid))]
    for number in range(NUM_SESSIONS):
        complete(server.host, server.port, prompts(session_tokens), 1)
        server.wait_until_quiet()
        if number == 0:
            found.append(("RSS after one session", resident_nbytes(server.pid)))
    found.append(("RSS after all sessions", resident_nbytes(server.pid)))
    notes = ("", f"KV of one: {session_nbytes / 1e6:,.1f} MB", f"{NUM_SESSIONS}, half fit")
    return [
        {"what": what, "value": nbytes / 1e6, "unit": "MB", "share": note}
        for (what, nbytes), note in zip(found, notes, strict=True)
    ]


def resident_nbytes(pid: int) -> int:
    """VmRSS of a process: what it has in memory, mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(kilobytes) * 1024


def import_seconds() -> list[tuple[str, float]]:
    """The packages whose modules take longest to import, with the seconds of their own modules together."""
    output = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", IMPORTED], capture_output=True, text=True, check=True
    ).stderr
    seconds: dict[str, float] = {}
    for microseconds, module in _IMPORT_LINE.findall(output):
        package = module.partition(".")[0]
        name = "standard library" if package in sys.stdlib_module_names else package
        seconds[name] = seconds.get(name, 0.0) + int(microseconds) / 1e6
    return sorted(seconds.items(), key=lambda item: -item[1])[:NUM_PACKAGES]


def _process_seconds(code: str, repeats: int) -> float:
    """Median seconds of a Python process that runs `code`."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
        seconds.append(time.perf_counter() - started)
    return median(seconds)
