"""Promise: no more is written in an hour than allowed, by all processes together, and the next hour begins anew."""

from pathlib import Path

import pytest

from kestrel.errors import StoreError
from kestrel.identity import as_tokens
from tests.store.pages import open_store, publish, restore

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The store's clock; set clock[0]."""
    now = [1000 * HOUR + 600.0]
    monkeypatch.setattr("kestrel.store.store.time", lambda: now[0])
    return now


def sessions(count: int, start: int = 0) -> list[list[int]]:
    return [list(range(1000 * n, 1000 * n + 16)) for n in range(start, start + count)]


def page_nbytes(root: Path) -> int:
    with open_store(root.parent / "probe") as store:
        publish(store, as_tokens(range(16)))
        return store.list_pages()[0].nbytes


def test_pages_beyond_the_budget_are_refused_and_counted(root: Path, clock: list[float]) -> None:
    limit = 3 * page_nbytes(root) + 100
    with open_store(root, write_bytes_per_hour=limit) as store:
        for tokens in sessions(3):
            publish(store, as_tokens(tokens))
        with pytest.raises(StoreError, match=r"write_bytes_per_hour=.*next hour begins in 50 min"):
            publish(store, as_tokens(sessions(1, 7)[0]))
        # Not even what would still fit: its turn comes when everything's does.
        with pytest.raises(StoreError, match="write_bytes_per_hour"):
            publish(store, as_tokens([1]), 1)
        publish(store, as_tokens(sessions(1)[0]))  # is there already: costs nothing
        assert store.stats()["refused_pages"] == 2 and store.stats()["published_pages"] == 3
        clock[0] += HOUR
        publish(store, as_tokens(sessions(1, 7)[0]))
        assert restore(store, as_tokens(sessions(1, 7)[0])) == 16


def test_the_budget_is_common_to_processes_and_outlasts_a_restart(root: Path, clock: list[float]) -> None:
    limit = 3 * page_nbytes(root) + 100
    for tokens in sessions(3):
        with open_store(root, write_bytes_per_hour=limit) as store:
            publish(store, as_tokens(tokens))
    with open_store(root, write_bytes_per_hour=limit) as store, open_store(root) as unlimited:
        with pytest.raises(StoreError, match="write_bytes_per_hour"):
            publish(store, as_tokens(sessions(1, 7)[0]))
        publish(unlimited, as_tokens(sessions(1, 8)[0]))


def test_what_is_evicted_was_written_all_the_same(root: Path, clock: list[float]) -> None:
    limit = 5 * page_nbytes(root) + 100
    with open_store(root, write_bytes_per_hour=limit, max_files=2) as store:
        for tokens in sessions(5):
            publish(store, as_tokens(tokens))
        with pytest.raises(StoreError, match="write_bytes_per_hour"):
            publish(store, as_tokens(sessions(1, 7)[0]))
        assert store.usage().files == 2  # nothing was evicted in vain


@pytest.mark.parametrize("jump", [-50 * HOUR, -1 * HOUR, 24 * 365 * HOUR])
def test_a_clock_that_jumps_costs_no_more_than_an_hour(root: Path, clock: list[float], jump: float) -> None:
    limit = 2 * page_nbytes(root) + 100
    with open_store(root, write_bytes_per_hour=limit) as store:
        for tokens in sessions(2):
            publish(store, as_tokens(tokens))
        clock[0] += jump
        for tokens in sessions(2, 10):
            publish(store, as_tokens(tokens))
        with pytest.raises(StoreError, match="write_bytes_per_hour"):
            publish(store, as_tokens(sessions(1, 20)[0]))


def test_adopted_pages_are_not_written_by_us(root: Path, clock: list[float]) -> None:
    with open_store(root) as store:
        for tokens in sessions(3):
            publish(store, as_tokens(tokens))
    for path in root.glob("catalog.sqlite3*"):
        path.unlink()
    with open_store(root, write_bytes_per_hour=page_nbytes(root) + 100) as store:
        assert store.usage().files == 3
        publish(store, as_tokens(sessions(1, 7)[0]))
