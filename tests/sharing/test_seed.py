"""Promise: Kestrel-LLM's `.kv` snapshots, versions 1 and 2, are written and read to the byte, hostile ones refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.errors import ArtifactError
from kestrel.runtime import Runtime
from kestrel.seed.exchange import export_snapshot
from kestrel.seed.vlkv import (
    HEADER,
    HEADER_NBYTES,
    Rows,
    Shape,
    Snapshot,
    encode_head,
    encode_layer,
    file_name,
    token_hash,
)
from kestrel.store.store import Store
from tests.sharing.conftest import TEXTS, Board

TOKENS = np.arange(5, 5 + 75, dtype="<i4")


def random_rows(shape: Shape, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    size = (shape.num_tokens, shape.num_kv_heads, shape.head_dim)
    if shape.version == 1:
        return Rows(*(rng.standard_normal(size).astype("<f4") for _ in range(2)))
    values = [rng.integers(-127, 128, size).astype("i1") for _ in range(2)]
    scales = [rng.random(size[:2]).astype("<f4") + 1e-3 for _ in range(2)]
    return Rows(values[0], values[1], scales[0], scales[1])


def write(path: Path, shape: Shape, tokens: Any = TOKENS) -> list[Rows]:
    layers = [random_rows(shape, layer) for layer in range(shape.num_layers)]
    path.write_bytes(
        b"".join(
            [encode_head(shape, tokens), *(part for rows in layers for part in encode_layer(shape, rows))]
        )
    )
    return layers


def test_hash_name_and_sizes() -> None:
    assert token_hash([151644, 8948, 198]) == 0xF55DB41CDADD0785
    assert file_name([151644, 8948, 198]) == "kv_f55db41cdadd0785.kv"
    assert Shape(1, 28, 8, 128, 2056).file_nbytes == 471_605_344
    assert Shape(2, 28, 8, 128, 2056).file_nbytes == 121_591_904


def test_version_1_by_hand() -> None:
    """3 tokens in blocks of 2, 1 layer, 1 head of 2: K of a block, then its V; the tail has one row each."""
    shape = Shape(1, 1, 1, 2, 3, block_tokens=2)
    k = np.arange(6, dtype="<f4").reshape(3, 1, 2)
    written = b"".join([encode_head(shape, TOKENS[:3]), *encode_layer(shape, Rows(k, k + 100))])
    header = struct.pack("<IIiiiiiiQ", 0x564C4B56, 1, 1, 1, 2, 2, 3, 2, token_hash(TOKENS[:3]))
    body = np.array([0, 1, 2, 3, 100, 101, 102, 103, 4, 5, 104, 105], "<f4").tobytes()
    assert written == header.ljust(64, b"\0") + TOKENS[:3].tobytes() + body
    assert written[:4] == bytes.fromhex("564b4c56")


def test_version_2_by_hand() -> None:
    """2 tokens, 1 layer, 2 heads of 1: a token is K, V, K scales, V scales."""
    shape = Shape(2, 1, 2, 1, 2)
    k = np.array([[[1], [2]], [[3], [4]]], "i1")
    scale = np.array([[0.5, 0.25], [1.5, 1.25]], "<f4")
    written = b"".join(encode_layer(shape, Rows(k, -k, scale, scale * 2)))
    assert written == b"".join(
        np.array([a, b, -a, -b], "i1").tobytes() + np.array([s, t, 2 * s, 2 * t], "<f4").tobytes()
        for (a, b), (s, t) in zip(((1, 2), (3, 4)), ((0.5, 0.25), (1.5, 1.25)), strict=True)
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("block", [1, 32, 75, 100])
def test_any_run_of_rows_is_read_to_the_bit(tmp_path: Path, version: int, block: int) -> None:
    """The predecessor used a wrong stride for a part of a version-2 file."""
    shape = Shape(version, 3, 2, 4, len(TOKENS), block)
    layers = write(tmp_path / "a.kv", shape)
    with Snapshot(tmp_path / "a.kv") as snapshot:
        for start, stop in ((0, 75), (0, 1), (31, 33), (32, 64), (64, 75), (74, 75), (5, 70)):
            for layer, rows in enumerate(layers):
                for found, expected in zip(snapshot.rows(layer, start, stop), rows, strict=True):
                    assert (found is None) == (expected is None)
                    if found is not None and expected is not None:
                        assert found.tobytes() == expected[start:stop].tobytes()


def patched(offset: int, fmt: str, value: int) -> Any:
    def patch(data: bytearray) -> None:
        struct.pack_into(fmt, data, offset, value)

    return patch


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (patched(0, "<I", 0x12345678), "not a .kv snapshot"),
        (patched(4, "<I", 3), "expected version 1 or 2"),
        (patched(8, "<i", 0), "layers must be in"),
        (patched(8, "<i", 2**31 - 1), "layers must be in"),
        (patched(12, "<i", -1), "KV heads must be in"),
        (patched(16, "<i", 1 << 30), "head_dim must be in"),
        (patched(20, "<i", 0), "block size must be in"),
        (patched(24, "<i", 0), "tokens must be in"),
        (patched(24, "<i", 1 << 23), "expected .* bytes for 8388608 tokens"),
        (patched(28, "<i", 9), "kv_dim must be"),
        (patched(32, "<Q", 1), "do not have the hash"),
        (patched(HEADER.size, "<B", 1), "must be zero"),
        (patched(HEADER_NBYTES, "<i", 77), "do not have the hash"),
        (lambda data: data.pop(), "was it cut off"),
        (lambda data: data.append(0), "was it cut off"),
        (lambda data: data.clear(), "expected a header of 64 bytes"),
    ],
)
def test_hostile_files_are_refused_with_a_reason(tmp_path: Path, patch: Any, reason: str) -> None:
    write(tmp_path / "a.kv", Shape(1, 3, 2, 4, len(TOKENS)))
    data = bytearray((tmp_path / "a.kv").read_bytes())
    patch(data)
    (tmp_path / "b.kv").write_bytes(data)
    with pytest.raises(ArtifactError, match=reason):
        Snapshot(tmp_path / "b.kv")
    (tmp_path / "link.kv").symlink_to(tmp_path / "a.kv")
    with pytest.raises(ArtifactError):
        Snapshot(tmp_path / "link.kv")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    shape = Shape(1, 1, 2, 4, len(TOKENS))
    rows = random_rows(shape, 0)
    rows.v[70, 1, 3] = np.nan
    (tmp_path / "a.kv").write_bytes(b"".join([encode_head(shape, TOKENS), *encode_layer(shape, rows)]))
    with Snapshot(tmp_path / "a.kv") as snapshot:
        snapshot.rows(0, 0, 64)
        with pytest.raises(ArtifactError, match="no finite numbers"):
            snapshot.rows(0, 64, 75)


def prefill(runtime: Runtime, text: str) -> Any:
    sequence = runtime.cache.open(runtime.tokenizer.encode(text))
    try:
        logits = sequence.prefill()
    finally:
        sequence.close()
    assert runtime.writer is not None
    runtime.writer.drain()
    return sequence.stats, logits.tobytes()


def last_key(store: Store) -> bytes:
    (end,) = [row for row in store.list_pages() if not row.num_children]
    return end.key


@pytest.mark.parametrize(("kv", "version"), [("float32", 1), ("int8", 2)])
def test_export_and_import_carry_a_session_to_another_board(
    board: Board, tmp_path: Path, kv: str, version: int
) -> None:
    text, setting = TEXTS["manual"], f"engine.kv={kv}"
    with board.runtime(setting) as runtime:
        runtime.prefill(runtime.tokenizer.encode(text))
        assert runtime.writer is not None and runtime.store is not None
        runtime.writer.drain()
        path, nbytes, written = export_snapshot(
            runtime.store, last_key(runtime.store), tmp_path, lambda *_: None
        )
        assert written and path.stat().st_size == nbytes
        assert not export_snapshot(runtime.store, last_key(runtime.store), tmp_path, lambda *_: None)[2]
        namespace, tokens = runtime.namespace.name, runtime.tokenizer.encode(text)
        _, expected = prefill(runtime, f"{text} Q")
    assert path.name == file_name(tokens) and Snapshot(path).shape.version == version
    code, _, stderr = board.attempt("kestrel", "kv", "import", str(path))
    assert code == 1 and f"--identity {namespace}" in stderr and "--identity configured" in stderr
    other = Board(tmp_path / "b", board.models)
    other.root.mkdir()
    said = other.run("kestrel", "kv", "import", str(path), "--identity", "configured", setting)
    assert "441 tokens in 4 pages" in said and "cache.accept=portable only" in said
    with other.runtime(setting) as runtime:
        stats, _ = prefill(runtime, f"{text} Q")
        assert stats.matched_tokens == 0 and "imported from kv-version-" in stats.miss_reason
    for path_of_own in other.kv.glob(f"{namespace}/*/*.safetensors"):
        path_of_own.unlink()
    with other.runtime(setting, "cache.accept=portable") as runtime:
        stats, logits = prefill(runtime, f"{text} Q")
        assert stats.restored_tokens == 441 and "imported from kv-version-" in stats.foreign
        assert logits == expected  # the same CPU computed them, and the format carries every bit
        assert runtime.store is not None
        back, _, _ = export_snapshot(
            runtime.store, last_key(runtime.store), tmp_path / "back", lambda *_: None
        )
    assert back.read_bytes() == path.read_bytes()


def test_a_snapshot_of_another_model_is_refused(board: Board, tmp_path: Path) -> None:
    write(tmp_path / "a.kv", Shape(1, 3, 2, 4, len(TOKENS)))
    code, _, stderr = board.attempt(
        "kestrel", "kv", "import", str(tmp_path / "a.kv"), "--identity", "configured"
    )
    assert code == 1 and "the snapshot has layers 3, the model 2" in stderr
