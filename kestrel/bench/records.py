"""The files the steps of the experiment hand to each other: small JSON, one dataclass each.

A cell is one model at one context length with one type of KV. Its first prompt is that of all types:

    <model>-<context>/first.json         the first prompt                    (a function of model and length)
    <model>-<context>-<kv>/second.json   the prompt that continues it        (a function of the first answer)
                           pages.json    the artifacts of the first session  (of tokens, identity, page size)
                           cold.json restored.json control.json              (measurements)

What is a pure function of its inputs is kept apart from the measurements, so that measuring again does not make
what depends on the former alone out of date.
"""

import dataclasses
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kestrel.errors import KestrelError

R = TypeVar("R")


class BenchError(KestrelError):
    """The experiment could not be carried out, or its result breaks a promise."""


@dataclass(frozen=True)
class Machine:
    """Hardware and software of a measurement. `disk_*` are megabytes (10^6 bytes) a second, sequential, uncached.

    instructions: those of the CPU that the kernels profit from.
    """

    cpu: str
    instructions: str
    cores: int
    memory_bytes: int
    os: str
    python: str
    onnxruntime: str
    numba: str
    kestrel: str
    disk_read_mb_s: float
    disk_write_mb_s: float


@dataclass(frozen=True)
class Parts:
    """Where the time to the first token went: milliseconds that add up to `Run.ttft_ms`.

    All but the last are the server's `kestrel.timings`: waiting for the engine, looking up what is known, opening what
    was found, waiting for the disk, the layers' matrix products, attention, the scores of every token, and what is left
    of the server's time. client: what the client's clock shows beyond the server's, the way there and back.
    """

    queue_ms: float
    find_ms: float
    open_ms: float
    wait_ms: float
    matmul_ms: float
    attention_ms: float
    head_ms: float
    rest_ms: float
    client_ms: float


@dataclass(frozen=True)
class Run:
    """One request, measured. Times in milliseconds; `ttft_ms` and `wall_ms` by the client's clock, others the server's.

    `boot_ms` is from the start of the process to its first healthy answer, `busy` the share of the processors (0 to
    1) that other work took just before that start, `bytes_written` the size of the artifacts that this request added.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed_tokens: int
    prefill_ms: float
    restore_ms: float
    ttft_ms: float
    wall_ms: float
    boot_ms: float
    busy: float
    bytes_read: int
    bytes_written: int
    miss_reason: str | None
    finish_reason: str
    text: str
    parts: Parts


@dataclass(frozen=True)
class Cell:
    """Where one model at one context length with one type of KV keeps its files.

    first: the first prompt. records: folder of the other JSON. scratch: folder of KV and logs, the experiment's own:
    its stores are emptied and filled at will.
    """

    first: Path
    records: Path
    scratch: Path

    @property
    def store(self) -> Path:
        """Root of the store the servers use; emptied before the first session."""
        return self.scratch / "kv"

    @property
    def kept(self) -> Path:
        """The store as the first session left it, so that restoring can be measured more than once."""
        return self.scratch / "kv-after-kill"


def cell_of(folder: Path, model: str, context_tokens: int, kv: str) -> Cell:
    """The cell's places below the folder of an experiment's results."""
    prompt = f"{model}-{context_tokens}"
    name = f"{prompt}-{kv}"
    records = folder / "records"
    return Cell(records / prompt / "first.json", records / name, folder / "stores" / name)


@dataclass(frozen=True)
class ModelRecord:
    """The model of an experiment. digest: hex, of the checkpoint's bytes."""

    name: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    digest: str


@dataclass(frozen=True)
class FirstPrompt:
    """The conversation before anything is answered, in token ids; see prompts.Conversation."""

    tokens: list[int]
    follow_up: list[int]
    question: str
    follow_up_question: str
    expected: str


@dataclass(frozen=True)
class SecondPrompt:
    """The first prompt, its answer and the follow-up, as token ids."""

    answer: str
    tokens: list[int]


@dataclass(frozen=True)
class PageList:
    """The artifacts that the first session left, by path below the store's root, in order of their names."""

    namespace: str
    numerics: str
    paths: list[str]


@dataclass(frozen=True)
class Measurement:
    """One of the three runs of a cell, on the machine that made it."""

    model: str
    context_tokens: int
    weights: str
    kv: str
    machine: Machine
    run: Run


def save_record(path: Path, record: Any) -> None:
    """Write a record, a field a line; equal records are equal bytes. A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
        for name, value in dataclasses.asdict(record).items()
    ]
    text = "{\n " + ",\n ".join(fields) + "\n}\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def load_record(kind: type[R], path: Path) -> R:
    """Read a record of this kind. Raises BenchError when it is missing or of another form."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BenchError(f"{path} is missing; run the steps before this one: dvc repro") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON ({error}); make it again: dvc repro --force") from error
    return _read(kind, data, path)


_NESTED = (Machine, Run, Parts)  # records inside records


def _read(kind: type[R], data: Any, path: Path) -> R:
    hints = typing.get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() != hints.keys():
        found = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise BenchError(
            f"{path}: expected the keys {', '.join(hints)}, found {found}; make it again: dvc repro --force"
        )
    values = {
        name: _read(hint, data[name], path) if hint in _NESTED else data[name] for name, hint in hints.items()
    }
    return kind(**values)
