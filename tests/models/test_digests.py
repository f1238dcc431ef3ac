"""A digest is computed once per file as it is, and again as soon as the file is another one."""

import hashlib
import os
from pathlib import Path

import xxhash

from kestrel.models.digests import DigestMemo, file_sha256, file_xxh3


def test_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kestrel" * 1_000_000)
    assert file_xxh3(path) == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    reads: list[Path] = []

    def compute(file: Path) -> str:
        reads.append(file)
        return file.read_text()

    memo = DigestMemo(tmp_path / "memo")
    assert [memo.remember(path, "text", compute) for _ in range(3)] == ["one"] * 3
    assert DigestMemo(tmp_path / "memo").remember(path, "text", compute) == "one"
    assert len(reads) == 1
    assert memo.remember(path, "other", compute) == "one" and len(reads) == 2
    (tmp_path / "new").write_bytes(b"two")
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(tmp_path / "new", path)  # same size, same mtime, another file
    assert memo.remember(path, "text", compute) == "two" and len(reads) == 3


def test_files_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        memo.remember(tmp_path / name, "xxh3_128", file_xxh3)
    (tmp_path / "a").unlink()
    memo.store(tmp_path / "b", "sha256", "x")
    assert str(tmp_path / "a") not in (tmp_path / "digests.json").read_text()


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file" / "below", None):
        assert DigestMemo(root).remember(tmp_path / "file", "text", Path.read_text) == "x"
