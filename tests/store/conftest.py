"""A store in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.store.store import Store
from tests.store.pages import fast_folder, open_store


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the store is; it does not exist yet."""
    with fast_folder() as folder:
        yield Path(folder) / "kv"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """An open store without limits."""
    with open_store(root) as opened:
        yield opened
