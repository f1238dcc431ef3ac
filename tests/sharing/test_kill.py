"""Promise: kill -9 during publish, push or pull leaves nothing half-listed, and running it again completes it.

A program forks a child for every attempt: it opens the board, begins to work, and kills itself just before its n-th
change of a disk, for growing n until it comes to its end. So when it dies depends on no clock, and with a step that
shares no factor with the changes a page takes, it dies before each kind of change; after each kill the board is
looked at, and the work is done again.
"""

import json
from pathlib import Path

import pytest

from tests.sharing.conftest import Board

PAGES = 6
STEPS = {"publish": 5, "push": 2, "pull": 5}
ATTEMPTS = """
import json, os, shutil, signal, sys
from pathlib import Path
import dvc.repo, dvc_data.hashfile.hash_info, dvc_objects.fs.local
from kestrel.sharing import exchange
from kestrel.sharing.ondemand import published_pages
from kestrel.sharing.repository import file_md5
from kestrel.store.store import Limits, Store
from tests.sharing.conftest import Board

CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.chmod", "fcntl.ioctl"}
action, remote, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
board = Board(Path.cwd(), Path())
cache = Path(".dvc/cache")

def is_change(event, words):
    if event == "open":
        return isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    return event in CHANGES

def work(kill_at):
    repository = exchange.open_repository(board.kv)
    repository.remote(None)
    with Store(board.kv, Limits()) as store:
        pages = published_pages(board.kv).pages
        ends = [row.key for row in store.list_pages() if not row.num_children]
        seen = 0
        def watch(event, words):
            nonlocal seen
            if is_change(event, words):
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        if kill_at is not None:
            sys.addaudithook(watch)
        if action == "publish":
            for end in ends:
                exchange.publish(store, repository, store.chain(end), None)
        elif action == "push":
            exchange.push(repository, repository.remote(None), pages)
        else:
            exchange.pull(store, repository, lambda: repository.remote(None), pages)
        kill_at = None

def in_child(kill_at):
    child = os.fork()
    if child == 0:
        try:
            work(kill_at)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def begin_anew():
    if action == "push":
        shutil.rmtree(remote, ignore_errors=True)
    else:
        shutil.rmtree(cache, ignore_errors=True)
    for path in board.kv.glob("**/*"):
        if path.is_file() and (path.suffix == ".dvc") == (action == "publish") and action != "push":
            if action == "pull" or path.suffix == ".dvc":
                path.unlink()

def count_objects(folder):
    objects = [path for path in folder.glob("files/md5/*/*") if len(path.name) == 30]
    for path in objects:
        assert file_md5(path) == path.parent.name + path.name, path
    return len(objects)

def look():
    if action != "pull":
        board.check_marks()
    return {
        "push": lambda: count_objects(remote),
        "publish": lambda: len(board.published()),
        "pull": lambda: (count_objects(cache), board.check_store())[1],
    }[action]()

killed = []
while True:
    begin_anew()
    code = in_child(1 + step * len(killed))
    found = look()
    assert code in (0, -signal.SIGKILL), (code, killed)
    again = in_child(None)
    assert again == 0 and look() == 6, (again, len(killed), look())
    if code == 0:
        break
    killed.append(found)
assert not list(cache.glob("kestrel/*.part")) and not list(board.kv.glob("**/.kestrel-*"))
print(json.dumps(killed))
"""


@pytest.mark.parametrize("action", ["publish", "push", "pull"])
def test_killed_before_every_kind_of_change(action: str, source: Board, tmp_path: Path) -> None:
    board = Board(tmp_path / "b", source.models)
    source.run("git", "clone", "--quiet", str(source.root), str(board.root))
    storage, remote = source.root.parent / "remote", tmp_path / "remote"
    board.run("dvc", "remote", "modify", "storage", "url", str(storage if action == "pull" else remote))
    if action != "pull":
        board.run("dvc", "remote", "add", "origin", str(storage))
        board.run("kestrel", "kv", "pull", "--remote", "origin")
    done = json.loads(board.run("python", "-c", ATTEMPTS, action, str(remote), str(STEPS[action])))
    assert len(set(done) & set(range(1, PAGES))) >= 3  # it died with one page done, with two, …
