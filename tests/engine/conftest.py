"""Engines on the tiny checkpoints, one for each architecture, weight recipe and KV dtype."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kestrel.engine.engine import Engine
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.weights import load_weights

TINY = Path(__file__).parent.parent / "oracle"

EngineOf = Callable[..., Engine]


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    """engine_of(architecture, recipe, kv_dtype, page_tokens) -> Engine; each is built once."""
    converted = tmp_path_factory.mktemp("converted")

    @cache
    def build(architecture: str, recipe: str, kv_dtype: str, page_tokens: int = 128) -> Engine:
        weights = load_weights(open_checkpoint(TINY / architecture), recipe, converted)
        return Engine(
            weights,
            kv_dtype=kv_dtype,
            page_tokens=page_tokens,
            chunk_tokens=192,
            kv_ram_bytes=64 << 20,
            context_tokens=1024,
        )

    return build
