"""Promise: whatever happens to the disk, the store or the clock, requests go on with the right bits; the log says
once what is lost, and when the fault ends the store is used again without anybody doing anything."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kestrel.store.store import Limits, Store
from tests.store.pages import all_bytes
from tests.torture.servers import ROOT, Nursery, Server
from tests.torture.talks import Refused, Turn, ask

STORE = Path("artifacts") / "kv"
Talk = list[Turn]


def converse(server: Server, *talks: Talk) -> int:
    """Hold whole conversations and check every answer; returns the tokens that were read from the disk."""
    restored = 0
    with httpx.Client(timeout=60) as client:
        for number, turn in enumerate(turn for talk in talks for turn in talk):
            stats = ask(client, server.url, turn, stream=bool(number % 2))
            assert stats is not None, f"the server is gone:\n{server.log}"
            restored += stats.get("restored_tokens", 0)
    return restored


def settle(server: Server) -> None:
    """Wait until nothing is waiting to be saved."""
    until = time.monotonic() + 60
    while server.number_of("saves_pending"):
        assert time.monotonic() < until
        time.sleep(0.02)


def complaints(server: Server) -> list[str]:
    """Log lines that say what is lost."""
    return re.findall(r"\[KV-DISK\] not s(?:aved|earched).*", server.log)


def check_recovered(server: Server, nursery: Nursery, folder: Path, talk: Talk) -> None:
    """A conversation that begins after the fault is saved, and a new server reads it."""
    converse(server, talk)
    settle(server)
    check_ends_well(server)
    again = nursery.start(folder)
    assert converse(again, talk[-1:]) > 0, f"{server.log}\n{again.log}"
    check_ends_well(again)
    with Store(folder / STORE, Limits()) as store:
        report = store.verify()
        assert report.files > 0 and report.damaged == () and report.orphans == 0


def check_ends_well(server: Server) -> None:
    """SIGTERM is followed within seconds, and nothing unexpected was logged."""
    server.send(signal.SIGTERM)
    assert server.exit_code(30) == 0, server.log
    assert "Traceback" not in server.log and "the engine failed" not in server.log, server.log


@contextmanager
def small_disk(at: Path, nbytes: int) -> Iterator[Path]:
    """A real file system of this size, mounted there."""
    at.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_disk_full(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    with small_disk(folder / STORE, 4 << 20) as disk:
        server = nursery.start(folder)
        converse(server, talks[0])
        settle(server)
        with open(disk / "ballast", "wb") as ballast:
            try:
                while True:
                    os.write(ballast.fileno(), bytes(4096))
            except OSError:
                pass  # not one block is left
        for talk in talks[1:4]:
            converse(server, talk)
        settle(server)
        assert len(complaints(server)) == 1, server.log
        assert server.log.count("uses are not recorded") <= 1
        dropped = server.number_of("saves_dropped_total")
        assert dropped > 0
        (disk / "ballast").unlink()
        check_recovered(server, nursery, folder, talks[4])
        assert re.search(r"the store works again: saving; \d+ page\(s\) were not saved meanwhile", server.log)


def test_small_disk_keeps_the_newest(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    """A file system smaller than cache.max_bytes: the oldest pages leave, nothing is lost or said."""
    with small_disk(folder / STORE, 2 << 20):
        server = nursery.start(folder)
        converse(server, *talks[:6])
        settle(server)
        assert complaints(server) == []
        check_recovered(server, nursery, folder, talks[6])


def test_read_only_disk(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    with small_disk(folder / STORE, 16 << 20) as disk:
        first = nursery.start(folder)
        converse(first, talks[0])
        settle(first)
        check_ends_well(first)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        server = nursery.start(folder)
        converse(server, talks[1], talks[2], talks[0])
        settle(server)
        assert len(complaints(server)) <= 2, server.log
        assert server.number_of("saves_dropped_total") > 0
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        check_recovered(server, nursery, folder, talks[4])


@pytest.mark.parametrize("what", ["root", "catalog", "namespace"])
def test_deleted_while_running(what: str, nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    server = nursery.start(folder)
    converse(server, talks[0])
    settle(server)
    root = folder / STORE
    for path in {
        "root": [root],
        "catalog": list(root.glob("catalog.sqlite3*")),
        "namespace": [path for path in root.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)],
    }[what]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    converse(server, talks[1], talks[0])
    settle(server)
    assert len(complaints(server)) <= 1
    check_recovered(server, nursery, folder, talks[2])


@pytest.mark.parametrize("how", ["noise", "empty", "cut", "another database", "folder"])
def test_catalog_corrupted_while_running(how: str, nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    server = nursery.start(folder)
    converse(server, talks[0])
    settle(server)
    catalog = folder / STORE / "catalog.sqlite3"
    content = catalog.read_bytes()
    if how == "folder":
        catalog.unlink()
        catalog.mkdir()
        (catalog / "precious").write_text("not the store's")
    elif how == "another database":
        import sqlite3

        catalog.unlink()
        with sqlite3.connect(catalog) as other:
            other.execute("CREATE TABLE pages (x)")
    else:
        with open(catalog, "r+b") as file:  # the same file, so that the open connections see it
            spoilt = {"noise": os.urandom(len(content)), "empty": b"", "cut": content[: len(content) // 2]}[
                how
            ]
            file.write(spoilt)
            file.truncate(len(spoilt))
    converse(server, talks[1], talks[0])
    settle(server)
    assert len(complaints(server)) <= 1, server.log
    check_recovered(server, nursery, folder, talks[2])
    if how == "folder":
        assert [path.read_text() for path in folder.rglob("precious")] == ["not the store's"]


@pytest.mark.parametrize("what", ["root", "namespaces", "files"])
def test_permission_lost(what: str, nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    server = nursery.start(folder)
    converse(server, talks[0])
    settle(server)
    root = folder / STORE
    paths = {
        "root": [root],
        "namespaces": [path for path in root.iterdir() if path.is_dir()],
        "files": [path for path in root.rglob("*.safetensors")],
    }[what]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0)
    late = nursery.start(folder)  # empty memory: it has to read
    try:
        for one in (server, late):
            converse(one, talks[1], talks[0])
            settle(one)
            assert len(complaints(one)) <= 2, one.log  # not searched, and not saved: once each
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    check_ends_well(late)
    check_recovered(server, nursery, folder, talks[2])


SLOW = """
import os, time
def slowly(call, seconds):
    def run(*arguments, **named):
        time.sleep(seconds)
        return call(*arguments, **named)
    return run
os.fsync, os.preadv = slowly(os.fsync, 0.4), slowly(os.preadv, 0.2)
"""


def test_slow_disk(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    """Answers do not wait for saves; what the queue cannot hold is not saved."""
    server = nursery.start(folder, "cache.save_queue_pages=4", spell=SLOW)
    started = time.monotonic()
    converse(server, *talks[:6])
    answering = time.monotonic() - started
    assert server.number_of("saves_dropped_total") > 0
    assert server.number_of("saves_pending") > 0, "the disk was not slow enough to show anything"
    settle(server)
    assert "the disk is too slow" in server.log
    print(
        f"\nslow disk: {answering:.1f} s for the answers, then {time.monotonic() - started - answering:.1f} s of saving"
    )
    check_ends_well(server)
    late = nursery.start(folder, spell=SLOW)
    assert converse(late, talks[0]) > 0
    check_ends_well(late)


JUMP = """
import sys, time
true = time.time
def jumping():
    try:
        return true() + float(open("jump").read())
    except FileNotFoundError:
        return true()
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("kestrel") and getattr(module, "time", None) is true:
        module.time = jumping
time.time = jumping
"""


@pytest.mark.parametrize("years", [-30, 30])
def test_clock_jump(years: int, nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    day = 86400.0
    server = nursery.start(folder, f"cache.ttl_seconds={day}", "cache.max_files=40", spell=JUMP)
    converse(server, talks[0])
    settle(server)
    (folder / "jump").write_text(str(years * 365 * day))
    converse(server, *talks[1:8])
    settle(server)
    (folder / "jump").unlink()  # and back
    converse(server, *talks[8:10])
    settle(server)
    assert complaints(server) == []
    check_recovered(server, nursery, folder, talks[10])


def test_two_servers_on_one_store(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    limits = ("cache.max_files=30",)
    servers = [nursery.start(folder, *limits) for _ in range(2)]
    failures: list[BaseException] = []

    def talk(server: Server, order: list[Talk]) -> None:
        try:
            converse(server, *order)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=talk, args=(server, talks[start::step]))
        for server in servers
        for start, step in ((0, 2), (1, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for server in servers:
        settle(server)
        assert complaints(server) == []
    check_ends_well(servers[0])
    with Store(folder / STORE, Limits()) as store:
        assert 0 < store.usage().files <= 30
        assert store.stats()["quarantined_files"] == 0
    check_recovered(servers[1], nursery, folder, talks[-1])


def test_serving_collecting_and_publishing_at_once(
    nursery: Nursery, folder: Path, talks: list[Talk], words: tuple[str, ...]
) -> None:
    """What is published stays whole, whatever is evicted around it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GIT_CONFIG_GLOBAL": os.devnull}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def run(*command: str) -> str:
        if command[0] == "kestrel":
            command = (sys.executable, "-m", "kestrel", *command[1:], *words)
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    shutil.rmtree(folder / ".dvc")
    run("git", "init", "--quiet")
    run("dvc", "init", "--quiet")
    server = nursery.start(folder, "cache.max_files=24")
    converse(server, talks[0])
    settle(server)
    over, failures, rounds = threading.Event(), [], [0]

    def go_on() -> None:
        try:
            while not over.is_set():
                converse(server, *talks[1:9])
                rounds[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        collecting = threading.Thread(target=lambda: run("kestrel", "kv", "gc", "cache.max_files=12"))
        collecting.start()
        text = "Never say anything about the weather. " * 12
        named = f"prefixes.rules.text={text}"
        run("kestrel", "kv", "publish", "rules", named)
        collecting.join()
        run("kestrel", "kv", "gc", "cache.max_files=1")
        run("kestrel", "kv", "publish", "rules", named)
    finally:
        over.set()
        thread.join()
    assert not failures, failures
    settle(server)
    marks = list((folder / STORE).rglob("*.safetensors.dvc"))
    assert marks
    for mark in marks:
        assert mark.with_suffix("").is_file()  # beside it the artifact, which no limit pushes out
    check_recovered(server, nursery, folder, talks[9])
    print(
        f"\n{rounds[0]} rounds of {len(talks[1:9])} conversations beside gc and publish, {len(marks)} marks"
    )


def test_sigterm_under_load(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    """Whatever runs is finished, whatever waits or comes is refused, everything computed is saved."""
    server = nursery.start(folder, "server.max_running=4")
    refused, answered, failures = [0], [0], []

    def talk(order: list[Talk]) -> None:
        try:
            with httpx.Client(timeout=60) as client:
                for turn in (turn for conversation in order for turn in conversation):
                    try:
                        stats = ask(client, server.url, turn, stream=True)
                    except Refused as error:
                        assert error.status == 503, error
                        refused[0] += 1
                        return
                    if stats is None:
                        return  # nobody listens any more
                    answered[0] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(talks[n:] + talks[:n],)) for n in range(16)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while answered[0] < 8 and time.monotonic() < until:
        time.sleep(0.01)
    server.send(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.exit_code(30) == 0, server.log
    assert not failures, failures
    assert answered[0] > 0 and "kestrel: stopped" in server.log and "Traceback" not in server.log
    with Store(folder / STORE, Limits()) as store:
        report = store.verify()
        assert report.files > 0 and report.damaged == () and report.orphans == 0
    print(f"\nSIGTERM: {answered[0]} answers, {refused[0]} clients refused with 503")


def test_memory_for_kv_is_bounded(nursery: Nursery, folder: Path, talks: list[Talk]) -> None:
    """A pool that holds three answers: more wait or are refused, none fails half-way, memory stays as it is."""
    page_nbytes = 2 * 2 * 2 * 128 * 16 * 4  # layers x (K, V) x heads x tokens x head_dim x float32
    pool = 12 * page_nbytes
    server = nursery.start(
        folder, f"engine.kv_ram_bytes={pool}", "server.max_running=16", "server.max_queue=4"
    )
    converse(server, talks[0])
    before = server.rss_bytes()
    outcomes: list[str] = []
    failures: list[BaseException] = []

    def talk(order: list[Talk]) -> None:
        with httpx.Client(timeout=60) as client:
            for turn in (turn for conversation in order for turn in conversation):
                try:
                    assert ask(client, server.url, turn, stream=True) is not None
                    outcomes.append("answered")
                except Refused as error:
                    outcomes.append(str(error.status))
                    time.sleep(0.05)
                except BaseException as error:
                    failures.append(error)
                    return

    threads = [threading.Thread(target=talk, args=(talks[n : n + 2],)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    grown = (server.rss_bytes() - before) / 1e6
    counts = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    print(f"\nKV pool of {pool / 1e6:.1f} MB: {counts}, memory +{grown:.1f} MB")
    assert counts["answered"] > 0 and set(counts) <= {"answered", "429"}
    assert grown < 60
    settle(server)
    assert all_bytes(folder / STORE) > 0
    with httpx.Client(timeout=60) as client:  # more than the pool can ever hold is refused at once
        reply = client.post(f"{server.url}/v1/completions", json={"prompt": [9] * 500, "max_tokens": 8})
        assert reply.status_code in (200, 413)
    check_ends_well(server)


def test_files_planted_in_the_store_do_not_hold_up_anybody(
    nursery: Nursery, folder: Path, talks: list[Talk]
) -> None:
    """FIFOs, which a reader waits for, and links that lead out of the store, wherever the server might look."""
    first = nursery.start(folder)
    converse(first, talks[0])
    settle(first)
    check_ends_well(first)
    root = folder / STORE
    pages = list(root.rglob("*.safetensors"))
    namespace = pages[0].parent.parent
    secret = folder / "secret"
    secret.write_text("not for anybody's eyes")
    for path in (
        root / ("0" * 16) / "identity.json",
        root / ("1" * 16) / "ab" / f"ab{'0' * 30}.safetensors",
        pages[0].with_name(pages[0].name + ".dvc"),
        root / "quarantine" / "pipe",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    (namespace / "identity.json").unlink()
    (namespace / "identity.json").symlink_to(secret)
    pages[-1].unlink()
    pages[-1].symlink_to(secret)
    (root / ("2" * 16)).symlink_to(folder)
    server = nursery.start(folder)
    converse(server, talks[0], talks[1], talks[-1])
    check_recovered(server, nursery, folder, talks[2])
    assert secret.read_text() == "not for anybody's eyes"
