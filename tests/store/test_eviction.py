"""Promise: limits are never exceeded, and what leaves is what is least missed: never a page others depend on."""

import os
import random
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import StoreError
from kestrel.identity import Tokens, as_tokens
from kestrel.store.catalog import CATALOG_FILES, LOG_NBYTES
from kestrel.store.store import Store
from tests.store.pages import LAYOUT, NAMESPACE, all_bytes, open_store, publish, restore

KIB, MIB = 1 << 10, 1 << 20


def session(number: int, num_tokens: int = 32) -> Tokens:
    """Tokens of a session that shares nothing with others."""
    return as_tokens(range(1000 * number, 1000 * number + num_tokens))


def stored(store: Store) -> set[bytes]:
    return {row.key for row in store.list_pages()}


def test_bytes_on_disk_never_exceed_the_limit(root: Path) -> None:
    """Measured from outside after each of hundreds of saves, with strangers, damage and restarts in between."""
    limit = 1200 * KIB
    rng = random.Random(3)
    store = open_store(root, max_bytes=limit)
    sessions: list[Tokens] = []
    damaged = {NAMESPACE.digest}
    for step in range(100):
        base = (
            rng.choice(sessions)[: rng.randrange(1, 64)] if sessions and rng.random() < 0.5 else as_tokens([])
        )
        tokens = as_tokens([*base, *rng.choices(range(50), k=rng.randrange(1, 200))])
        sessions.append(tokens)
        publish(store, tokens, rng.choice([16, 64, 200]))
        assert all_bytes(root) <= limit
        assert store.usage().bytes == all_bytes(root)
        if step % 10 == 0:
            (root / f"stranger-{step}").write_bytes(bytes(rng.randrange(20_000)))
        if step % 15 == 0:
            path = rng.choice([path for path in root.rglob("*.safetensors")])
            path.write_bytes(bytes(100))
            store.quarantine(path, "a test")
            damaged.add(bytes.fromhex(path.stem))
        if step % 40 == 39:
            store.touch(rng.sample(sorted(stored(store)), 10))
            store.close()
            store = open_store(root, max_bytes=limit)
    assert store.stats()["evicted_pages"] > 5
    known = stored(store)
    for row in store.list_pages():  # whatever is left is whole chains, but for what the test broke
        assert row.parent in known | damaged
    assert store.verify().damaged == ()
    store.close()


@pytest.mark.parametrize(("limit", "pages"), [("max_files", 10), ("max_tokens", 160)])
def test_files_and_tokens_never_exceed_their_limit(root: Path, limit: str, pages: int) -> None:
    with open_store(root, **{limit: pages}) as store:
        for number in range(12):
            publish(store, session(number, 50))
            usage = store.usage()
            assert usage.files == len(list(root.rglob("*.safetensors")))
            assert (usage.files if limit == "max_files" else usage.tokens) <= pages
        assert restore(store, session(11, 50)) == 50  # the last session is all there


def test_least_recently_used_leaves_first(root: Path) -> None:
    with open_store(root, max_files=6) as store:
        keys = [publish(store, session(number)) for number in range(3)]
        store.touch(keys[0])
        publish(store, session(3))
        assert stored(store) >= {*keys[0], *keys[2]} and not stored(store) & {*keys[1]}


def test_children_leave_before_parents(root: Path) -> None:
    """The oldest page of all stays as long as anything builds on it."""
    with open_store(root, max_files=5) as store:
        system = session(0, 16)
        (parent,) = publish(store, system)
        for number in range(1, 9):
            publish(store, as_tokens([*system, *session(number, 16)]))
            assert parent in stored(store)
        assert store.usage().files == 5


def test_pinned_pages_and_what_they_build_on_stay(root: Path) -> None:
    with open_store(root, max_files=4, ttl_seconds=0.0) as store:
        keys = publish(store, session(0, 48))
        assert store.pin(keys[1:2]) == 1
        for number in range(1, 5):
            publish(store, session(number, 32))
        time.sleep(0.01)
        store.sweep()
        assert stored(store) == {*keys[:2]}
        with pytest.raises(StoreError, match="unpin pages"):
            publish(store, session(9, 64))
        assert store.unpin(keys[1:2]) == 1
        store.sweep()
        assert stored(store) == set()
        assert store.pin(keys) == 0


def test_pins_outlast_a_restart(root: Path) -> None:
    with open_store(root) as store:
        keys = publish(store, session(0))
        store.pin(keys)
    with open_store(root, max_files=1) as store:
        assert store.sweep() == []
        assert all(row.pinned for row in store.list_pages())


def test_pages_of_a_request_in_flight_stay(root: Path) -> None:
    with open_store(root, max_files=2) as store:
        keys = publish(store, session(0))
        with store.protect(keys[1:]), store.protect(keys[1:]):
            pass
        with store.protect(keys[1:]):
            with pytest.raises(StoreError):
                publish(store, session(1))
            assert stored(store) == {*keys}
        publish(store, session(1))
        assert not stored(store) & {*keys}


def test_a_page_does_not_evict_its_own_parent(root: Path) -> None:
    with open_store(root, max_files=2) as store:
        publish(store, session(0, 16))
        keys = publish(store, session(1, 32))
        assert stored(store) == {*keys}
        with pytest.raises(StoreError):  # the third page of the chain has nothing it could replace
            publish(store, session(1, 48))
        assert stored(store) == {*keys}


def test_nothing_is_evicted_in_vain(root: Path) -> None:
    with open_store(root, max_bytes=MIB) as store:
        keys = [*publish(store, session(0)), *publish(store, session(1))]
        with pytest.raises(StoreError, match="does not fit.*bytes over max_bytes.*Raise the limits"):
            publish(store, session(2, 20_000), 20_000)
        assert stored(store) == {*keys}


def test_expired_pages_leave_first_and_at_every_sweep(root: Path) -> None:
    with open_store(root, ttl_seconds=0.5) as store:
        old = publish(store, session(0, 48))
        fresh = publish(store, session(1))
        assert store.sweep() == []
        time.sleep(0.6)
        store.touch(fresh)
        store.touch(old[:1])
        planned = store.sweep(dry_run=True)
        assert [(eviction.key, eviction.reason) for eviction in planned] == [
            (old[2], "expired"),
            (old[1], "expired"),
        ]
        assert stored(store) == {*old, *fresh}
        assert [eviction.key for eviction in store.sweep()] == [old[2], old[1]]
        assert stored(store) == {old[0], *fresh}


def test_a_dry_run_tells_and_does_nothing(root: Path) -> None:
    with open_store(root) as store:
        keys = publish(store, session(0))
    with open_store(root, max_files=1) as store:
        (eviction,) = store.sweep(dry_run=True)
        assert (eviction.key, eviction.reason) == (keys[1], "least recently used")
        assert eviction.path.stat().st_size == eviction.nbytes and eviction.num_links == 1
        assert stored(store) == {*keys}


def test_what_became_needed_since_the_plan_was_made_stays(root: Path) -> None:
    """Another process may pin a page or save a child between planning and removing."""
    with open_store(root) as store:
        parent, pinned, protected, idle = (publish(store, session(number, 16))[0] for number in range(4))
    with open_store(root, max_files=0) as store:
        plan = store.sweep(dry_run=True)
        assert {eviction.key for eviction in plan} == {parent, pinned, protected, idle}
        with open_store(root) as other:
            child = publish(other, session(0, 32))[1]
            other.pin([pinned])
        with store.protect([protected]):
            done = store._room.evict(store._current_catalog(), plan)
        assert [eviction.key for eviction in done] == [idle]
        assert stored(store) == {parent, child, pinned, protected}


def test_quarantined_files_go_before_pages(root: Path) -> None:
    nbytes = 400 * KIB
    tokens = nbytes // LAYOUT.page_nbytes(1)
    with open_store(root, max_bytes=LOG_NBYTES + 3 * nbytes) as store:
        first, second = (publish(store, session(number, tokens), tokens)[0] for number in range(2))
        path = store.page_path(NAMESPACE.digest, first)
        path.write_bytes(path.read_bytes()[:-1])
        assert restore(store, session(0, tokens)) == 0
        assert store.usage().quarantined == 1
        publish(store, session(2, tokens), tokens)
        assert store.usage().quarantined == 0
        assert second in stored(store)
        assert store.stats()["deleted_quarantined_files"] == 1


def test_strangers_are_counted_and_never_deleted(root: Path) -> None:
    with open_store(root, max_bytes=2 * MIB) as store:
        (key,) = publish(store, session(0, 16))
        page = store.page_path(NAMESPACE.digest, key)
        strangers = [
            root / "notes.txt",
            root / ".gitignore",
            root / "deep" / "er" / "x.safetensors",
            page.with_suffix(".safetensors.bak"),
            page.with_name(".someone-elses.tmp"),
            page.with_name("ABCDEF" + "0" * 26 + ".safetensors"),
            page.parent / "folder" / "y",
            root / NAMESPACE.name / "more.json",
            root / "quarantine" / "folder" / "z",
        ]
        for number, path in enumerate(strangers):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000 * (number + 1)))
        (root / "link").symlink_to("/etc/passwd")
        os.mkfifo(root / "fifo")
        usage = store.usage()
        assert usage.strangers == len(strangers) + 2
        assert usage.bytes == all_bytes(root)
        strangers[0].write_bytes(bytes(2 * MIB))  # one that grows in place, in a folder that does not change
        with pytest.raises(StoreError, match=r"11 strangers"):
            publish(store, session(1, 16))
        for eviction in store.sweep():
            assert eviction.path == page
        assert all(path.exists() for path in strangers) and (root / "link").is_symlink()
        strangers[0].unlink()
        publish(store, session(1, 16))


def test_a_hard_link_elsewhere_keeps_the_bytes_and_the_store_says_so(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store:
        (key,) = publish(store, session(0, 16))
        other = root.parent / "cache-of-someone-else"
        os.link(store.page_path(NAMESPACE.digest, key), other)
    free = os.statvfs(root)
    with open_store(root, min_free_bytes=free.f_bavail * free.f_frsize + (64 << 30)) as store:
        assert store.sweep() == []  # removing one of two links would free nothing
    with open_store(root, max_files=0) as store:
        (eviction,) = store.sweep()
        assert eviction.num_links == 2 and other.exists()


def test_free_space_floor(root: Path) -> None:
    with open_store(root) as store:
        keys = publish(store, session(0))
    disk = os.statvfs(root)
    with open_store(root, min_free_bytes=disk.f_blocks * disk.f_frsize) as store:
        with pytest.raises(StoreError, match="short of min_free_bytes"):
            publish(store, session(1))
        assert stored(store) == {*keys}  # not in vain
        assert [eviction.reason for eviction in store.sweep()] == ["least recently used"] * 2


def test_a_server_does_not_empty_its_store_because_others_fill_the_disk(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        old, young = publish(store, session(0)), publish(store, session(1))
        store.expire(old, 0.01)
    disk = os.statvfs(root)
    time.sleep(0.02)
    with open_store(root, min_free_bytes=disk.f_blocks * disk.f_frsize) as store:
        assert [eviction.reason for eviction in store.sweep(in_vain=False)] == ["expired"] * len(old)
        assert store.sweep(in_vain=False) == []
        assert stored(store) == {*young}
        assert caplog.text.count("cannot be brought within its limits") == 1  # not once for every sweep


def test_pages_found_by_a_rebuild_or_a_pull_have_their_whole_time_to_live(root: Path) -> None:
    with open_store(root) as store:
        keys = publish(store, session(0))
        paths = [store.page_path(row.namespace, row.key) for row in store.list_pages()]
    for path in paths:  # as a hard link from elsewhere, or a page that was written long ago and used just now
        os.utime(path, (time.time() - 1e6,) * 2)
    for name in CATALOG_FILES:
        (root / name).unlink(missing_ok=True)
    with open_store(root, ttl_seconds=3600) as store:
        assert store.usage().files == len(keys)
        assert store.sweep() == []
        leaf = max(store.list_pages(), key=lambda row: row.first)
        store.remove([leaf])
        publish(store, session(0))
        path = store.page_path(leaf.namespace, leaf.key)
        os.utime(path, (time.time() - 1e6,) * 2)
    with open_store(root, ttl_seconds=3600) as store:
        store.adopt(path)
        assert store.sweep() == []


def evict_and_let_others_save(store: Store, other: Store) -> tuple[list[int], Callable[[], int]]:
    """Have another save begin with every piece that `store` evicts.

    Returns how many of them had ended when each piece began, and a function that waits for all: their number.
    """
    evict, saved = store._room.evict, []
    threads: list[threading.Thread] = []
    counts: list[int] = []

    def save(number: int) -> None:
        saved.append(publish(other, session(number, 16)))

    def evict_and_let_others_wait(*args: Any) -> list[Any]:
        counts.append(len(saved))
        threads.append(threading.Thread(target=save, args=(500 + len(threads),)))
        threads[-1].start()
        return evict(*args)

    def wait() -> int:
        for thread in threads:
            thread.join()
        assert len(saved) == len(threads)
        return len(saved)

    store._room.evict = evict_and_let_others_wait  # type: ignore[method-assign]
    return counts, wait


def test_others_save_while_many_pages_leave(root: Path) -> None:
    with open_store(root) as store, open_store(root) as other:
        for number in range(100):
            publish(store, session(number, 16))
        store.expire([row.key for row in store.list_pages()], 0.001)
        time.sleep(0.01)
        counts, wait = evict_and_let_others_save(store, other)
        assert len(store.sweep()) == 100
        wait()
        assert counts[-1] > 0


def test_others_save_while_a_page_makes_much_room(root: Path) -> None:
    with open_store(root, max_files=10) as store, open_store(root) as other:
        for number in range(150):
            publish(other, session(number, 16))
        counts, wait = evict_and_let_others_save(store, other)
        key = publish(store, session(400, 16))[0]
        num_others = wait()
        assert store.usage().files <= 10 + num_others
        assert key in stored(store)
        assert counts[-1] > 0


def test_a_page_that_is_used_after_the_plan_was_made_stays(root: Path) -> None:
    with open_store(root) as store:
        keys = [publish(store, session(number, 16))[0] for number in range(100)]
        store.expire(keys, 0.001)
        time.sleep(0.01)
        evict = store._room.evict

        def use_the_last(*args: Any) -> list[Any]:
            store.touch(keys[-1:])
            return evict(*args)

        store._room.evict = use_the_last  # type: ignore[method-assign]
        assert len(store.sweep()) == 99
        assert stored(store) == {keys[-1]}


def test_what_has_a_time_of_its_own_is_found_without_reading_every_leaf(root: Path) -> None:
    with open_store(root) as store:
        catalog = store._current_catalog()
        statements: list[str] = []
        catalog.reader.set_trace_callback(statements.append)
        catalog.expired_leaves(-inf, time.time())
        catalog.reader.set_trace_callback(None)
        (statement,) = [text for text in statements if "ttls" in text]
        plan = [row[3] for row in catalog.reader.execute(f"EXPLAIN QUERY PLAN {statement}")]
        assert [step for step in plan if step.startswith("SCAN")] == ["SCAN ttls"]


def test_a_limit_of_bytes_is_approached_although_pins_keep_it_from_being_reached(root: Path) -> None:
    with open_store(root) as store:
        pinned, others = publish(store, session(0)), publish(store, session(1))
        store.pin(pinned[-1:])
    with open_store(root, max_tokens=1) as store:
        assert len(store.sweep(in_vain=False)) == len(others)
        assert stored(store) == {*pinned}


def test_removing_covered_pages(store: Store) -> None:
    base = publish(store, session(0, 16))
    parts = [publish(store, session(0, 16 + size))[1] for size in (3, 5, 7, 9)]
    store.pin(parts[1:2])
    parent = base[0]
    assert store.covers(NAMESPACE, parent, session(0, 32)[16:21])
    assert not store.covers(NAMESPACE, parent, session(0, 32)[16:25])
    assert store.remove_covered(NAMESPACE, parent, session(0, 32)[16:]) == 0  # that one is not stored
    full = publish(store, session(0, 32))[1]
    branch = publish(store, as_tokens([*session(0, 20), 7]))[1]
    with store.protect(parts[2:3]):
        assert store.remove_covered(NAMESPACE, parent, session(0, 32)[16:]) == 2
    assert stored(store) == {parent, full, branch, *parts[1:3]}
    assert restore(store, session(0, 32)) == 32


def test_a_clock_that_jumps_does_not_change_the_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root, max_files=2) as store:
        (first,) = publish(store, session(0, 16))
        monkeypatch.setattr("kestrel.store.store.time", lambda: 0.0)  # a board without a battery
        (second,) = publish(store, session(1, 16))
        monkeypatch.undo()
        (third,) = publish(store, session(2, 16))
        assert stored(store) == {second, third}


def test_eviction_takes_time_by_what_leaves_not_by_what_is_stored(root: Path) -> None:
    with open_store(root, max_files=300) as store:
        for number in range(10):
            publish(store, session(number, 480))
        time.sleep(0.5)  # folders that changed this very moment are looked at once more
        store.usage()
        statements: list[str] = []
        catalog = store._current_catalog()
        catalog.reader.set_trace_callback(statements.append)
        publish(store, session(11, 16))
        catalog.reader.set_trace_callback(None)
        assert store.usage().files == 300
        assert len(statements) < 12


def test_pages_with_a_time_to_live_of_their_own_leave_when_it_is_over(root: Path) -> None:
    store = open_store(root)
    sessions = [session(number) for number in range(3)]
    for tokens in sessions:
        publish(store, tokens, 16)
    before = stored(store)
    last = {row.key for row in store.list_pages()[:2]}  # the chain of the last session, 2 pages of 16
    assert store.expire(last, 0.05) == 2
    assert store.expire([b"x" * 16], 1.0) == 0
    assert store.sweep() == []
    time.sleep(0.1)
    assert {eviction.key for eviction in store.sweep()} == last
    assert stored(store) == before - last
    kept = {row.key for row in store.list_pages()[:2]}
    store.expire(kept, 0.01)
    store.expire(kept, None)
    time.sleep(0.05)
    assert store.sweep() == []
    store.close()
