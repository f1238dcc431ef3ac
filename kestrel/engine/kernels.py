"""The compiled kernels: built once, kept in the user's cache, and opened without a compiler from then on.

A process that finds its library imports neither numba nor LLVM: 0.5 s of a start and 110 MB of memory.
"""

import ctypes
import functools
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import xxhash

from kestrel.engine import operator
from kestrel.engine.elf import address_of, in_memory
from kestrel.engine.instructions import instruction_level
from kestrel.store.layout import KvDtype

_CHECK_NBYTES = 16  # of a digest at the end of the file


@dataclass(frozen=True)
class Kernels:
    """Addresses of the C functions that a record names, see `records.py`."""

    begin: int
    work: int


@functools.cache
def load_kernels(kv_dtype: KvDtype) -> Kernels:
    """The kernels for pages of this type, compiled (10 s) where no process has done so yet.

    The operator `kestrel.Call` works from then on.
    """
    path = _path(kv_dtype)
    content = _read(path)
    if content is None:
        from kestrel.engine.compiled.attention import library

        content = library(kv_dtype)
        _keep(path, content)
    opened = ctypes.CDLL(in_memory(content))
    operator.implement(address_of(opened.compute))
    return Kernels(address_of(opened.begin), address_of(opened.work))


def are_compiled(kv_dtype: KvDtype) -> bool:
    """Whether `load_kernels` finds them, or has to compile them."""
    return _read(_path(kv_dtype)) is not None


def _path(kv_dtype: KvDtype) -> Path:
    return _cache_folder() / f"{kv_dtype}-{instruction_level()}-{_sources_digest()}.so"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrel" / "kernels"


@functools.cache
def _sources_digest() -> str:
    """Of all that decides on the code: what is compiled, and the compiler."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted((here / "compiled").glob("*.py")), here / "elf.py", here / "records.py"):
        digest.update(path.read_bytes())
    digest.update(f"numba {version('numba')}, llvmlite {version('llvmlite')}".encode())
    return digest.hexdigest()[:16]


def _read(path: Path) -> bytes | None:
    """A library that was kept; None if there is none or it is damaged."""
    with suppress(OSError):
        content = path.read_bytes()
        library, check = content[:-_CHECK_NBYTES], content[-_CHECK_NBYTES:]
        if xxhash.xxh3_128_digest(library) == check:
            return library
    return None


def _keep(path: Path, library: bytes) -> None:
    """Keep a library for later processes; where that cannot be done, each compiles its own."""
    ours = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            ours.write_bytes(library + xxhash.xxh3_128_digest(library))
            ours.replace(path)
        finally:
            ours.unlink(missing_ok=True)
