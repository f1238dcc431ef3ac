"""Promise: kill -9 at any moment leaves only whole artifacts, and what publish returned for is there."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from kestrel.identity import as_tokens
from kestrel.store.catalog import NewPage
from kestrel.store.files import FileTree
from kestrel.store.store import Store
from tests.store.pages import NAMESPACE, all_files, fast_folder, open_store, publish, restore

REPOSITORY = Path(__file__).parents[2]
# Publishes sessions for ever, announcing each; half-way pins, touches, evicts and covers.
WORKER = textwrap.dedent(
    """
    import random, sys
    from pathlib import Path
    from kestrel.identity import as_tokens
    from tests.store.pages import NAMESPACE, open_store, publish

    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    with open_store(root, max_files=60) as store:
        print("open", flush=True)
        number = 100_000 * seed
        while True:
            number += 100
            tokens = as_tokens(range(number, number + rng.randrange(17, 80)))
            keys = publish(store, tokens)
            print(*(key.hex() for key in keys), flush=True)
            if rng.random() < 0.3:
                store.pin(keys[:1]); store.unpin(keys[:1]); store.touch(keys)
            if rng.random() < 0.3:
                store.sweep()
    """
)


def run_and_kill(root: Path, seed: int, seconds: float) -> list[list[str]]:
    """Start a publisher, kill it after a while; returns the keys of what it announced."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), str(seed)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    lines = process.stdout.read().splitlines()
    assert process.wait() == -signal.SIGKILL
    return [line.split() for line in lines if len(line.split()[-1:][0]) == 32]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_killed_in_the_middle_of_publishing(where: str, tmp_path: Path) -> None:
    rng = random.Random(where)
    with fast_folder() as memory:
        root = (tmp_path if where == "disk" else Path(memory)) / "kv"
        announced = 0
        for round_ in range(4):
            sessions = run_and_kill(root, round_ + 1, rng.uniform(0.02, 0.25))
            announced += len(sessions)
            with open_store(root) as store:
                assert [path for path in all_files(root) if path.suffix == ".tmp"] == []
                report = store.verify()
                assert report.damaged == () and report.orphans == 0
                assert store.usage().quarantined == 0 and store.usage().strangers == 0
                rows = {row.key.hex() for row in store.list_pages()}
                assert {path.stem for path in root.rglob("*.safetensors")} == rows
                assert report.files == len(rows) <= 60 + 1
                if sessions:
                    assert set(sessions[-1]) <= rows  # the newest is not what 60 files push out
                    tokens = store.prefix_tokens(bytes.fromhex(sessions[-1][-1]))
                    assert restore(store, tokens) == len(tokens)
        assert announced


def test_leftovers_are_removed_and_nothing_else(root: Path) -> None:
    with open_store(root) as store:
        (key,) = publish(store, as_tokens([1, 2, 3]))
        page = store.page_path(NAMESPACE.digest, key)
    leftovers = [
        page.with_name(".kestrel-" + "0" * 16 + ".tmp"),
        root / NAMESPACE.name / f".kestrel-{'a' * 16}.tmp",
    ]
    others = [
        root / f".kestrel-{'0' * 16}.tmp",
        page.with_name(".kestrel-1.tmp"),
        page.with_name(".kestrel-" + "0" * 16 + ".tmp.bak"),
        page.with_name("x.tmp"),
    ]
    for path in [*leftovers, *others]:
        path.write_bytes(b"half a page")
    os.link(page, page.with_name(".kestrel-" + "1" * 16 + ".tmp"))  # killed between link and unlink
    with open_store(root) as store:
        assert not any(path.exists() for path in leftovers)
        assert all(path.exists() for path in others)
        assert page.stat().st_nlink == 1
        assert store.usage().strangers == len(others)
        assert restore(store, as_tokens([1, 2, 3])) == 3


def test_leftovers_of_a_living_process_are_left_alone(root: Path) -> None:
    with open_store(root) as store, store._lock.held(0):
        temp = root / NAMESPACE.name / f".kestrel-{'0' * 16}.tmp"
        temp.parent.mkdir()
        temp.write_bytes(b"being written")
        with Store(root, store.limits) as other:
            assert temp.exists()
            assert other.usage().bytes >= len(b"being written")
    with open_store(root):
        assert not temp.exists()


def test_order_of_what_reaches_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches the real calls: data before name, name before row, a new folder in its parent before what it holds."""
    events: list[str] = []

    def path_of(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root.parent)

    def watch(name: str, describe: object) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            result = real(*args, **kwargs)
            events.append(f"{name} {describe(*args, **kwargs)}")  # type: ignore[operator]
            return result

        monkeypatch.setattr(os, name, call)

    watch("fsync", lambda fd: path_of(fd))
    watch("mkdir", lambda path, mode=0, dir_fd=None: os.path.join(path_of(dir_fd) if dir_fd else "", path))
    watch("link", lambda source, target, **kwargs: target)
    watch("unlink", lambda path, dir_fd=None: path)
    with open_store(root) as store:
        catalog = store._current_catalog()
        insert = catalog.insert

        def watch_insert(pages: list[NewPage], *rest: Any) -> int:
            events.append("row")
            return insert(pages, *rest)

        monkeypatch.setattr(catalog, "insert", watch_insert)
        events.clear()
        (key,) = publish(store, as_tokens([1, 2, 3]))
    name, folder = f"{key.hex()}.safetensors", f"kv/{NAMESPACE.name}"
    temps = [
        event.removeprefix("unlink ") for event in events if event.endswith(".tmp") and "unlink" in event
    ]
    assert events == [
        f"mkdir {folder}",
        "fsync kv",
        f"fsync {folder}/{temps[0]}",
        "link identity.json",
        f"unlink {temps[0]}",
        f"fsync {folder}",
        f"mkdir {folder}/{name[:2]}",
        f"fsync {folder}",
        f"fsync {folder}/{name[:2]}/{temps[1]}",
        f"link {name}",
        f"unlink {temps[1]}",
        f"fsync {folder}/{name[:2]}",
        "row",
    ]


def test_folder_left_by_a_killed_process_is_made_durable_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its creator may have died between mkdir and fsync."""
    (root / "a" / "b").mkdir(parents=True)
    synced: list[str] = []
    real = os.fsync

    def watch(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", watch)
    tree = FileTree(root)
    with tree.folder(("a", "b"), create=True):
        assert synced == [str(root), str(root / "a")]
    with tree.folder(("a", "b"), create=True):
        assert len(synced) == 2  # once is enough
