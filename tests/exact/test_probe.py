"""The numerics probe runs every operator, bit width and reduction length of the model, and sees one changed bit."""

from typing import Any

import numpy as np
import pytest

from kestrel.engine import layers, numerics
from kestrel.engine.layers import Graph, LayerGraphs
from kestrel.engine.pool import PagePool
from tests.engine.conftest import EngineOf

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
# What IEEE 754 defines to the last bit, or what moves values without computing.
DEFINED = {"Add", "Mul", "Split", "Constant"}


class Nudged:
    """A session one value of whose outputs is the next float32."""

    def __init__(self, session: Any, output: int):
        self._session, self._output = session, output

    def run(self, *arguments: Any) -> list[np.ndarray]:
        outputs = [array.copy() for array in self._session.run(*arguments)]
        flat = outputs[self._output].reshape(-1)
        value = flat[len(flat) // 2]
        flat[len(flat) // 2] = np.nextafter(value, np.float32(9)) if flat.dtype == np.float32 else value ^ 1
        return outputs


@pytest.mark.parametrize("recipe", ["float32", "int8", "int4"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_operator_and_every_length_of_the_model_is_probed(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, architecture: str, recipe: str
) -> None:
    engine = engine_of(architecture, recipe, "float32")
    seen: set[object] = set()
    node, linear = Graph.node, Graph.linear

    def watched_node(self: Graph, op: str, *arguments: Any, **more: Any) -> str:
        if op not in DEFINED | {"MatMul", "MatMulNBits"}:
            seen.add(op)
        return node(self, op, *arguments, **more)

    def watched_linear(self: Graph, x: str, weight: Any, name: str) -> str:
        seen.add((weight.bits, weight.in_features))
        return linear(self, x, weight, name)

    monkeypatch.setattr(Graph, "node", watched_node)
    monkeypatch.setattr(Graph, "linear", watched_linear)
    LayerGraphs(engine.weights, 8, [np.zeros(1, np.int64)] * engine.geometry.num_layers)  # never run
    used = set(seen)
    seen.clear()
    numerics.probe(engine.weights, "float32", 1)
    assert used - seen == set()
    assert any(isinstance(one, tuple) for one in used) and "QuickGelu" in used


@pytest.mark.parametrize(
    "architecture, recipe", [("qwen3", "int8"), ("llama", "int4"), ("qwen3moe", "float32")]
)
def test_one_changed_bit_in_any_output_of_any_operator_changes_the_probe(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, architecture: str, recipe: str
) -> None:
    engine = engine_of(architecture, recipe, "float32")
    session = layers.Graph.session
    outputs: list[int] = []  # how many each session has
    target = (-1, -1)

    def watched(self: Graph, *arguments: Any, **more: Any) -> Any:
        outputs.append(len(arguments[1]))
        built = session(self, *arguments, **more)
        return Nudged(built, target[1]) if len(outputs) - 1 == target[0] else built

    monkeypatch.setattr(Graph, "session", watched)
    assert numerics.probe(engine.weights, "float32", 1) == engine.numerics.digest
    counts = list(outputs)
    assert len(counts) >= 3 and sum(counts) >= 4
    for number, count in enumerate(counts):
        for output in range(count):
            outputs.clear()
            target = (number, output)
            assert numerics.probe(engine.weights, "float32", 1) != engine.numerics.digest, target


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_one_changed_bit_in_a_stored_row_changes_the_probe(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    engine = engine_of("qwen3", "int8", kv_dtype)
    block = PagePool.layer_block

    def nudged(self: PagePool, page: int, layer: int) -> np.ndarray:
        stored = block(self, page, layer)
        stored[37] ^= 1
        return stored

    monkeypatch.setattr(PagePool, "layer_block", nudged)
    assert numerics.probe(engine.weights, kv_dtype, 1) != engine.numerics.digest
