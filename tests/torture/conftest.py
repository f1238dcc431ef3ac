"""How long the torture lasts, a nursery of fast-starting servers, and conversations with known answers.

`KESTREL_TORTURE=long` (`make torture`) makes the tests of this folder do on demand what CI does not wait for.
`KESTREL_TORTURE_SEED=N` draws other moments to kill at, other conversations and other mutations: runs with different
numbers add up.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.torture.servers import ROOT, Nursery
from tests.torture.talks import Turn, make_talks

TINY = ROOT / "tests" / "oracle" / "llama"
LONG = os.environ.get("KESTREL_TORTURE") == "long"
SEED = int(os.environ.get("KESTREL_TORTURE_SEED", "0"))


@pytest.fixture(scope="session")
def scale() -> Callable[[float, float], Any]:
    """scale(short, long): whichever this run is for."""
    return lambda short, long: long if LONG else short


@pytest.fixture(scope="session")
def seed() -> int:
    """What random draws of this run begin with."""
    return SEED


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of all servers: a tiny model, small pages, whatever is stored is read."""
    return (
        f"model.path={TINY}",
        f"model.root={tmp_path_factory.mktemp('models')}",
        "model.name=tiny",
        "engine.kv_ram_bytes=64MiB",
        "engine.kv_touched_bytes=0",
        "cache.page_tokens=128",
        "cache.load=always",
        "cache.min_free_bytes=0",
    )


@pytest.fixture(scope="session")
def talks(words: tuple[str, ...], seed: int) -> list[list[Turn]]:
    """Conversations and the answers of a lone, cold run to each of their turns."""
    return make_talks(words, count=24, num_turns=4, seed=1 + seed)


@pytest.fixture(scope="session")
def nursery(words: tuple[str, ...], talks: list[list[Turn]]) -> Iterator[Nursery]:
    """Where servers come from; the model is converted by then."""
    with Nursery(words) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's servers run: a repository, as far as a server looks; their store is <folder>/artifacts/kv."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("")
    return tmp_path
