"""Promise: past the page cache or through it, files have the same bytes and a damaged layer is noticed."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kestrel.bench.process import drop_from_page_cache
from kestrel.errors import ArtifactError
from kestrel.identity import as_tokens
from kestrel.residency import share_present
from kestrel.store.artifact import (
    EARLIER_ALIGNMENT,
    OpenPage,
    encode_header,
    read_header,
)
from kestrel.store.direct import SECTOR, TRIES, FileWriter, is_cached
from kestrel.store.layout import PageLayout
from tests.store.pages import NAMESPACE, open_store, payload_of, publish

LAYOUT = PageLayout(num_layers=40, num_kv_heads=3, head_dim=64)
NUM_TOKENS = 256


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A full page on a disk, out of the page cache. (The stores of other tests may be in memory.)"""
    with open_store(tmp_path / "kv") as store:
        (key,) = publish(store, as_tokens(range(NUM_TOKENS)), NUM_TOKENS, layout=LAYOUT)
        found = store.page_path(NAMESPACE.digest, key)
        drop_from_page_cache([found])
        yield found


def aligned_buffer() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, LAYOUT.layer_nbytes(NUM_TOKENS)), np.uint8)


def opened(path: Path) -> OpenPage:
    return OpenPage(os.open(path, os.O_RDONLY), path, LAYOUT)


def share_in_page_cache(path: Path) -> float:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        share = share_present(np.frombuffer(mapped, np.uint8).ctypes.data, len(mapped))
    assert share is not None
    return share


def test_a_few_looks_tell_whether_a_file_is_in_the_page_cache_and_bring_little_of_it_there(
    path: Path,
) -> None:
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        assert not is_cached(file.fileno(), nbytes)
        assert share_in_page_cache(path) < 0.05
        os.pread(file.fileno(), nbytes, 0)
        assert is_cached(file.fileno(), nbytes)


def test_layers_come_from_the_disk_into_the_buffer_and_leave_no_copy_in_the_page_cache(path: Path) -> None:
    expected = payload_of(bytes.fromhex(path.stem), NUM_TOKENS, LAYOUT)
    with opened(path) as page:
        page.avoid_page_cache()
        buffer = aligned_buffer()
        for layer, content in enumerate(expected):
            page.read_layer_into(layer, buffer)
            assert buffer.tobytes() == content
        if page._direct_fd < 0:
            pytest.skip("this file system has no direct reads")
        assert share_in_page_cache(path) < 0.5


def test_buffers_that_are_not_aligned_are_filled_through_the_page_cache(path: Path) -> None:
    expected = payload_of(bytes.fromhex(path.stem), NUM_TOKENS, LAYOUT)
    size = LAYOUT.layer_nbytes(NUM_TOKENS)
    for shift in (0, 1, 8, 64):
        drop_from_page_cache([path])
        with opened(path) as page:
            page.avoid_page_cache()
            buffer = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)[shift : shift + size]
            page.read_layer_into(7, buffer)
            assert buffer.tobytes() == expected[7]


def test_what_the_page_cache_holds_is_read_from_there(path: Path) -> None:
    path.read_bytes()
    with opened(path) as page:
        page.avoid_page_cache()
        assert page._direct_fd < 0


def test_a_damaged_layer_is_noticed_past_the_page_cache_too(path: Path) -> None:
    with opened(path) as page:
        start = page.payload_start
    with open(path, "r+b") as file:
        file.seek(start + 5 * LAYOUT.layer_nbytes(NUM_TOKENS) + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    drop_from_page_cache([path])
    with opened(path) as page:
        page.avoid_page_cache()
        buffer = aligned_buffer()
        page.read_layer_into(4, buffer)
        with pytest.raises(ArtifactError, match="layer 5 is damaged"):
            page.read_layer_into(5, buffer)


def test_files_padded_as_earlier_versions_did_are_read_alike(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    header, layout, _, start = read_header(fd, LAYOUT)
    os.close(fd)
    content = path.read_bytes()
    earlier = encode_header(layout, header, EARLIER_ALIGNMENT)
    assert len(earlier) % 4096
    path.write_bytes(earlier + content[start:])
    drop_from_page_cache([path])
    with opened(path) as page:
        page.avoid_page_cache()
        buffer = aligned_buffer()
        for layer, expected in enumerate(payload_of(bytes.fromhex(path.stem), NUM_TOKENS, LAYOUT)):
            page.read_layer_into(layer, buffer)
            assert buffer.tobytes() == expected


def pieces(*sizes: int, shift: int = 0) -> list[np.ndarray]:
    """Neighbours of random bytes in one piece of memory that begins at a page, or `shift` bytes behind it."""
    memory = np.frombuffer(mmap.mmap(-1, sum(sizes) + shift + mmap.PAGESIZE), np.uint8)[shift:]
    memory[:] = np.random.default_rng(len(memory)).integers(0, 256, len(memory), np.uint8)
    ends = np.cumsum(sizes)
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def written(path: Path, writer: FileWriter, chunks: list[np.ndarray]) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        writer.write(fd, chunks)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path.read_bytes()


LONG = 3 << 20


@pytest.mark.parametrize("sector", [SECTOR, 64])  # of 64 the kernel refuses some
@pytest.mark.parametrize(
    "chunks",
    [
        pieces(4096, LONG, LONG, 1024),
        pieces(100, 412, LONG, 0, LONG, 7),
        pieces(4096, LONG + 64, LONG, 3),
        pieces(LONG, LONG, shift=64),
        pieces(4096, 512, 512),
        pieces(8, LONG),
        [],
    ],
    ids=["page", "mixed", "odd length", "odd memory", "short", "odd place", "empty"],
)
def test_a_file_holds_its_chunks_whatever_their_alignment(
    path: Path, chunks: list[np.ndarray], sector: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.store.direct.SECTOR", sector)
    assert written(path, FileWriter(), chunks) == b"".join(chunk.tobytes() for chunk in chunks)


def test_long_writes_leave_no_copy_in_the_page_cache_unless_the_disk_is_slow(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.store.direct.FAST", 0.0)
    chunks = pieces(4096, LONG, LONG)
    other = path.with_suffix(".new")
    writer = FileWriter()

    def share() -> float:
        fd = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        writer.write(fd, chunks)
        os.fsync(fd)
        os.close(fd)
        return share_in_page_cache(other)

    if share() > 0.5:
        pytest.skip("this file system has no direct writes")
    assert share() < 0.1
    monkeypatch.setattr("kestrel.store.direct.FAST", 1e15)  # no disk is that fast
    for _ in range(TRIES):
        share()
    assert share() > 0.9
