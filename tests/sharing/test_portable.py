"""Promise: pages of other numerics are used only where the configuration accepts them, said so, and never mixed in."""

import shutil
from typing import Any

import numpy as np
import pytest

from kestrel.identity import Namespace, page_key, prefix_sha256
from kestrel.runtime import Runtime
from tests.cache.conftest import logits_bits
from tests.sharing.conftest import TEXTS, Board

PROMPT = f"{TEXTS['manual']} Q"


def compute_elsewhere(runtime: Runtime, tokens: list[int]) -> Namespace:
    """Leave only the pages that a board with other kernels would have written for these tokens."""
    runtime.prefill(tokens)
    assert runtime.writer is not None and runtime.store is not None
    runtime.writer.drain()
    identity = {**runtime.identity, "numerics": {"probe": "0" * 32, "exact": True}}
    namespace = Namespace.of(identity)
    parent, layout = namespace.digest, runtime.engine.pool.layout
    for ref in runtime.find([*tokens, 5]).pages:
        with runtime.store.open_page(ref, layout) as page:
            layers = [np.empty(page.layer_nbytes, np.uint8) for _ in range(layout.num_layers)]
            for number, layer in enumerate(layers):
                page.read_layer_into(number, layer)
                layer.view(np.float32)[0] += np.float32(1e-3)
            key = page_key(parent, page.tokens)
            digest = prefix_sha256(np.array(tokens[: ref.first + ref.num_tokens], "<i4"))
            runtime.store.publish(
                namespace, identity, layout, key, parent, ref.first, page.tokens, digest, layers
            )
        parent = key
    shutil.rmtree(runtime.store.root / runtime.namespace.name)
    return namespace


@pytest.fixture
def foreign(board: Board) -> Namespace:
    """A board whose store holds the manual with other numerics only."""
    with board.runtime() as runtime:
        return compute_elsewhere(runtime, runtime.tokenizer.encode(TEXTS["manual"]))


def prefill(runtime: Runtime, text: str) -> Any:
    sequence = runtime.cache.open(runtime.tokenizer.encode(text))
    try:
        sequence.prefill()
    finally:
        sequence.close()
    assert runtime.writer is not None
    runtime.writer.drain()
    return sequence.stats


def own_pages(runtime: Runtime) -> int:
    assert runtime.store is not None
    return len(runtime.store.list_pages(runtime.namespace.digest))


def test_under_same_it_is_a_miss_that_says_why(board: Board, foreign: Namespace) -> None:
    with board.runtime() as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.matched_tokens == 0 and stats.foreign is None
        assert "441 tokens are stored with other numerics: numerics 00000000" in stats.miss_reason
        assert foreign.name in stats.miss_reason and "cache.accept=portable reads them" in stats.miss_reason


def test_under_portable_it_is_used_and_said_and_not_mixed(board: Board, foreign: Namespace) -> None:
    with board.runtime("cache.accept=portable") as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.restored_tokens == 441 and foreign.name in stats.foreign
        assert own_pages(runtime) == 0
        again = prefill(runtime, PROMPT)  # nothing of it was remembered as this CPU's own
        assert again.ram_tokens == 0 and again.restored_tokens == 441 and again.foreign is not None
    with board.runtime() as runtime:
        exact, stats = logits_bits(runtime, runtime.tokenizer.encode(PROMPT))
        assert stats.computed_tokens == stats.prompt_tokens  # type: ignore[attr-defined]
    with board.runtime("cache=off") as runtime:
        cold, _ = logits_bits(runtime, runtime.tokenizer.encode(PROMPT))
    assert exact == cold
    with board.runtime(
        "cache.accept=portable"
    ) as runtime:  # exact pages are preferred where there are as many
        stats = prefill(runtime, PROMPT)
        assert stats.foreign is None and stats.restored_tokens >= 441


def test_a_damaged_foreign_page_leads_back_to_exact_ones(board: Board, foreign: Namespace) -> None:
    for path in board.kv.glob(f"{foreign.name}/*/*.safetensors"):
        with open(path, "r+b") as file:
            file.seek(20_000)
            file.write(b"\xff\x00\xff\x00")
    with board.runtime("cache.accept=portable") as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.foreign is None and stats.computed_tokens == stats.prompt_tokens
        assert own_pages(runtime) == 4


def test_foreign_pages_are_published_and_pulled_under_portable_only(board: Board, foreign: Namespace) -> None:
    with board.runtime() as runtime:
        assert runtime.store is not None
        (end,) = [row.key.hex() for row in runtime.store.list_pages() if not row.num_children]
    board.run("dvc", "remote", "add", "--default", "storage", str(board.root.parent / "remote"))
    board.run("kestrel", "kv", "publish", end, "--as", "manual")
    board.run("kestrel", "kv", "push")
    board.commit("publish")
    other = board.clone("b")
    with other.runtime() as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.pulled_tokens == 0 and "441 tokens are stored with other numerics" in stats.miss_reason
    shutil.rmtree(other.kv / runtime.namespace.name)
    with other.runtime("cache.accept=portable") as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.pulled_tokens == stats.restored_tokens == 441 and foreign.name in stats.foreign
