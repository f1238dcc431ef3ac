"""The `.kv` snapshot files of Kestrel-LLM's `--disk-kv`, versions 1 (float32) and 2 (int8): reading and writing.

All little-endian. A header of 64 bytes, the token ids as int32, then layer by layer without padding, with
D = KV heads x head_dim and rows head-major, K after RoPE:

- version 1: blocks of `block_tokens` tokens, the last one with its valid rows only: K rows [nb, D], V rows [nb, D].
- version 2: per token K int8 [D], V int8 [D], K scales float32 [heads], V scales float32 [heads]. A value is
  q * scale / 127, where scale is the largest magnitude of the token's head (1.0 if that is at most 1e-6).
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kestrel.errors import ArtifactError
from kestrel.identity import Tokens, as_tokens

MAGIC = 0x564C4B56
HEADER = struct.Struct("<II6iQ")  # magic, version, layers, heads, head_dim, block, tokens, kv_dim, token hash
HEADER_NBYTES = 64
BLOCK_TOKENS = 32
MAX_TOKENS = 8192  # the longest snapshot Kestrel-LLM itself reads

# Largest counts a header may name, far above any model's: nothing is allocated for more than a file can hold.
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_BLOCK, MAX_COUNT = 1024, 1024, 4096, 1 << 16, 1 << 24

FNV_BASIS = 1469598103934665603  # not the basis FNV-1a is published with
FNV_PRIME = 1099511628211


class Rows(NamedTuple):
    """K and V of a run of tokens in one layer, [n, heads, head_dim], float32, or int8 with scales [n, heads]."""

    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    k_scale: npt.NDArray[np.float32] | None = None
    v_scale: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Shape:
    """What the header of a snapshot says."""

    version: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def kv_dim(self) -> int:
        """Values of K of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_dtype(self) -> str:
        """What the values are stored as."""
        return "float32" if self.version == 1 else "int8"

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in one layer."""
        return 8 * self.kv_dim if self.version == 1 else 2 * self.kv_dim + 8 * self.num_kv_heads

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer."""
        return self.num_tokens * self.token_nbytes

    @property
    def payload_start(self) -> int:
        """Where layer 0 begins."""
        return HEADER_NBYTES + 4 * self.num_tokens

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file."""
        return self.payload_start + self.num_layers * self.layer_nbytes

    @property
    def record(self) -> np.dtype[Any]:
        """One token of version 2."""
        heads = self.num_kv_heads
        return np.dtype(
            [
                ("k", "i1", self.kv_dim),
                ("v", "i1", self.kv_dim),
                ("k_scale", "<f4", heads),
                ("v_scale", "<f4", heads),
            ]
        )


def token_hash(tokens: Sequence[int] | Tokens) -> int:
    """FNV-1a, 64 bits, over the little-endian bytes of each token, from the format's own basis."""
    value = FNV_BASIS
    for byte in as_tokens(tokens).tobytes():
        value = (value ^ byte) * FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value


def file_name(tokens: Sequence[int] | Tokens) -> str:
    """The name a snapshot of these tokens has."""
    return f"kv_{token_hash(tokens):016x}.kv"


def encode_head(shape: Shape, tokens: Tokens) -> bytes:
    """Header and token ids."""
    header = HEADER.pack(
        MAGIC,
        shape.version,
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_tokens,
        shape.num_tokens,
        shape.kv_dim,
        token_hash(tokens),
    )
    return header.ljust(HEADER_NBYTES, b"\0") + as_tokens(tokens).tobytes()


def encode_layer(shape: Shape, rows: Rows) -> Iterator[bytes]:
    """The bytes of one layer, `rows` holding all its tokens."""
    if shape.version == 1:
        for start in range(0, shape.num_tokens, shape.block_tokens):
            for values in (rows.k, rows.v):
                yield values[start : start + shape.block_tokens].astype("<f4", copy=False).tobytes()
        return
    records = np.empty(shape.num_tokens, shape.record)
    records["k"], records["v"] = (values.reshape(shape.num_tokens, -1) for values in (rows.k, rows.v))
    records["k_scale"], records["v_scale"] = rows.k_scale, rows.v_scale
    yield records.tobytes()


class Snapshot:
    """An open `.kv` file, checked as far as its header, size and tokens go; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open it. ArtifactError with the reason for anything that is not a whole snapshot."""
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ArtifactError(f"cannot open {path}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path}: expected a regular file")
            self.shape, self._hash = _read_header(path, os.pread(fd, HEADER_NBYTES, 0))
            if status.st_size != self.shape.file_nbytes:
                raise ArtifactError(
                    f"{path}: expected {self.shape.file_nbytes} bytes for {self.shape.num_tokens} tokens, found "
                    f"{status.st_size}; was it cut off while it was written?"
                )
            self._bytes = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.tokens = np.frombuffer(self._bytes, "<i4", self.shape.num_tokens, HEADER_NBYTES).copy()
        if token_hash(self.tokens) != self._hash:
            self.close()
            raise ArtifactError(
                f"{path}: the token ids do not have the hash in the header, {self._hash:016x}"
            )

    def rows(self, layer: int, start: int, stop: int) -> Rows:
        """K and V of the tokens [start, stop) in one layer. ArtifactError if a value is no finite number."""
        shape = self.shape
        first = shape.payload_start + layer * shape.layer_nbytes
        if shape.version == 1:
            found = self._float_rows(first, start, stop)
        else:
            offset = first + start * shape.token_nbytes
            records = np.frombuffer(self._bytes, shape.record, stop - start, offset).copy()
            values = (stop - start, shape.num_kv_heads, shape.head_dim)
            found = Rows(
                records["k"].reshape(values),
                records["v"].reshape(values),
                records["k_scale"],
                records["v_scale"],
            )
        for part in found:
            if part is not None and part.dtype.kind == "f" and not np.isfinite(part).all():
                raise ArtifactError(f"{self.path}: layer {layer} holds values that are no finite numbers")
        return found

    def _float_rows(self, first: int, start: int, stop: int) -> Rows:
        shape = self.shape
        parts: tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]] = ([], [])
        for block in range(start // shape.block_tokens, -(-stop // shape.block_tokens)):
            begin = block * shape.block_tokens
            count = min(shape.block_tokens, shape.num_tokens - begin)
            rows = np.frombuffer(
                self._bytes, "<f4", 2 * count * shape.kv_dim, first + begin * shape.token_nbytes
            ).reshape(2, count, shape.num_kv_heads, shape.head_dim)
            wanted = slice(max(start - begin, 0), min(stop - begin, count))
            for part, values in zip(parts, rows, strict=True):
                part.append(values[wanted])
        k, v = (np.concatenate(part) for part in parts)
        return Rows(k, v)

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, header: bytes) -> tuple[Shape, int]:
    """Shape and token hash. ArtifactError with the reason if they make no snapshot."""
    if len(header) < HEADER_NBYTES:
        raise ArtifactError(f"{path}: expected a header of {HEADER_NBYTES} bytes, found {len(header)}")
    magic, version, layers, heads, head_dim, block, tokens, kv_dim, digest = HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ArtifactError(f"{path}: not a .kv snapshot: expected magic {MAGIC:#x}, found {magic:#x}")
    if version not in (1, 2):
        raise ArtifactError(f"{path}: expected version 1 or 2, found {version}")
    for name, value, most in (
        ("layers", layers, MAX_LAYERS),
        ("KV heads", heads, MAX_HEADS),
        ("head_dim", head_dim, MAX_HEAD_DIM),
        ("block size", block, MAX_BLOCK),
        ("tokens", tokens, MAX_COUNT),
    ):
        if not 1 <= value <= most:
            raise ArtifactError(f"{path}: {name} must be in [1, {most}], found {value}")
    if kv_dim != heads * head_dim:
        raise ArtifactError(f"{path}: kv_dim must be {heads} x {head_dim}, found {kv_dim}")
    if any(header[HEADER.size :]):
        raise ArtifactError(f"{path}: the header's bytes from {HEADER.size} to {HEADER_NBYTES} must be zero")
    return Shape(version, layers, heads, head_dim, tokens, block), digest
