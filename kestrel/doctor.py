"""What this machine is and whether Kestrel works on it: facts, each with a verdict and what to do about it."""

import dataclasses
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from kestrel import __version__
from kestrel.bench.machine import cpuinfo, instructions
from kestrel.config import Config
from kestrel.configured import configured_store, is_at_hand
from kestrel.errors import KestrelError, StoreError
from kestrel.identity import Tokens, as_tokens
from kestrel.log import Log

if TYPE_CHECKING:
    from kestrel.engine.engine import Engine
    from kestrel.runtime import Runtime

Verdict = Literal["ok", "note", "fail"]

PACKAGES = ("onnxruntime", "numba", "numpy", "tokenizers", "safetensors", "hydra-core", "dvc")
DISK_TEST_BYTES = 64 * 2**20

NEEDED_FLAGS = {"x86_64": "avx2", "aarch64": "asimddp"}


@dataclass(frozen=True)
class Finding:
    """One fact. `note` is worth knowing, `fail` keeps Kestrel from working or from being exact."""

    topic: str
    verdict: Verdict
    text: str


def examine(config: Config, log: Log) -> Iterator[Finding]:
    """Yield findings as they are made: versions and CPU at once, then disk, store, model and numerics (seconds)."""
    yield versions()
    yield from cpu()
    yield disk(config)
    yield store(config)
    yield from model(config, log)


def versions() -> Finding:
    """Kestrel, Python, and the packages whose version could matter in a bug report."""
    parts = [f"kestrel {__version__}", f"python {platform.python_version()}"]
    missing = []
    for package in PACKAGES:
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(
            "versions", "fail", f"{', '.join(parts)}; missing: {', '.join(missing)} (pip install kestrel)"
        )
    return Finding("versions", "ok", ", ".join(parts))


def cpu() -> Iterator[Finding]:
    """The processor, the instructions Kestrel's kernels profit from, and how busy the machine is."""
    machine = platform.machine()
    useful = instructions()
    name = cpuinfo().get("model name") or platform.processor() or "unknown"
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    extras = ", ".join(useful) or "no extras"
    text = f"{name} ({machine}), {cores} cores, {memory / 2**30:.1f} GiB, kernels use {extras}"
    needed = NEEDED_FLAGS.get(machine)
    if needed is not None and needed not in useful:
        yield Finding("cpu", "note", f"{text}; without {needed} int8 and int4 weights are slow here")
    else:
        yield Finding("cpu", "ok", text)
    load = os.getloadavg()[0]
    if load > 0.5 * cores:
        yield Finding(
            "load", "note", f"{load:.1f} busy threads on {cores} cores: measurements will be too slow"
        )


def disk(config: Config) -> Finding:
    """Speed and free space where artifacts are kept, measured with an unnamed temporary file."""
    root = Path(config.cache.root).absolute()
    folder = next(path for path in (root, *root.parents) if path.is_dir())
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    try:
        write_seconds, read_seconds = _time_disk(folder)
    except OSError as error:
        return Finding("disk", "fail", f"{folder} cannot be written: {error} (cache.root)")
    write, read = (DISK_TEST_BYTES / 1e6 / seconds for seconds in (write_seconds, read_seconds))
    text = f"{folder}: writes {write:.0f} MB/s, reads {read:.0f} MB/s, {free / 2**30:.1f} GiB free"
    per_token = _kv_bytes_per_token(config)
    if per_token is not None:
        seconds = 2048 * per_token / 1e6 / read
        text += f"; a prefix of 2048 tokens is {2048 * per_token / 1e6:.0f} MB, read in {seconds:.2f} s"
    if free < config.cache.min_free_bytes:
        return Finding(
            "disk", "note", f"{text}; less than cache.min_free_bytes is free, so nothing will be saved"
        )
    return Finding("disk", "ok", text)


def _time_disk(folder: Path) -> tuple[float, float]:
    """Seconds to write (with fsync) and to read back DISK_TEST_BYTES that are not in the page cache."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(DISK_TEST_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(block)):
            pass
        return written, time.perf_counter() - start


def _kv_bytes_per_token(config: Config) -> int | None:
    """KV bytes of one token of the declared model, or None where none is declared."""
    declared = config.model.declared
    if declared is None or declared.geometry is None:
        return None
    geometry = declared.geometry
    head = 4 * geometry.head_dim if config.engine.kv == "float32" else geometry.head_dim + 4
    return 2 * geometry.num_layers * geometry.num_kv_heads * head


def store(config: Config) -> Finding:
    """Whether the store opens, what it holds, and what lies in it that should not."""
    cache = config.cache
    if not cache.enabled:
        return Finding(
            "store", "note", "switched off (cache.enabled=false): every prompt is computed in full"
        )
    root = Path(cache.root)
    if not root.is_dir():
        return Finding("store", "ok", f"nothing is stored yet in {root} (cache.root)")
    opened = configured_store(cache)
    try:
        opened.open()
        usage = opened.usage()
    except StoreError as error:
        return Finding("store", "fail", str(error))
    finally:
        opened.close()
    text = (
        f"{root}: {usage.files} artifacts, {usage.tokens} tokens, {usage.bytes / 1e6:.1f} of "
        f"{cache.max_bytes / 1e6:.1f} MB"
    )
    if usage.quarantined:
        return Finding(
            "store",
            "note",
            f"{text}; {usage.quarantined} damaged files in {root / 'quarantine'} (kestrel kv gc)",
        )
    if usage.strangers:
        return Finding("store", "note", f"{text}; {usage.strangers} files there are not Kestrel's but count")
    return Finding("store", "ok", f"{text} (kestrel kv verify reads them all)")


def model(config: Config, log: Log) -> Iterator[Finding]:
    """Load the model and check, on this CPU, that a token's result does not depend on what it is computed with."""
    if not is_at_hand(config.model):
        text = "not here yet, so numerics and exactness are not checked"
        yield Finding(
            "model", "note", f'{text}; `kestrel generate "hello"` fetches it, or set model.path=PATH'
        )
        return
    from kestrel.runtime import Runtime

    apart = dataclasses.replace(config, cache=dataclasses.replace(config.cache, enabled=False))
    try:
        started = time.perf_counter()
        runtime = Runtime.open(apart, log)
    except KestrelError as error:
        yield Finding("model", "fail", str(error))
        return
    with runtime:
        seconds = time.perf_counter() - started
        yield Finding(
            "model",
            "ok",
            f"{runtime.name}: {config.engine.weights} weights, {runtime.engine.weights.nbytes / 1e6:.0f} MB, context "
            f"{runtime.context_tokens}, loaded in {seconds:.1f} s",
        )
        numerics = runtime.engine.numerics
        yield Finding(
            "numerics",
            "ok" if numerics.exact else "fail",
            f"probe {numerics.digest[:16]}, steps of {numerics.least_rows} rows or more, "
            f"{runtime.engine.threads} threads, namespace {runtime.namespace.name}",
        )
        yield exactness(runtime)


def exactness(runtime: "Runtime") -> Finding:
    """Compute one prompt whole, split in several ways and beside a stranger; all bits of KV and logits must agree."""
    engine = runtime.engine
    num_tokens = min(300, engine.chunk_tokens, engine.context_tokens)
    tokens = as_tokens([(7 + 31 * i) % engine.geometry.vocab_size for i in range(num_tokens)])
    _computed(engine, tokens[:8], [8])  # the first step of a process is slower
    started = time.perf_counter()
    whole = _computed(engine, tokens, [num_tokens])
    seconds = time.perf_counter() - started
    ways = [[num_tokens - 1, 1], [1] * 3 + [num_tokens - 3], [num_tokens // 3, num_tokens - num_tokens // 3]]
    differing = [
        f"{'beside a stranger, ' if stranger else ''}split {'+'.join(str(rows) for rows in way)}"
        for way in ways
        for stranger in (False, True)
        if _computed(engine, tokens, way, stranger) != whole
    ]
    if differing:
        return Finding(
            "exactness",
            "fail",
            f"{num_tokens} tokens give other bits when {'; '.join(differing)}: a restored answer may differ from a "
            "computed one here. Please report this with the output of `kestrel doctor --json`",
        )
    return Finding(
        "exactness",
        "ok",
        f"{num_tokens} tokens give the same bits whole ({num_tokens / seconds:.0f} tok/s), split and beside a stranger",
    )


def guarantees(config: Config) -> Iterator[Finding]:
    """Try every way of computing a prompt on this model and CPU, with both KV dtypes: a finding for each guarantee.

    Takes some 5000 tokens of computing in processes of its own, twice, and a folder of temporary files.
    """
    if not is_at_hand(config.model):
        yield Finding("exact", "fail", "the model is not here yet, so nothing can be tried (see above)")
        return
    from kestrel.exactness.guarantees import check
    from kestrel.exactness.ways import PROMPT_TOKENS

    started = time.perf_counter()
    try:
        for guarantee in check(config):
            kept = ", ".join(f"{kv} KV {'ok' if ok else 'BROKEN'}" for kv, ok in guarantee.kept.items())
            text = f"{guarantee.text}: {kept}"
            if guarantee.holds:
                yield Finding("exact", "ok", text)
            else:
                yield Finding("exact", "fail", f"{text}; {guarantee.problem}")
    except KestrelError as error:
        yield Finding("exact", "fail", str(error))
        return
    seconds = time.perf_counter() - started
    text = f"{config.engine.weights} weights, {PROMPT_TOKENS} tokens, tried in {seconds:.0f} s"
    yield Finding("exact", "ok", text)


def _computed(engine: "Engine", tokens: Tokens, way: list[int], stranger: bool = False) -> bytes:
    """Digest of the KV and the last logits of `tokens`, computed in steps of `way` rows in new pages."""
    from kestrel.engine.engine import Span

    pool = engine.pool
    pages = [pool.allocate() for _ in range(-(-len(tokens) // pool.page_tokens))]
    other = [pool.allocate()] if stranger else []
    try:
        digest = xxhash.xxh3_128()
        start = 0
        for rows in way:
            spans = [Span(tokens[start : start + rows], start, pages, num_logits=1)]
            beside = min(5, engine.chunk_tokens - rows)
            if stranger and beside > 0:
                spans.insert(0, Span(tokens[-beside:], 0, other))
            logits = engine.forward(spans)
            start += rows
        digest.update(logits.tobytes())
        for layer in range(engine.geometry.num_layers):
            for index, page in enumerate(pages):
                valid = min(pool.page_tokens, len(tokens) - index * pool.page_tokens)
                for array, axis in pool.layer_arrays(page, layer):
                    digest.update(np.take(array, range(valid), axis).tobytes())
        return bytes(digest.digest())
    finally:
        for page in [*pages, *other]:
            pool.release(page)
