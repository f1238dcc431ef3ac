"""Promise: SIGKILL at any moment costs the answers under way and nothing else, however often it comes."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from kestrel.store.catalog import CATALOG_NAME
from kestrel.store.store import Limits, Store
from tests.store.pages import all_files, fast_folder
from tests.torture.servers import Nursery, Server
from tests.torture.talks import Turn, ask

NUM_CLIENTS = 5  # of each arena
MAX_FILES = 48  # few enough that pages are evicted all the time
STORE = Path("artifacts") / "kv"


@dataclass
class Tally:
    """What happened in an arena."""

    rounds: int = 0
    killed_starting: int = 0
    answers: int = 0
    interrupted: int = 0
    restored_tokens: int = 0
    pages_read: int = 0


class Arena:
    """One store, clients that go on talking whatever happens to their server, and its killer."""

    def __init__(self, nursery: Nursery, folder: Path, talks: list[list[Turn]], seed: int) -> None:
        self.folder, self.tally = folder, Tally()
        self._nursery, self._talks, self._rng = nursery, talks, random.Random(seed)
        self._server: Server | None = None
        self._over = False
        self._has_listened = False  # any server so far: then there is a catalog
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, num_rounds: int) -> None:
        """Start and kill a server so many times, check the store after each, and every answer."""
        clients = [
            threading.Thread(target=self._talk, args=(self._rng.random(),)) for _ in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            for number in range(num_rounds):
                self._live_and_die()
                self._check_store(thorough=number % 10 == 9 or number == num_rounds - 1)
                self.tally.rounds += 1
                with self._changed:
                    if self._failure is not None:
                        break
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for client in clients:
                client.join()
        if self._failure is not None:
            raise self._failure

    def _live_and_die(self) -> None:
        limits = f"cache.max_files={MAX_FILES}", "cache.save_queue_pages=64"
        server = self._nursery.start(self.folder, *limits, wait=False)
        try:
            if self._rng.random() < 0.1:  # while it starts: the store is being opened and reconciled
                time.sleep(self._rng.uniform(0.0, 0.5))
                self.tally.killed_starting += 1
            else:
                server.wait_for("kestrel: listening on")
                self._has_listened = True
                with self._changed:
                    self._server = server
                    self._changed.notify_all()
                time.sleep(self._rng.uniform(0.02, 0.7))
        finally:
            with self._changed:
                self._server = None
            server.kill()
        assert "Traceback" not in server.log, server.log

    def _check_store(self, thorough: bool) -> None:
        """The store opens, holds nothing but whole artifacts, and nothing was put aside."""
        root = self.folder / STORE
        is_new = not (root / CATALOG_NAME).exists()
        assert not (is_new and self._has_listened)
        with Store(root, Limits()) as store:
            assert [path for path in all_files(root) if path.suffix == ".tmp"] == []
            usage = store.usage()
            assert usage.files <= MAX_FILES and usage.quarantined == 0 and usage.strangers == 0
            if thorough:
                report = store.verify()
                assert report.damaged == () and report.orphans == 0
                self.tally.pages_read += report.files
            assert store.stats()["quarantined_files"] == 0 and store.stats()["made_catalogs"] == is_new

    def _talk(self, seed: float) -> None:
        rng = random.Random(seed)
        try:
            with httpx.Client(timeout=60) as client:
                while self._hold(client, rng.choice(self._talks), rng):
                    pass
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error

    def _hold(self, client: httpx.Client, talk: list[Turn], rng: random.Random) -> bool:
        """One conversation to its end; each turn is sent again until it is answered. False if all is over."""
        for turn in talk:
            dead: Server | None = None
            while True:
                server = self._next_server(dead)
                if server is None:
                    return False
                stats = ask(client, server.url, turn, stream=rng.random() < 0.5)
                with self._changed:
                    if stats is not None:
                        self.tally.answers += 1
                        self.tally.restored_tokens += stats.get("restored_tokens", 0)
                        break
                    self.tally.interrupted += 1
                dead = server
        return True

    def _next_server(self, dead: Server | None) -> Server | None:
        """The server that listens, once that is another than the one that just broke off; None if all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._server not in (None, dead))
            return None if self._over else self._server


def test_killed_servers_lose_the_answers_under_way_and_nothing_else(
    nursery: Nursery, tmp_path: Path, talks: list[list[Turn]], scale: Callable[[int, int], int], seed: int
) -> None:
    num_rounds = scale(200, 1000)
    started = time.monotonic()
    with fast_folder() as memory, ThreadPoolExecutor() as pool:
        # One store on a disk, one in memory, where the moments of the kills fall differently.
        folders = (tmp_path, Path(memory))
        arenas = [Arena(nursery, folder, talks, 2 * seed + n) for n, folder in enumerate(folders)]
        for done in [pool.submit(arena.run, num_rounds // len(arenas)) for arena in arenas]:
            done.result()
        for arena in arenas:
            print(f"\n{arena.folder}: {arena.tally}")
            assert arena.tally.answers > 0 and arena.tally.interrupted > 0
            assert arena.tally.restored_tokens > 0 and arena.tally.pages_read > 0
        print(f"{num_rounds} rounds in {time.monotonic() - started:.0f} s")
        shutil.rmtree(tmp_path / "artifacts")
