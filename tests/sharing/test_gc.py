"""Promise: eviction and gc know published pages, say what deleting frees, and never lose the only copy."""

import json

from kestrel.store.store import Limits, Store
from tests.sharing.conftest import TEXTS, Board, answer, pulled_pages


def objects(board: Board) -> int:
    return len(list((board.root / ".dvc" / "cache").glob("files/md5/*/*")))


def test_pages_that_dvc_keeps_leave_the_store_and_come_back_without_a_remote(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    clone.run("dvc", "remote", "modify", "storage", "url", "/nonexistent")
    said = clone.run("kestrel", "kv", "gc", "--dry-run", "cache.max_files=2")
    assert said.count("published, frees nothing: DVC's cache keeps the bytes") == 4
    assert "would remove 4 files, 0 B freed" in said and len(clone.artifacts()) == 6
    clone.run("kestrel", "kv", "gc", "cache.max_bytes=1KB")
    assert not clone.artifacts() and objects(clone) == 6
    _, said = answer(clone, f"{TEXTS['tools']} x")
    assert pulled_pages(said) == 2
    assert json.loads(clone.run("kestrel", "kv", "ls", "--published", "--json"))["pages"]


def test_the_only_copy_stays(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    for path in (clone.root / ".dvc" / "cache").glob("files/md5/*/*"):
        path.unlink()
    assert "removed 0 files" in clone.run("kestrel", "kv", "gc", "cache.max_bytes=1KB")
    assert len(clone.artifacts()) == 6
    with Store(clone.kv, Limits(max_files=1, ttl_seconds=1e-9)) as store:
        assert store.sweep() == []
        usage = store.usage()
        assert usage.strangers == 0 and usage.files == 6  # marks are no strangers


def test_freeing_the_cache_needs_a_remote_that_has_it(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    lost = clone.published()[0]
    (clone.root.parent / "remote" / "files" / "md5" / lost.md5[:2] / lost.md5[2:]).unlink()
    said = clone.run("kestrel", "kv", "gc", "--published", "cache.max_bytes=1KB")
    assert objects(clone) == 1 and not clone.artifacts()
    assert said.count("in DVC's cache only; a remote has it") == 5
    clone.run("kestrel", "kv", "pull")
    assert clone.check_store() == 6


def test_a_published_page_is_not_replaced_by_a_longer_one(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull", "tools")
    with clone.runtime() as runtime:
        runtime.prefill(runtime.tokenizer.encode(f"{TEXTS['tools']} and a little more"))
    assert all(page.is_here for page in clone.published() if page.prefix == "tools")
