"""Digests of large files, remembered as long as the file is the same file."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import xxhash

CHUNK = 1 << 22  # bytes read at a time


class DigestMemo:
    """`digests.json` in a folder: per file its identity (dev, inode, size, mtime, ctime) and what was computed.

    Disposable: when it is missing, unreadable or the folder cannot be written, digests are computed again.
    Two processes that write at once may lose an entry, never mix two.
    """

    def __init__(self, root: Path | None) -> None:
        self._path = root / "digests.json" if root is not None else None

    def remember(self, path: Path, kind: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`, or what it gave last time for the very same file."""
        key = str(path.resolve())
        stat = _identity(path)
        entry = self._read().get(key)
        if isinstance(entry, dict) and entry.get("stat") == stat and isinstance(entry.get(kind), str):
            return str(entry[kind])
        value = compute(path)
        if _identity(path) == stat:  # not while someone was writing to it
            self.store(path, kind, value)
        return value

    def store(self, path: Path, kind: str, value: str) -> None:
        """Note that `kind` of the file as it is now is `value`."""
        if self._path is None:
            return
        key, stat = str(path.resolve()), _identity(path)
        memo = self._read()
        entry = memo.get(key)
        if not isinstance(entry, dict) or entry.get("stat") != stat:
            entry = {"stat": stat}
        memo[key] = {**entry, kind: value}
        memo = {file: kept for file, kept in memo.items() if os.path.exists(file)}
        temp = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temp.write_text(json.dumps(memo, indent=1, sort_keys=True))
                os.replace(temp, self._path)
            finally:
                temp.unlink(missing_ok=True)
        except OSError:
            return  # a folder that cannot be written only costs the time to hash again

    def _read(self) -> dict[str, object]:
        if self._path is None:
            return {}
        try:
            memo = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return memo if isinstance(memo, dict) else {}


def file_xxh3(path: Path) -> str:
    """xxh3_128 (hex) of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
