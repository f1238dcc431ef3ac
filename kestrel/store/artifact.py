"""Artifact files: the header codec and the reader. FORMAT.md beside this module describes every byte.

A header is a pure function of its content, so the reader does not search a found header for things that
might be wrong: it takes the few facts out of it, encodes them again and demands the same bytes.
"""

import errno
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from kestrel.errors import ArtifactError
from kestrel.identity import FORMAT, Tokens, canonical_json, page_key
from kestrel.store.direct import is_cached, open_direct
from kestrel.store.layout import SAFETENSORS_DTYPES, KvDtype, PageLayout, TensorSpec, tensor_spec

# Where the payload starts, so that layers can be read from the disk straight into pages of memory.
ALIGNMENT = 4096
EARLIER_ALIGNMENT = 64  # files written before that; they are read like any other
LENGTH_NBYTES = 8  # the little-endian u64 in front of the JSON
MAX_HEADER_NBYTES = 1 << 20  # 2,000 int8 layers fit; what a hostile length field can make a reader allocate
MAX_DIMENSION = 1 << 24  # largest count a header may name: bounds every size worked out from it

HEX_DIGEST = re.compile(r"[0-9a-f]{32}")
HEX_SHA256 = re.compile(r"[0-9a-f]{64}")

TYPE_NAMES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class PageHeader:
    """What an artifact says about itself, beside the shapes. Digests and keys are lower-case hex."""

    namespace: str  # full digest of the identity, 32 digits
    key: str  # 32 digits
    parent: str  # key of the page before, or the namespace digest for the page at position 0
    first: int  # position of the page's first token
    num_tokens: int
    prefix_sha256: str  # of all token ids in positions [0, first + num_tokens)
    layer_digests: tuple[str, ...]  # xxh3_128 of each layer's bytes


class ArtifactHead(NamedTuple):
    """A checked header and the token ids; layer l starts at payload_start + l * layer_nbytes(num_tokens)."""

    header: PageHeader
    layout: PageLayout
    tokens: Tokens
    payload_start: int


def artifact_tensors(layout: PageLayout, num_tokens: int) -> list[TensorSpec]:
    """Every tensor of an artifact in file order: the layers, then the token ids."""
    return [*layout.tensors(num_tokens), tensor_spec("tokens", "I32", (num_tokens,))]


def encode_header(layout: PageLayout, header: PageHeader, alignment: int = ALIGNMENT) -> bytes:
    """The bytes in front of the payload: length, canonical JSON, spaces up to a multiple of `alignment`.

    Raises ValueError if the header would not fit MAX_HEADER_NBYTES.
    """
    facts = {
        "first": header.first,
        "format": FORMAT,
        "key": header.key,
        "layer_digests": list(header.layer_digests),
        "namespace": header.namespace,
        "num_tokens": header.num_tokens,
        "parent": header.parent,
        "prefix_sha256": header.prefix_sha256,
    }
    # One metadata key: the safetensors library writes several in random order.
    metadata = canonical_json({"__metadata__": {"kestrel": canonical_json(facts).decode("ascii")}})
    text = metadata[:-1] + b"," + encode_tensors(layout, header.num_tokens)  # in sorted order "_" comes first
    text += b" " * (-(LENGTH_NBYTES + len(text)) % alignment)
    if LENGTH_NBYTES + len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {len(text)} bytes exceeds the limit of {MAX_HEADER_NBYTES}")
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


@functools.lru_cache(maxsize=16)
def encode_tensors(layout: PageLayout, num_tokens: int) -> bytes:
    """The part of the header's JSON that is the same for all pages of a shape: the tensors, and the closing brace."""
    entries: dict[str, Any] = {}
    offset = 0
    for spec in artifact_tensors(layout, num_tokens):
        entries[spec.name] = {
            "data_offsets": [offset, offset + spec.nbytes],
            "dtype": spec.dtype,
            "shape": list(spec.shape),
        }
        offset += spec.nbytes
    return canonical_json(entries)[1:]


def read_header(fd: int, layout: PageLayout | None) -> ArtifactHead:
    """Read and check everything of an open artifact except the bytes of its layers.

    The file must be a regular file of exactly the size its header implies, the header exactly the bytes
    `encode_header` writes, `key` the digest of `parent` and the tokens, and, for a page at position 0,
    `parent` the namespace and `prefix_sha256` that of the tokens. With a `layout` the shapes must be its
    shapes. Reads at most MAX_HEADER_NBYTES plus the token ids, whatever the file claims. Raises ArtifactError
    with the reason.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError("expected a regular file, found another kind")
    length_bytes = read_exactly(fd, LENGTH_NBYTES, 0)
    text_nbytes = int.from_bytes(length_bytes, "little")
    payload_start = LENGTH_NBYTES + text_nbytes
    if payload_start > min(MAX_HEADER_NBYTES, status.st_size):
        raise ArtifactError(
            f"header length {text_nbytes} exceeds the file ({status.st_size} bytes) "
            f"or the limit ({MAX_HEADER_NBYTES} bytes)"
        )
    text = read_exactly(fd, text_nbytes, LENGTH_NBYTES)
    found = length_bytes + text
    header = None if layout is None else expected_facts(found, layout)
    if header is None or layout is None:
        entries = parse_object(text, "header")
        header = parse_facts(entries)
        found_layout = parse_layout(entries, header)
        if layout is not None and found_layout != layout:
            raise ArtifactError(f"expected pages of {layout}, found {found_layout}")
        layout = found_layout
        if not is_encoded(layout, header, found):
            check_entries(entries, layout, header)  # says which tensor is another one
            raise ArtifactError(f"header is not canonical JSON padded to a multiple of {ALIGNMENT} bytes")

    tokens_start = payload_start + layout.page_nbytes(header.num_tokens)
    expected_size = tokens_start + 4 * header.num_tokens
    if status.st_size != expected_size:
        raise ArtifactError(f"expected {expected_size} bytes, found {status.st_size}")
    tokens = np.frombuffer(read_exactly(fd, 4 * header.num_tokens, tokens_start), dtype="<i4")
    check_chain(header, tokens)
    return ArtifactHead(header, layout, tokens, payload_start)


def is_encoded(layout: PageLayout, header: PageHeader, found: bytes) -> bool:
    """Whether these are the bytes that `encode_header` writes, or has written in earlier files."""
    return len(header.layer_digests) == layout.num_layers and any(
        encode_header(layout, header, alignment) == found for alignment in (ALIGNMENT, EARLIER_ALIGNMENT)
    )


def expected_facts(found: bytes, layout: PageLayout) -> PageHeader | None:
    """The facts of a header if it is exactly that of a page of this layout; None otherwise, whatever is wrong.

    Only the metadata, which comes first, is parsed: the shapes of 100 tensors take longer than all else of a header.
    """
    text = found[LENGTH_NBYTES:]
    metadata, end, _ = text.partition(b'"},')
    if not end:
        return None
    try:
        header = parse_facts(parse_object(metadata + b'"}}', "header"))
    except ArtifactError:
        return None
    return header if is_encoded(layout, header, found) else None


def read_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """`nbytes` bytes from `offset`; raises ArtifactError if the file ends before or cannot be read."""
    buffer = bytearray(nbytes)
    read_into(fd, memoryview(buffer), offset)
    return bytes(buffer)


def read_small(fd: int, path: Path, most_nbytes: int) -> bytes:
    """Content of a small regular file, and close it; ArtifactError if it is something else, or larger."""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_nbytes:
            raise ArtifactError(f"{path} is not a regular file of at most {most_nbytes:,} bytes")
        return read_exactly(fd, status.st_size, 0)
    finally:
        os.close(fd)


def read_into(fd: int, buffer: memoryview, offset: int, progress: Callable[[int], int] | None = None) -> None:
    """Fill a writable byte buffer from `offset`; ArtifactError if the file is too short or unreadable.

    With `progress` the read goes by parts: it is called with the bytes that have come, 0 to begin with, and says how
    many to read next; what it raises ends the read.
    """
    done = 0
    part = len(buffer) if progress is None else progress(0)
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done : done + part]], offset + done)
        except OSError as error:
            raise ArtifactError(f"read of {len(buffer)} bytes at {offset} failed: {error}") from error
        if count == 0:
            raise ArtifactError(f"expected {len(buffer)} bytes at {offset}, the file ends after {done}")
        done += count
        if progress is not None:
            part = progress(count)


def parse_object(text: bytes | str, what: str) -> dict[str, Any]:
    """A JSON object; anything else, however malformed or deeply nested, is an ArtifactError."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("ascii"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ArtifactError(f"{what} is not ASCII JSON: {type(error).__name__}: {error}"[:300]) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{what} must be a JSON object, found {type(value).__name__}")
    return value


def parse_facts(entries: dict[str, Any]) -> PageHeader:
    """The page's facts from the one metadata key; every value is checked for type, form and range."""
    metadata = entries.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("kestrel"), str):
        raise ArtifactError("metadata key 'kestrel' is missing: not a Kestrel artifact")
    facts = parse_object(metadata["kestrel"], "metadata 'kestrel'")
    if facts.get("format") != FORMAT:
        raise ArtifactError(f"expected format {FORMAT}, found {str(facts.get('format'))[:40]}")
    digests = facts.get("layer_digests")
    if not isinstance(digests, list) or not digests:
        raise ArtifactError("layer_digests must be a list with one digest per layer")
    num_tokens = parse_count(facts.get("num_tokens"), "num_tokens")
    first = parse_count(facts.get("first"), "first", least=0)
    return PageHeader(
        namespace=parse_hex(facts.get("namespace"), "namespace", HEX_DIGEST),
        key=parse_hex(facts.get("key"), "key", HEX_DIGEST),
        parent=parse_hex(facts.get("parent"), "parent", HEX_DIGEST),
        first=first,
        num_tokens=num_tokens,
        prefix_sha256=parse_hex(facts.get("prefix_sha256"), "prefix_sha256", HEX_SHA256),
        layer_digests=tuple(parse_hex(digest, "layer digest", HEX_DIGEST) for digest in digests),
    )


def parse_count(value: Any, what: str, least: int = 1) -> int:
    """An integer from `least` to MAX_DIMENSION; true and 1.0 are not integers."""
    if type(value) is not int or not least <= value <= MAX_DIMENSION:
        raise ArtifactError(
            f"{what} must be an integer in [{least}, {MAX_DIMENSION}], found {str(value)[:40]}"
        )
    return value


def parse_hex(value: Any, what: str, form: re.Pattern[str]) -> str:
    """A lower-case hex string of the length `form` demands."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ArtifactError(f"{what} must match {form.pattern}, found {str(value)[:80]!r}")
    return value


def parse_layout(entries: dict[str, Any], header: PageHeader) -> PageLayout:
    """The layout that layer 0 and the number of layer digests imply; `check_entries` checks the rest."""
    k = entries.get("layers.0.k")
    shape = k.get("shape") if isinstance(k, dict) else None
    if not isinstance(k, dict) or not isinstance(shape, list) or len(shape) != 3:
        raise ArtifactError("tensor layers.0.k [kv_heads, head_dim, n] is missing")
    dtype = k.get("dtype")
    if not isinstance(dtype, str) or dtype not in TYPE_NAMES:
        raise ArtifactError(f"layers.0.k must be one of {sorted(TYPE_NAMES)}, found {str(dtype)[:40]!r}")
    try:
        return PageLayout(
            num_layers=len(header.layer_digests),
            num_kv_heads=parse_count(shape[0], "kv_heads"),
            head_dim=parse_count(shape[1], "head_dim"),
            kv_dtype=cast(KvDtype, TYPE_NAMES[dtype]),
        )
    except ValueError as error:
        raise ArtifactError(str(error)) from error


def check_entries(entries: dict[str, Any], layout: PageLayout, header: PageHeader) -> None:
    """Raise for the first tensor whose dtype, shape or offsets are not the layout's, or that is extra."""
    offset = 0
    expected_names = {"__metadata__"}
    for spec in artifact_tensors(layout, header.num_tokens):
        expected = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        if entries.get(spec.name) != expected:
            raise ArtifactError(
                f"tensor {spec.name}: expected {expected}, found {str(entries.get(spec.name))[:200]}"
            )
        expected_names.add(spec.name)
        offset += spec.nbytes
    if len(entries) != len(expected_names):
        extra = sorted(entries.keys() - expected_names)
        raise ArtifactError(f"unexpected tensor {extra[0][:80]!r}")


def check_chain(header: PageHeader, tokens: Tokens) -> None:
    """Check the links that need nothing but this file: key, and what holds for a page at position 0."""
    if page_key(bytes.fromhex(header.parent), tokens).hex() != header.key:
        raise ArtifactError(f"key {header.key} is not the digest of its parent and tokens")
    if (header.first == 0) != (header.parent == header.namespace):
        raise ArtifactError(f"page at position {header.first} has parent {header.parent}")
    if header.first == 0 and hashlib.sha256(tokens.tobytes()).hexdigest() != header.prefix_sha256:
        raise ArtifactError("prefix_sha256 is not that of the tokens")


class OpenPage:
    """An artifact open for reading; a context manager that closes the file.

    The open file keeps working when the page is evicted meanwhile, by whichever process. Several threads may
    read layers of it at once; close it when none does.
    """

    def __init__(self, fd: int, path: Path, layout: PageLayout | None) -> None:
        """Take over `fd` and check the header; on ArtifactError `fd` is closed. `path` is for messages only."""
        self.fd = fd
        self.path = path
        self._direct_fd = -1  # the same file, read past the page cache
        self._is_direct = False  # whether that is tried
        self.progress: Callable[[int], int] | None = None  # see read_into
        try:
            self.header, self.layout, self.tokens, self.payload_start = read_header(fd, layout)
        except ArtifactError as error:
            self.close()
            raise ArtifactError(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of this page."""
        return self.layout.layer_nbytes(self.header.num_tokens)

    def avoid_page_cache(self) -> None:
        """Read layers from the disk straight into the caller's buffer, if the page cache holds little of the file.

        Through the page cache the kernel finds memory for every byte twice and copies it, on the cores that compute
        meanwhile. Where the file system cannot do without, or the buffer is not aligned, nothing changes.
        """
        nbytes = self.payload_start + self.layout.page_nbytes(self.header.num_tokens)
        if self._direct_fd < 0 and not is_cached(self.fd, nbytes):
            self._direct_fd = open_direct(self.fd, os.O_RDONLY)
            self._is_direct = self._direct_fd >= 0

    def _read_into(self, view: memoryview, offset: int) -> None:
        if self._is_direct:
            try:
                return read_into(self._direct_fd, view, offset, self.progress)
            except ArtifactError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
                    raise  # anything but "not aligned"
                self._is_direct = False  # nor will the next layer be
        read_into(self.fd, view, offset, self.progress)

    def read_layer_into(self, layer: int, buffer: Any, count: int = 1) -> None:
        """Read layers [layer, layer + count) straight into `buffer`, at once, and check their digests.

        `buffer` is a writable C-contiguous buffer (memoryview, ndarray, bytearray) of exactly `layer_nbytes`
        bytes a layer, else ValueError. Raises ArtifactError on damage; what `buffer` then holds must not be used.
        """
        if not 0 <= layer < layer + count <= self.layout.num_layers:
            raise ValueError(
                f"layers must be in [0, {self.layout.num_layers}), found [{layer}, {layer + count})"
            )
        view, nbytes = memoryview(buffer), self.layer_nbytes
        if view.readonly or not view.c_contiguous or view.nbytes != count * nbytes:
            raise ValueError(
                f"expected a writable C-contiguous buffer of {count * nbytes} bytes, "
                f"found {view.nbytes} bytes, readonly={view.readonly}, contiguous={view.c_contiguous}"
            )
        view = view.cast("B")
        try:
            self._read_into(view, self.payload_start + layer * nbytes)
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: layer {layer}: {error}") from error
        for number in range(count):
            expected = self.header.layer_digests[layer + number]
            found = xxhash.xxh3_128_hexdigest(view[number * nbytes : (number + 1) * nbytes])
            if found != expected:
                raise ArtifactError(
                    f"{self.path}: layer {layer + number} is damaged: expected digest {expected}, found {found}"
                )

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        for fd in (self.fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._direct_fd = -1

    def __enter__(self) -> "OpenPage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
