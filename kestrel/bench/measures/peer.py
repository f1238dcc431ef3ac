"""Kestrel beside llama.cpp: the same weights in the same GGUF file, the same number of threads, in turns.

Both are server processes asked over HTTP with token ids, greedy. llama.cpp comes from the xllamacpp wheel; where it
has a choice (flash attention on or off, KV as f16 or q8_0) all are run and Kestrel is compared with the fastest.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kestrel.bench.measures.llamacpp import SLOT_FILE, Flags, LlamaServer, post
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
from kestrel.bench.measures.setting import (
    CONTEXTS,
    TAIL_TOKENS,
    WARM_UP_TOKENS,
    Prompts,
    fitting,
    log_line,
    with_parts,
    with_store,
)
from kestrel.bench.measures.twins import KINDS, write_twin
from kestrel.bench.process import ServerProcess, drop_from_page_cache, with_free_port
from kestrel.bench.records import BenchError
from kestrel.bench.session import artifact_paths
from kestrel.config import Config
from kestrel.models.fetch import resolve_model

PREFILLS = (512, *CONTEXTS)
DECODES = (128, *CONTEXTS)
ANSWER_TOKENS = 33  # the first comes with the prefill
ORDER = ("prefill", "decode", "restart")
LEFT, DROPPED = STATES = ("files as they were left", "page cache dropped")
ROOM = 64  # tokens kept free behind the longest prompt
PREFILL_BOUNDS = {512: 1.3, CONTEXTS[0]: 1.3, CONTEXTS[1]: 1.2}
COLUMNS = (
    Column("what", "what"),
    Column("weights", "weights"),
    Column("tokens", "tokens", "{:,}"),
    Column("kestrel", "Kestrel", "{:,.1f}"),
    Column("variant", "its KV"),
    Column("llama", "llama.cpp", "{:,.1f}"),
    Column("llama_variant", "its best"),
    Column("unit", "unit"),
    Column("ratio", "ratio", "{:.2f}"),
)

Times = dict[tuple[str, int, str], list[float]]  # (what, tokens, variant) -> measurements


class KestrelServer:
    """`kestrel serve` for one KV dtype, with the same face as LlamaServer."""

    def __init__(self, config: Config, log_path: Path) -> None:
        self.name = f"{config.engine.kv} KV"
        self._process = ServerProcess(with_free_port(config), log_path, _ignore)

    def __enter__(self) -> "KestrelServer":
        self._process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def complete(self, tokens: list[int], max_tokens: int) -> tuple[float, dict[str, Any]]:
        """Milliseconds, by this side's clock, of a greedy answer of exactly `max_tokens`; Kestrel's own statistics."""
        body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        milliseconds, answer = post(self._process.host, self._process.port, "/v1/completions", body)
        stats: dict[str, Any] = answer["kestrel"]
        return milliseconds, stats

    def stop(self) -> None:
        """End it as a service manager does: what it computed is on disk then."""
        self._process.stop()


def run(config: Config, out: Path, full: bool = False) -> Result:
    """The configured weights; prefill at 512 and 2K, decode at 128 and 2K, restart at 2K.

    Full: int8 and int4 weights, 8K too, the restart with the page cache dropped too. BenchError without xllamacpp.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise BenchError("llama.cpp is not here: pip install xllamacpp")
    observation = Observation(out)
    checkpoint, name = resolve_model(config.model)
    longest = config.model.context_tokens or checkpoint.geometry.context_tokens
    prefills, decodes, restarts = (
        fitting(wanted if full else wanted[:quick], longest, ROOM)
        for wanted, quick in ((PREFILLS, 2), (DECODES, 2), (CONTEXTS, 1))
    )
    context = max(*prefills, *decodes, *restarts) + ROOM
    rows: list[Row] = []
    for weights in KINDS if full else (config.engine.weights,):
        twin = write_twin(checkpoint, weights, out / "models")
        variant = dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model,
                path=str(twin),
                name=None,
                chat_template=None,
                declared=None,
                context_tokens=context,
            ),
        )
        variant = with_parts(variant, engine={"weights": weights})
        prompts = Prompts(checkpoint.geometry.vocab_size)
        times = _speeds(variant, twin, out, prompts, prefills, decodes)
        for tokens in restarts:
            for state in STATES if full else STATES[:1]:
                times |= _restarts(variant, twin, out, prompts, tokens, state)
        rows += _rows(times, weights)
    version = importlib.metadata.version("xllamacpp")
    panels = [
        Bars(
            f"{what} ({'more' if more else 'less'} is better)",
            unit,
            [f"{row['weights']}, {row['tokens']:,}, {row['variant']}" for row in some],
            {"Kestrel": [row["kestrel"] for row in some], "llama.cpp": [row["llama"] for row in some]},
        )
        for what, unit, more in (
            ("prefill", "tok/s", True),
            ("decode", "tok/s", True),
            ("restart", "ms", False),
        )
        if (some := [row for row in rows if row["what"].startswith(what)])
    ]
    return observation.publish(
        Result(
            "peer",
            "Beside llama.cpp",
            {**common_settings(config, name, full), "llama.cpp": f"xllamacpp {version}"},
            COLUMNS,
            rows,
            _targets(rows),
            panels,
            (
                "prefill: prompt tokens by the client's seconds of a request for one token, nothing cached (TTFT)",
                "decode: each server's own seconds from the first to the last token of an answer",
                "restart: a new process; restoring plus the answer of one token to a prompt with "
                f"{TAIL_TOKENS} new tokens, by the client's clock (TTFT)",
                "files as they were left: llama.cpp's in the page cache, Kestrel's past it where the disk is fast",
                "ratio: speeds Kestrel / llama.cpp, times Kestrel / llama.cpp",
                "int8 is Q8_0, int4 is Q4_0 with a Q8_0 embedding: the same blocks from the same file",
            ),
        )
    )


def _ignore(text: str) -> None:
    """A server's log lines are in its log file."""


def _flags(config: Config, twin: Path, slots: Path | None) -> list[Flags]:
    """llama.cpp's variants: quantised KV needs flash attention."""
    threads = config.engine.threads or len(os.sched_getaffinity(0))
    context = config.model.context_tokens
    assert context is not None
    return [
        Flags(str(twin), context, threads, flash, kv, None if slots is None else str(slots))
        for flash, kv in ((True, "f16"), (False, "f16"), (True, "q8_0"))
    ]


def _speeds(
    config: Config, twin: Path, out: Path, prompts: Prompts, prefills: list[int], decodes: list[int]
) -> Times:
    """Prefill and decode of all variants, all of them running, one asked at a time."""
    times: Times = {}
    with ExitStack() as stack:
        servers: list[tuple[str, KestrelServer | LlamaServer]] = []
        for kv in ("float32", "int8"):
            variant = with_parts(config, engine={"kv": kv}, cache={"enabled": False})
            server = stack.enter_context(KestrelServer(variant, out / f"kestrel-{kv}.log"))
            servers.append((f"kestrel {server.name}", server))
        for number, flags in enumerate(_flags(config, twin, None)):
            peer = stack.enter_context(LlamaServer(flags, out / f"llamacpp-{number}.log"))
            servers.append((f"llama {flags.name}", peer))
        for _, server_or_peer in servers:
            server_or_peer.complete(prompts(WARM_UP_TOKENS), 2)
        for turn in range(config.bench.repeats):
            log_line(f"peer: {config.engine.weights} weights, round {turn + 1} of {config.bench.repeats}")
            order = servers[turn % len(servers) :] + servers[: turn % len(servers)]
            for tokens in sorted({*prefills, *decodes}):
                for name, each in order:
                    prompt = prompts(tokens)
                    milliseconds, _ = each.complete(prompt, 1)
                    if tokens in prefills:
                        _note(times, "prefill", tokens, name, tokens / milliseconds * 1e3, "tok/s")
                    if tokens in decodes:  # the same prompt: both find it in memory, only its answer is timed
                        _, stats = each.complete(prompt, ANSWER_TOKENS)
                        _note(times, "decode", tokens, name, _decode_rate(stats), "tok/s")
    return times


def _note(times: Times, what: str, tokens: int, name: str, value: float, unit: str) -> None:
    """Keep a measurement, and show it: all of them together take long."""
    times.setdefault((what, tokens, name), []).append(value)
    log_line(f"peer: {what}, {tokens:,} tokens, {name}: {value:,.1f} {unit}")


def _decode_rate(stats: dict[str, Any]) -> float:
    """Tokens a second behind the first one, as the server counts."""
    if "predicted_per_second" in stats:
        # llama.cpp counts from the first token's choice too, so both have ANSWER_TOKENS - 1 steps.
        return (ANSWER_TOKENS - 1) / float(stats["predicted_ms"]) * 1e3
    return (ANSWER_TOKENS - 1) / float(stats["wall_ms"] - stats["ttft_ms"]) * 1e3


def _restarts(config: Config, twin: Path, out: Path, prompts: Prompts, tokens: int, state: str) -> Times:
    """TTFT after a restart: a session saved once by each variant, then new processes in turns."""
    log_line(f"peer: {config.engine.weights} weights, restart at {tokens} tokens, {state}")
    prefix = prompts(tokens)
    key = f"restart, {state}"
    times: Times = {}
    stores = {kv: out / "stores" / kv for kv in ("float32", "int8")}
    kestrels = {
        kv: with_store(with_parts(config, engine={"kv": kv}), root, load="auto")
        for kv, root in stores.items()
    }
    slots = [out / "stores" / f"slots-{number}" for number in range(3)]
    peers = [_flags(config, twin, slot)[number] for number, slot in enumerate(slots)]
    for folder in (*stores.values(), *slots):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for variant in kestrels.values():
        with KestrelServer(variant, out / "kestrel-save.log") as server:
            server.complete(prefix, 1)
            server.stop()
    for flags in peers:
        with LlamaServer(flags, out / "llamacpp-save.log") as peer:
            peer.complete(prefix, 1)
            peer.save()
    for _ in range(config.bench.repeats):
        for kv, variant in kestrels.items():
            with KestrelServer(variant, out / "kestrel-restart.log") as server:
                server.complete(prompts(WARM_UP_TOKENS), 2)
                if state == DROPPED:
                    drop_from_page_cache(artifact_paths(stores[kv]))
                milliseconds, stats = server.complete(prefix + prompts(TAIL_TOKENS), 1)
                if stats["restored_tokens"] != tokens:
                    raise BenchError(f"expected {tokens} tokens restored, found {stats}")
                _note(times, key, tokens, f"kestrel {kv} KV", milliseconds, "ms")
                server.stop()
        for slot, flags in zip(slots, peers, strict=True):
            with LlamaServer(flags, out / "llamacpp-restart.log") as peer:
                peer.complete(prompts(WARM_UP_TOKENS), 2)
                if state == DROPPED:
                    drop_from_page_cache([slot / SLOT_FILE])
                restoring = peer.restore()
                milliseconds, timings = peer.complete(prefix + prompts(TAIL_TOKENS), 1)
                if timings["prompt_n"] > TAIL_TOKENS + 1:
                    raise BenchError(f"llama.cpp computed {timings['prompt_n']} tokens after its restore")
                _note(times, key, tokens, f"llama {flags.name}", restoring + milliseconds, "ms")
    shutil.rmtree(out / "stores")
    return times


def _rows(times: Times, weights: str) -> list[Row]:
    """One row for each of Kestrel's variants and each case, beside llama.cpp's best of that case."""
    rows: list[Row] = []
    cases = {(what, tokens) for what, tokens, _ in times}
    for what, tokens in sorted(cases, key=lambda case: (ORDER.index(case[0].partition(",")[0]), case)):
        found = {name: median(values) for (w, t, name), values in times.items() if (w, t) == (what, tokens)}
        is_time = what.startswith("restart")
        peers = {name.removeprefix("llama "): v for name, v in found.items() if name.startswith("llama ")}
        best = (min if is_time else max)(peers, key=peers.__getitem__)
        rows += [
            {
                "what": what,
                "weights": weights,
                "tokens": tokens,
                "kestrel": value,
                "variant": name.removeprefix("kestrel "),
                "llama": peers[best],
                "llama_variant": best,
                "unit": "ms" if is_time else "tok/s",
                "ratio": value / peers[best],
                "llama_all": peers,
            }
            for name, value in found.items()
            if name.startswith("kestrel ")
        ]
    return rows


def _targets(rows: list[Row]) -> list[Target]:
    """What was aimed at: prefill 1.3x (8K: 1.2x) with either KV, decode 1.0x with int8 KV, restart at most 1.0x."""
    targets = []
    for row in rows:
        case = f"{row['what']}, {row['weights']} weights, {row['tokens']:,} tokens, {row['variant']}"
        label = f"{case}: Kestrel / llama.cpp"
        if row["what"] == "prefill":
            targets.append(Target(label, row["ratio"], PREFILL_BOUNDS.get(row["tokens"], 1.3), at_most=False))
        elif row["what"] == "decode":
            if row["variant"].startswith("int8"):
                targets.append(Target(label, row["ratio"], 1.0, at_most=False))
        else:
            targets.append(Target(label, row["ratio"], 1.0))
    return targets
