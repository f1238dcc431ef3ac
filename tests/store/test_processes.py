"""Promise: threads and processes may share a root: no page is lost, torn or written over, limits hold for all."""

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import as_tokens
from kestrel.store.store import Store
from tests.store.pages import (
    LAYOUT,
    NAMESPACE,
    all_bytes,
    all_files,
    check_bits,
    open_store,
    payload_of,
    publish,
    restore,
)

REPOSITORY = Path(__file__).parents[2]
PUBLISHER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from kestrel.identity import as_tokens
    from tests.store.pages import open_store, publish, restore

    root, own = Path(sys.argv[1]), int(sys.argv[2])
    with open_store(root) as store:
        print("open", flush=True)
        sys.stdin.readline()
        for number in range(12):
            for start in (1000 * number, 1_000_000 * own + 1000 * number):
                tokens = as_tokens(range(start, start + 40))
                publish(store, tokens)
                assert restore(store, tokens) == 40
        stats = store.stats()
        print(stats["published_pages"], stats["quarantined_files"], stats["made_catalogs"], flush=True)
    """
)
LIMITED = textwrap.dedent(
    """
    import random, sys
    from pathlib import Path
    from kestrel.errors import StoreError
    from kestrel.identity import as_tokens
    from tests.store.pages import all_bytes, open_store, publish

    root, own, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with open_store(root, max_bytes=limit) as store:
        print("open", flush=True)
        sys.stdin.readline()
        worst = 0
        for number in range(40):
            start = 1_000_000 * own + 1000 * number
            publish(store, as_tokens(range(start, start + 200)), 200)
            with store._lock.held(10):
                worst = max(worst, all_bytes(root))
        print(worst, store.stats()["evicted_pages"], flush=True)
    """
)


def run_together(script: str, root: Path, *arguments: object) -> list[list[int]]:
    """Run two processes of a script at once; returns the numbers each prints at its end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root), str(own), *map(str, arguments)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for own in (1, 2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
    results = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0
        results.append([int(number) for number in output.split()])
    return results


def test_two_processes_publish_the_same_and_different_pages(root: Path) -> None:
    (first, *quiet), (second, *quiet_too) = run_together(PUBLISHER, root)
    assert sum(quiet) + sum(quiet_too) <= 1  # one of them made the catalog
    pages_of_a_session, common, own = 3, 12, 12
    assert first + second == pages_of_a_session * (common + 2 * own)  # each page was written exactly once
    with open_store(root) as store:
        assert store.usage().files == first + second
        report = store.verify()
        assert (report.damaged, report.orphans, report.files) == ((), 0, first + second)
        assert [path for path in all_files(root) if path.suffix == ".tmp"] == []


def test_two_processes_stay_within_one_limit(root: Path) -> None:
    limit = 900_000
    (worst, evicted), (worst_too, evicted_too) = run_together(LIMITED, root, limit)
    assert max(worst, worst_too) <= limit
    assert evicted + evicted_too > 0
    with open_store(root) as store:
        assert store.verify().damaged == ()


def test_an_open_page_outlives_its_eviction(root: Path) -> None:
    tokens = as_tokens(range(16))
    with open_store(root) as reader, open_store(root, max_files=0) as collector:
        publish(reader, tokens)
        (ref,) = reader.find_prefix(NAMESPACE, tokens, 16, 1).pages
        with reader.open_page(ref, LAYOUT) as page:
            assert len(collector.sweep()) == 1
            assert not ref.path.exists()
            buffer = np.empty(page.layer_nbytes, np.uint8)
            for layer, expected in enumerate(payload_of(ref.key, 16)):
                page.read_layer_into(layer, buffer)
                assert buffer.tobytes() == expected
        with pytest.raises(ArtifactError, match="cannot open"):
            reader.open_page(ref, LAYOUT)
        reader.quarantine(ref.path, "it is gone")
        assert reader.usage().quarantined == 0 and restore(reader, tokens) == 0


def test_threads_publish_find_and_evict_at_once(root: Path) -> None:
    stop = threading.Event()
    with open_store(root, max_files=40) as store, open_store(root, max_files=40) as other:

        def publish_some(which: Store, seed: int) -> int:
            for number in range(25):
                publish(
                    which, as_tokens(range(1000 * (number % 15) + seed, 1000 * (number % 15) + seed + 40))
                )
            return 0

        def read_all(which: Store) -> int:
            done = 0
            while not stop.is_set():
                for number in range(15):
                    tokens = as_tokens(range(1000 * number, 1000 * number + 40))
                    match = which.find_prefix(NAMESPACE, tokens, 16, 1)
                    try:
                        for ref in match.pages:
                            check_bits(which, ref)
                            done += 1
                    except ArtifactError as error:
                        assert "No such file" in str(error)  # evicted meanwhile; never damaged
                    which.touch([ref.key for ref in match.pages])
                    which.usage()
            return done

        with ThreadPoolExecutor(5) as pool:
            readers = [pool.submit(read_all, which) for which in (store, other)]
            writers = [
                pool.submit(publish_some, which, seed) for which, seed in ((store, 0), (other, 0), (store, 7))
            ]
            for writer in writers:
                writer.result()
            stop.set()
            assert sum(reader.result() for reader in readers) > 0
        assert store.usage().files <= 40 and store.usage().quarantined == 0
        assert store.verify().damaged == ()


def test_a_stuck_process_delays_saving_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.store.store.WRITE_SECONDS", 0.2)
    monkeypatch.setattr("kestrel.store.store.OPEN_SECONDS", 0.2)
    tokens = as_tokens(range(40))
    with open_store(root) as store:
        publish(store, tokens)
        with store._lock.held(0):  # as a process would that was stopped while it was writing
            with open_store(root) as other:
                assert restore(other, tokens) == 40
                assert other.usage().files == 3
                other.touch([other.list_pages()[0].key])
                with pytest.raises(StoreError, match="held by another process"):
                    publish(other, as_tokens([1]))
        with open_store(root) as other:
            publish(other, as_tokens([1]))
        assert all_bytes(root) == store.usage().bytes


def test_lock_is_not_held_through_a_deleted_file(root: Path) -> None:
    with open_store(root) as store, open_store(root) as other, store._lock.held(0):
        (root / "lock").unlink()
        with other._lock.held(0) as holding:
            assert holding.name == "ALL"  # the new file's; the deleted one's protects nothing any more
    (root / "lock").unlink()
    (root / "lock").mkdir()
    with pytest.raises(StoreError):
        open_store(root)
