"""Promise: kill -9 during publish, push or pull leaves nothing half-listed, and running it again completes it."""

import random
import shutil
import time
from pathlib import Path

import pytest

from kestrel.sharing.repository import file_md5
from tests.sharing.conftest import Board, kill

ROUNDS = 3
# The slow part of a command is starting it; what is to be interrupted begins after this.
SCRIPT = """
import sys, time
from pathlib import Path
from kestrel.sharing import exchange
from kestrel.sharing.ondemand import published_pages
from kestrel.store.store import Limits, Store
root = Path("artifacts/kv")
repository = exchange.open_repository(root)
repository.remote(None)
import dvc_data.hashfile.hash_info, dvc_objects.fs.local
with Store(root, Limits()) as store:
    pages = published_pages(root).pages
    print("ready", flush=True)
    if sys.argv[1] == "publish":
        rows = [row for row in store.list_pages() if not row.num_children]
        for row in rows:
            exchange.publish(store, repository, store.chain(row.key), None)
    elif sys.argv[1] == "push":
        exchange.push(repository, repository.remote(None), pages)
    else:
        exchange.pull(store, repository, lambda: repository.remote(None), pages)
    print("done", flush=True)
"""


def interrupt(board: Board, action: str, seconds: float) -> None:
    """Run an action and kill it so long after it began to work."""
    process = board.start("python", "-c", SCRIPT, action)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    kill(process)


def check_objects(folder: Path) -> int:
    """Every object below a cache or remote is whole; returns how many there are."""
    found = [path for path in folder.glob("files/md5/*/*") if len(path.name) == 30]
    for path in found:
        assert file_md5(path) == path.parent.name + path.name
    return len(found)


@pytest.mark.parametrize("action", ["publish", "push", "pull"])
def test_killed_at_any_moment(action: str, source: Board, tmp_path: Path) -> None:
    rng = random.Random(action)
    board = Board(tmp_path / "b", source.models)
    source.run("git", "clone", "--quiet", str(source.root), str(board.root))
    board.run("dvc", "remote", "modify", "storage", "url", str(tmp_path / "remote"))
    storage = source.root.parent / "remote"
    if action == "pull":
        board.run("dvc", "remote", "modify", "storage", "url", str(storage))
    else:
        board.run("dvc", "remote", "add", "origin", str(storage))
        board.run("kestrel", "kv", "pull", "--remote", "origin")
    if action == "publish":
        board.run("kestrel", "kv", "rm", "manual", "tools")
        for path in (board.root / ".dvc" / "cache").glob("files/md5/*/*"):
            path.unlink()
    for _ in range(ROUNDS):
        if action == "push":  # else the first round may leave nothing to do
            shutil.rmtree(tmp_path / "remote", ignore_errors=True)
        interrupt(board, action, rng.uniform(0.0, 0.01 if action == "push" else 0.03))
        if action != "pull":
            board.check_marks()
        check_objects(board.root / ".dvc" / "cache")
        check_objects(tmp_path / "remote")
        assert board.check_store() <= 6
    assert board.run("python", "-c", SCRIPT, action).endswith("done\n")
    if action == "publish":
        board.check_marks()
        assert len(board.published()) == 6
    if action == "push":
        assert check_objects(tmp_path / "remote") == 6
    assert board.check_store() == 6
    assert not list((board.root / ".dvc" / "tmp").glob("kestrel/*.part"))
    assert not list(board.kv.glob("**/.kestrel-*"))
