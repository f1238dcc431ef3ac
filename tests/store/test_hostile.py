"""Promise: whatever bytes or kinds of file stand in the store, they are refused with a reason, fast, and moved away."""

import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.errors import ArtifactError
from kestrel.identity import as_tokens
from kestrel.store.artifact import MAX_HEADER_NBYTES, OpenPage, read_header
from kestrel.store.layout import PageLayout
from kestrel.store.store import Store
from tests.store.pages import (
    LAYOUT,
    NAMESPACE,
    check_bits,
    open_store,
    publish,
    restore,
)

TOKENS = as_tokens(range(100, 112))
Header = dict[str, Any]


@pytest.fixture
def good(store: Store) -> Path:
    """A sound artifact of one page."""
    (key,) = publish(store, TOKENS)
    return store.page_path(NAMESPACE.digest, key)


def split_file(content: bytes) -> tuple[bytes, bytes]:
    """Header text and the rest of a file."""
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def with_text(content: bytes, text: bytes) -> bytes:
    """The file with another header text, padded as the format demands."""
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + split_file(content)[1]


def edit_header(change: Callable[[Header], object]) -> Callable[[bytes], bytes]:
    """A mutation of the parsed header, written back in canonical form."""

    def mutate(content: bytes) -> bytes:
        header = json.loads(split_file(content)[0])
        change(header)
        return with_text(content, json.dumps(header, sort_keys=True, separators=(",", ":")).encode())

    return mutate


def edit_facts(**changes: object) -> Callable[[bytes], bytes]:
    """A mutation of the metadata."""

    def change(header: Header) -> None:
        facts = json.loads(str(header["__metadata__"]["kestrel"]))
        facts.update(changes)
        header["__metadata__"]["kestrel"] = json.dumps(facts, sort_keys=True, separators=(",", ":"))

    return edit_header(change)


def edit_tensor(name: str, **changes: object) -> Callable[[bytes], bytes]:
    """A mutation of one tensor's entry."""
    return edit_header(lambda header: header[name].update(changes))


def edit_text(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """A replacement in the raw header text."""

    def mutate(content: bytes) -> bytes:
        text = split_file(content)[0].rstrip(b" ")
        assert old in text
        return with_text(content, text.replace(old, new, 1))

    return mutate


def swap_first_layers(header: Header) -> None:
    header["layers.0.k"], header["layers.1.k"] = header["layers.1.k"], header["layers.0.k"]


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "empty file": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "length only": lambda content: content[:8],
    "length of 2^64-1": lambda content: b"\xff" * 8 + content[8:],
    "length of 2^63": lambda content: struct.pack("<Q", 2**63) + content[8:],
    "length of the whole file": lambda content: struct.pack("<Q", len(content)) + content[8:],
    "length just over the limit": lambda content: struct.pack("<Q", MAX_HEADER_NBYTES) + bytes(2 << 20),
    "length zero": lambda content: bytes(8) + content[8:],
    "one byte short": lambda content: content[:-1],
    "one byte long": lambda content: content + b"\0",
    "no tokens": lambda content: content[: -4 * len(TOKENS)],
    "text is not JSON": lambda content: with_text(content, b"{"),
    "text is a list": lambda content: with_text(content, b"[]"),
    "text is a number": lambda content: with_text(content, b"1"),
    "text is not UTF-8": edit_text(b"layers.0.k", b"layers.\xff.k"),
    "text is UTF-16": lambda content: with_text(content, split_file(content)[0].decode().encode("utf-16")),
    "text is nested 100,000 deep": lambda content: with_text(content, NESTED),
    "text has a byte order mark": lambda content: with_text(
        content, b"\xef\xbb\xbf" + split_file(content)[0]
    ),
    "text starts with a space": edit_text(b"{", b" {"),
    "text ends with a tab": lambda content: content.replace(b"} ", b"}\t", 1),
    "text has spaces inside": edit_text(b":", b": "),
    "text has another order": lambda content: with_text(
        content, json.dumps(dict(reversed(json.loads(split_file(content)[0]).items()))).encode()
    ),
    "text is padded twice": lambda content: (
        struct.pack("<Q", len(split_file(content)[0]) + 64)
        + split_file(content)[0]
        + b" " * 64
        + split_file(content)[1]
    ),
    "duplicate tensor": edit_text(
        b'"layers.0.k":', b'"layers.0.k":{"data_offsets":[0,4],"dtype":"F32","shape":[1]},"layers.0.k":'
    ),
    "duplicate offset key": edit_text(b'"dtype":"F32"', b'"dtype":"F32","dtype":"F32"'),
    "number as 1e1": edit_text(b'"shape":[2', b'"shape":[2e0'),
    "number of 5,000 digits": edit_text(b'"shape":[2', b'"shape":[' + b"2" * 5000),
    "NaN in a shape": edit_text(b'"shape":[2', b'"shape":[NaN'),
    "no metadata": edit_header(lambda header: header.pop("__metadata__")),
    "metadata is a string": edit_header(lambda header: header.update(__metadata__="kestrel")),
    "more metadata": edit_header(lambda header: header["__metadata__"].update(host="here")),
    "metadata is not JSON": edit_header(lambda header: header["__metadata__"].update(kestrel="}")),
    "metadata is nested": edit_header(lambda header: header["__metadata__"].update(kestrel="[" * 200_000)),
    "unknown fact": edit_facts(host="here"),
    "another format": edit_facts(format=2),
    "format true": edit_facts(format=True),
    "first is true": edit_facts(first=True),
    "first is 0.0": edit_facts(first=0.0),
    "first is negative": edit_facts(first=-1),
    "first without a parent": edit_facts(first=16),
    "no tokens at all": edit_facts(num_tokens=0),
    "more tokens": edit_facts(num_tokens=len(TOKENS) + 1),
    "2^62 tokens": edit_facts(num_tokens=2**62),
    "key of another page": edit_facts(key="0" * 32),
    "key in capitals": edit_facts(key="A" * 32),
    "key is a path": edit_facts(key="../../../../etc/passwd"),
    "key with a newline": edit_facts(key="0" * 32 + "\n"),
    "namespace is a number": edit_facts(namespace=7),
    "another namespace": edit_facts(namespace="1" * 32, parent="1" * 32),
    "another prefix": edit_facts(prefix_sha256="0" * 64),
    "a digest too few": edit_facts(layer_digests=["0" * 32]),
    "no digests": edit_facts(layer_digests=[]),
    "digests of 10^5 layers": edit_facts(layer_digests=["0" * 32] * 10**5),
    "digest is null": edit_facts(layer_digests=[None, None]),
    "missing tensor": edit_header(lambda header: header.pop("layers.1.v")),
    "no first tensor": edit_header(lambda header: header.pop("layers.0.k")),
    "extra tensor": edit_header(
        lambda header: header.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    ),
    "tensor name with slashes": edit_text(b'"layers.0.v"', b'"layers/../0.v"'),
    "tensor is null": edit_header(lambda header: header.update({"layers.0.k": None})),
    "offsets overlap": edit_tensor("layers.0.v", data_offsets=[0, 384]),
    "offsets leave a hole": edit_tensor("layers.0.v", data_offsets=[388, 772]),
    "offsets run backwards": edit_tensor("layers.0.v", data_offsets=[768, 384]),
    "offsets are negative": edit_tensor("layers.0.k", data_offsets=[-384, 0]),
    "offsets are floats": edit_tensor("layers.0.k", data_offsets=[0.0, 384.0]),
    "offsets swapped between tensors": edit_header(swap_first_layers),
    "dtype of doubles": edit_tensor("layers.0.k", dtype="F64"),
    "dtype of int8 in one tensor": edit_tensor("layers.0.v", dtype="I8"),
    "dtype is a list": edit_tensor("layers.0.k", dtype=[]),
    "tokens as floats": edit_tensor("tokens", dtype="F32"),
    "shape swapped": edit_tensor("layers.0.k", shape=[4, 2, 12]),
    "shape flattened": edit_tensor("layers.0.k", shape=[96]),
    "shape of 2^40": edit_tensor("layers.0.k", shape=[2**40, 4, 12]),
    "shape is a string": edit_tensor("layers.0.k", shape="abc"),
    "shape holds true": edit_tensor("layers.0.k", shape=[True, 4, 12]),
}


@pytest.mark.parametrize("mutate", HOSTILE.values(), ids=HOSTILE.keys())
def test_header_is_refused(good: Path, mutate: Callable[[bytes], bytes]) -> None:
    before = good.read_bytes()
    content = mutate(before)
    assert content != before
    good.write_bytes(content)
    fd = os.open(good, os.O_RDONLY)
    try:
        start = time.monotonic()
        with pytest.raises(ArtifactError) as refusal:
            read_header(fd, LAYOUT)
        assert time.monotonic() - start < 1
        assert len(str(refusal.value)) < 1000
    finally:
        os.close(fd)


@pytest.mark.parametrize("mutate", HOSTILE.values(), ids=HOSTILE.keys())
def test_store_starts_without_it(
    good: Path, root: Path, store: Store, mutate: Callable[[bytes], bytes]
) -> None:
    store.close()
    good.write_bytes(mutate(good.read_bytes()))
    (root / "catalog.sqlite3").unlink()
    with open_store(root) as again:
        assert again.usage().files == 0 and again.usage().quarantined == 1
        assert not good.exists()
        assert restore(again, TOKENS) == 0
        publish(again, TOKENS)
        assert restore(again, TOKENS) == len(TOKENS)


def test_headers_of_another_layout_are_refused(good: Path) -> None:
    fd = os.open(good, os.O_RDONLY)
    try:
        assert read_header(fd, None).layout == LAYOUT
        for layout in (PageLayout(2, 4, 2), PageLayout(2, 2, 4, "int8"), PageLayout(1, 2, 4)):
            with pytest.raises(ArtifactError, match="expected pages of"):
                read_header(fd, layout)
    finally:
        os.close(fd)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """A link to a perfectly good artifact elsewhere."""
    elsewhere = path.parent.parent / "elsewhere"
    os.rename(path.with_suffix(".kept"), elsewhere)
    path.symlink_to(elsewhere)


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/nonexistent/target")


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("not the store's")


def make_sparse(path: Path) -> None:
    """A terabyte that takes no room: reading it, or trusting its size, would take for ever."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**12))
        file.truncate(10**12)


def make_sparse_with_header(path: Path) -> None:
    """A sound header in front of a terabyte of nothing."""
    with path.open("wb") as file:
        file.write(path.with_suffix(".kept").read_bytes()[:1024])
        file.truncate(10**12)


KINDS = [
    make_fifo,
    make_link,
    make_dangling_link,
    make_device_link,
    make_folder,
    make_sparse,
    make_sparse_with_header,
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("when", ["while open", "before opening"])
def test_odd_kinds_of_file(
    good: Path, root: Path, store: Store, make: Callable[[Path], None], when: str
) -> None:
    match = store.find_prefix(NAMESPACE, TOKENS, 16, 1)
    os.rename(good, good.with_suffix(".kept"))
    make(good)
    start = time.monotonic()
    if when == "while open":
        with pytest.raises(ArtifactError) as refusal:
            store.open_page(match.pages[0], LAYOUT)
        store.quarantine(good, str(refusal.value))
    else:
        store.close()
        (root / "catalog.sqlite3").unlink()
        store.open()
    assert time.monotonic() - start < 2
    assert not os.path.lexists(good)
    assert restore(store, TOKENS) == 0
    publish(store, TOKENS)
    assert restore(store, TOKENS) == len(TOKENS)
    if make is make_folder:
        assert [path.read_text() for path in root.rglob("precious")] == ["not the store's"]


def test_odd_kinds_are_replaced_when_the_page_is_saved_again(good: Path, store: Store) -> None:
    for make in (make_fifo, make_folder, make_sparse, make_dangling_link):
        good.unlink()
        make(good)
        publish(store, TOKENS)
        assert restore(store, TOKENS) == len(TOKENS), make


def test_file_of_another_page_under_this_name(store: Store, root: Path, good: Path) -> None:
    (other,) = publish(store, as_tokens(range(500, 512)))
    other_path = store.page_path(NAMESPACE.digest, other)
    os.replace(other_path, good)
    match = store.find_prefix(NAMESPACE, TOKENS, 16, 1)
    with pytest.raises(ArtifactError, match="not the page that was looked for"):
        store.open_page(match.pages[0], LAYOUT)
    store.close()
    (root / "catalog.sqlite3").unlink()
    store.open()
    assert store.usage().files == 0 and store.usage().quarantined == 1


def test_same_tokens_behind_another_prefix_are_not_taken(store: Store) -> None:
    """A forged parent cannot pass: the digest of the whole prefix is compared, not only keys."""
    _, key = publish(store, as_tokens([*range(16), *TOKENS]))
    path = store.page_path(NAMESPACE.digest, key)
    content = path.read_bytes()
    digest = json.loads(json.loads(split_file(content)[0])["__metadata__"]["kestrel"])["prefix_sha256"]
    path.write_bytes(content.replace(digest.encode(), b"0" * 64))
    match = store.find_prefix(NAMESPACE, as_tokens([*range(16), *TOKENS]), 16, 1)
    check_bits(store, match.pages[0])
    with pytest.raises(ArtifactError, match="prefix_sha256"):
        store.open_page(match.pages[1], LAYOUT)
    assert [path for path, _ in store.verify().damaged] == [path]


def test_hostile_file_does_not_cost_memory(good: Path) -> None:
    """The largest header there may be, full of the costliest JSON: some megabytes, not gigabytes."""
    text = b"[" + b"[]," * (MAX_HEADER_NBYTES // 3 - 10) + b"1]"
    good.write_bytes(with_text(good.read_bytes(), text))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fd = os.open(good, os.O_RDONLY)
    with pytest.raises(ArtifactError):
        OpenPage(fd, good, LAYOUT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_every_flipped_bit_and_every_cut_is_noticed(good: Path, store: Store) -> None:
    (ref,) = store.find_prefix(NAMESPACE, TOKENS, 16, 1).pages
    content = good.read_bytes()
    rng = random.Random(1)
    header_nbytes = len(content) - LAYOUT.page_nbytes(len(TOKENS)) - 4 * len(TOKENS)
    places = [rng.randrange(header_nbytes) for _ in range(350)]
    places += [rng.randrange(header_nbytes, len(content)) for _ in range(150)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        good.write_bytes(flipped)
        with pytest.raises(ArtifactError):
            check_bits(store, ref)
    for place in [rng.randrange(len(content)) for _ in range(100)]:
        good.write_bytes(content[:place])
        with pytest.raises(ArtifactError):
            check_bits(store, ref)
    for _ in range(100):  # a block that never reached the disk, one that landed in the wrong place
        start, end = sorted(rng.randrange(len(content)) for _ in range(2))
        torn = content[:start] + rng.choice([bytes(end - start), content[: end - start]]) + content[end:]
        good.write_bytes(torn)
        if torn != content:
            with pytest.raises(ArtifactError):
                check_bits(store, ref)
    good.write_bytes(content)
    check_bits(store, ref)


def test_file_cut_while_it_is_read(good: Path, store: Store) -> None:
    (ref,) = store.find_prefix(NAMESPACE, TOKENS, 16, 1).pages
    with store.open_page(ref, LAYOUT) as page:
        os.truncate(good, good.stat().st_size - LAYOUT.layer_nbytes(len(TOKENS)))
        buffer = np.empty(page.layer_nbytes, np.uint8)
        page.read_layer_into(0, buffer)
        with pytest.raises(ArtifactError, match="the file ends"):
            page.read_layer_into(1, buffer)


def test_buffers_that_do_not_fit_are_a_mistake_of_the_caller(good: Path, store: Store) -> None:
    (ref,) = store.find_prefix(NAMESPACE, TOKENS, 16, 1).pages
    with store.open_page(ref, LAYOUT) as page:
        nbytes = page.layer_nbytes
        for buffer in (
            bytearray(nbytes - 1),
            bytearray(nbytes + 1),
            bytes(nbytes),
            np.empty((nbytes, 2), np.uint8)[:, 0],
        ):
            with pytest.raises(ValueError, match="buffer"):
                page.read_layer_into(0, buffer)
        with pytest.raises(ValueError, match="layer"):
            page.read_layer_into(LAYOUT.num_layers, bytearray(nbytes))
        with pytest.raises(ValueError, match="layers"):
            page.read_layer_into(LAYOUT.num_layers - 1, bytearray(2 * nbytes), 2)
        floats = np.empty(LAYOUT.layer_tensors(0, len(TOKENS))[0].nbytes // 2, np.float32)
        page.read_layer_into(0, floats.reshape(2, -1))
