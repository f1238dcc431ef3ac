"""The restart experiment, step by step: a session, a kill, its continuation from the store, and a control without one.

Rules it keeps: the name of every caliber is given; the processes of a cell get the same arguments (the control's
store is off); the store is empty before the first session; a short warm-up request goes first, so that nobody
measures the first use of a kernel; the artifacts are dropped from the page cache before they are restored, so that
a restore reads the disk. Every step can be run alone, again, and on a machine that has the records but not the KV.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from kestrel.bench import prompts
from kestrel.bench.client import Completion, complete
from kestrel.bench.machine import busy_share, describe_machine
from kestrel.bench.process import ServerProcess, drop_from_page_cache, with_free_port
from kestrel.bench.records import (
    BenchError,
    Cell,
    FirstPrompt,
    Measurement,
    ModelRecord,
    PageList,
    Parts,
    Run,
    SecondPrompt,
    load_record,
    save_record,
)
from kestrel.bench.session import artifact_paths, find_session, total_size
from kestrel.config import Config
from kestrel.errors import ConfigError
from kestrel.log import Log
from kestrel.models.chat import load_chat_template
from kestrel.models.fetch import resolve_model

WARM_UP_TOKENS = 4
PROGRESS_SECONDS = 5.0


def prepare_model(config: Config, record: Path, log: Log = print) -> None:
    """Fetch the checkpoint and convert its weights, so that no session is measured doing so; write a ModelRecord."""
    from kestrel.models.weights import load_weights

    checkpoint, name = resolve_model(config.model, log)
    geometry = checkpoint.geometry
    log(f"model {name}: {geometry.architecture}, {geometry.num_parameters / 1e6:,.0f}M parameters")
    load_weights(
        checkpoint, config.engine.weights, Path(config.model.root) / "converted", _progress(log), log
    )
    save_record(
        record,
        ModelRecord(
            name=name,
            architecture=geometry.architecture,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            kv_bytes_per_token=geometry.kv_bytes_per_token,
            digest=checkpoint.digest,
        ),
    )


def write_first_prompt(config: Config, cell: Cell, log: Log = print) -> None:
    """Build the conversation and write the first prompt. Raises ConfigError when the model's context cannot hold it."""
    checkpoint, _ = resolve_model(config.model, log)
    chat = checkpoint.chat_template()
    if config.model.chat_template is not None:
        chat = load_chat_template(Path(config.model.chat_template), chat)
    num_tokens = config.bench.context_tokens
    conversation = prompts.build_conversation(checkpoint.tokenizer(), chat, num_tokens)
    window = config.model.context_tokens or checkpoint.geometry.context_tokens
    needed = num_tokens + len(conversation.follow_up) + 2 * config.bench.answer_tokens
    if needed > window:
        raise ConfigError(
            f"bench.context_tokens: {num_tokens} tokens, the follow-up and two answers need {needed} positions, "
            f"the model has {window}; try bench.context_tokens={num_tokens - (needed - window)}"
        )
    save_record(
        cell.first,
        FirstPrompt(
            tokens=list(conversation.first),
            follow_up=list(conversation.follow_up),
            question=prompts.QUESTION,
            follow_up_question=prompts.FOLLOW_UP,
            expected=prompts.EXPECTED,
        ),
    )
    log(f"first prompt: {num_tokens} tokens; follow-up: {len(conversation.follow_up)} tokens")


def run_first_session(config: Config, cell: Cell, log: Log = print) -> None:
    """S1: an empty store, the whole first prompt, its answer, its pages on disk, SIGKILL.

    Writes cold.json, second.json and pages.json. Raises BenchError.
    """
    first = load_record(FirstPrompt, cell.first)
    most, needed = config.cache.max_prefix_tokens, len(first.tokens) + config.bench.answer_tokens
    if most is not None and most < needed:
        raise ConfigError(
            f"cache.max_prefix_tokens: {most} does not hold the session of {needed} tokens; raise it, or lower "
            "bench.context_tokens"
        )
    log(f"S1: {len(first.tokens)} tokens, empty store")
    run = _first_session(config, cell, first, log)
    found = find_session(cell.kept, first.tokens)
    if found is None:
        raise BenchError(f"S1 was saved, but no prefix in {cell.kept} begins with its prompt")
    pages, session = found
    save_record(cell.records / "pages.json", pages)
    save_record(cell.records / "second.json", SecondPrompt(run.text, session + first.follow_up))
    _save_measurement(config, cell, "cold.json", run)


def restore_session(config: Config, cell: Cell, log: Log = print) -> None:
    """S2: a new process with S1's arguments continues the conversation from the store. Writes restored.json.

    Where the first session's artifacts are gone (a clone holds none), that session is computed again first.
    """
    pages = load_record(PageList, cell.records / "pages.json")
    second = load_record(SecondPrompt, cell.records / "second.json")
    if not all((cell.kept / path).is_file() for path in pages.paths):
        log("the first session's artifacts are not here; computing them again")
        _first_session(config, cell, load_record(FirstPrompt, cell.first), log)
    _reset_store(cell)
    drop_from_page_cache(artifact_paths(cell.store))
    log(f"S2: {len(second.tokens)} tokens, {len(pages.paths)} artifacts, read from the disk")
    busy = busy_share()
    with ServerProcess(_with_store(config, cell), cell.scratch / "server-2.log", log) as server:
        _warm_up(server)
        before = set(artifact_paths(cell.store))
        completion = _complete(server, second.tokens, config.bench.answer_tokens, log)
        server.wait_until_saved(len(second.tokens))
        written = total_size(set(artifact_paths(cell.store)) - before)
        server.stop()
    run = _run(server, completion, written, busy)
    _tell(log, "S2", run)
    _save_measurement(config, cell, "restored.json", run)


def run_control(config: Config, cell: Cell, log: Log = print) -> None:
    """The second prompt in a process without a store: what S2 would have cost. Writes control.json."""
    second = load_record(SecondPrompt, cell.records / "second.json")
    log(f"control: {len(second.tokens)} tokens, no store")
    off = with_free_port(dataclasses.replace(config, cache=dataclasses.replace(config.cache, enabled=False)))
    busy = busy_share()
    with ServerProcess(off, cell.scratch / "server-control.log", log) as server:
        _warm_up(server)
        completion = _complete(server, second.tokens, config.bench.answer_tokens, log)
        server.stop()
    run = _run(server, completion, 0, busy)
    _tell(log, "control", run)
    _check_cold(run, "control")
    _save_measurement(config, cell, "control.json", run)


def _first_session(config: Config, cell: Cell, first: FirstPrompt, log: Log) -> Run:
    """Run S1 and leave its store, as the kill found it, in `cell.kept`."""
    for folder in (cell.store, cell.kept):
        if folder.exists():
            shutil.rmtree(folder)
    busy = busy_share()
    with ServerProcess(_with_store(config, cell), cell.scratch / "server-1.log", log) as server:
        _warm_up(server)
        before = set(artifact_paths(cell.store))
        completion = _complete(server, first.tokens, config.bench.answer_tokens, log)
        server.wait_until_saved(len(first.tokens))
        server.kill()
    _copy_store(cell.store, cell.kept)
    run = _run(server, completion, total_size(set(artifact_paths(cell.store)) - before), busy)
    _tell(log, "S1", run)
    _check_cold(run, "S1")
    return run


def _warm_up(server: ServerProcess) -> None:
    """One short request, and whatever it saves; it shares no token with the prompts that are measured."""
    complete(server.host, server.port, prompts.WARM_UP, WARM_UP_TOKENS)
    server.wait_until_quiet()


def _complete(server: ServerProcess, prompt: Sequence[int], max_tokens: int, log: Log) -> Completion:
    """Send a measured request; while it runs, say every few seconds that it does."""
    started = time.monotonic()
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(complete, server.host, server.port, prompt, max_tokens)
        while not wait([answer], PROGRESS_SECONDS).done:
            log(f"  waiting for the answer ({time.monotonic() - started:.0f} s)")
        return answer.result()


def _with_store(config: Config, cell: Cell) -> Config:
    cache = dataclasses.replace(config.cache, enabled=True, root=str(cell.store))
    return with_free_port(dataclasses.replace(config, cache=cache))


def _progress(log: Log) -> Callable[[int, int], None]:
    """A callback (done, total) that logs a line every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            log(f"converting the weights: {100 * done // total}%")

    return report


def _run(server: ServerProcess, completion: Completion, bytes_written: int, busy: float) -> Run:
    stats, usage = completion.kestrel, completion.usage
    return Run(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        computed_tokens=stats["computed_tokens"],
        prefill_ms=round(stats["prefill_ms"], 3),
        restore_ms=round(stats["restore_ms"], 3),
        ttft_ms=round(completion.ttft_ms, 3),
        wall_ms=round(completion.wall_ms, 3),
        boot_ms=round(server.boot_ms, 3),
        busy=round(busy, 2),
        bytes_read=stats["bytes_read"],
        bytes_written=bytes_written,
        miss_reason=stats["miss_reason"],
        finish_reason=completion.finish_reason,
        text=completion.text,
        parts=_parts(completion),
    )


def _parts(completion: Completion) -> Parts:
    """The server's parts of the time to the first token, and what the client saw on top."""
    timings: dict[str, float] = completion.kestrel["timings"]
    beyond = completion.ttft_ms - completion.kestrel["ttft_ms"]
    return Parts(**timings, client_ms=round(beyond, 3))


def _tell(log: Log, name: str, run: Run) -> None:
    log(
        f"{name}: {run.cached_tokens} of {run.prompt_tokens} tokens cached; prefill {run.prefill_ms:.1f} ms, "
        f"TTFT {run.ttft_ms:.1f} ms, wall {run.wall_ms:.1f} ms; answer {run.text!r}"
    )


def _check_cold(run: Run, name: str) -> None:
    if run.cached_tokens:
        raise BenchError(
            f"{name} was to compute its whole prompt, but {run.cached_tokens} of {run.prompt_tokens} tokens were cached"
        )


def _save_measurement(config: Config, cell: Cell, name: str, run: Run) -> None:
    _, model = resolve_model(config.model)
    machine = describe_machine(cell.scratch)
    save_record(
        cell.records / name,
        Measurement(
            model, config.bench.context_tokens, config.engine.weights, config.engine.kv, machine, run
        ),
    )


def _reset_store(cell: Cell) -> None:
    """Put the store back to how the first session left it."""
    if cell.store.exists():
        shutil.rmtree(cell.store)
    _copy_store(cell.kept, cell.store)


def _copy_store(source: Path, target: Path) -> None:
    """Copy a store: artifacts, which never change, as hard links where the file system can, all else as copies."""

    def copy(from_path: str, to_path: str) -> str:
        if from_path.endswith(".safetensors"):
            try:
                os.link(from_path, to_path)
                return to_path
            except OSError:  # another file system, or one without links: a copy is as good
                pass
        return shutil.copy2(from_path, to_path)

    shutil.copytree(source, target, copy_function=copy)
