"""A mixture of experts is the sum of its chosen experts, in an order and with bits that no neighbour can change."""

import numpy as np
import pytest

from kestrel.engine import numerics
from kestrel.engine.layers import ExpertLayer, Graph
from kestrel.models.geometry import Experts
from kestrel.models.weights import Linear
from tests.engine.conftest import EngineOf
from tests.engine.sequences import Run, random_tokens


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_the_end_of_a_layer_is_what_its_definition_says(engine_of: EngineOf) -> None:
    engine = engine_of("qwen3moe", "float32", "float32")
    geometry, weights = engine.geometry, engine.weights.layers[1]
    assert geometry.experts is not None and weights.router is not None
    random = np.random.default_rng(0)
    residual = random.standard_normal((40, geometry.hidden_size)).astype(np.float32)
    attended = random.standard_normal((40, geometry.num_heads * geometry.head_dim)).astype(np.float32)
    wide = residual.astype(np.float64) + attended @ weights.o.values.astype(np.float64)
    x = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + geometry.norm_eps) * weights.post_norm
    scores = x @ weights.router.values
    expected = np.zeros_like(wide)
    for row in range(len(x)):
        shares = np.exp(scores[row]) / np.exp(scores[row]).sum()
        chosen = np.argsort(-shares)[: geometry.experts.num_used]
        for expert in chosen:
            gate, up = np.split(x[row] @ weights.mlps[expert].gate_up.values, 2)
            mixed = (silu(gate) * up) @ weights.mlps[expert].down.values
            expected[row] += shares[expert] / shares[chosen].sum() * mixed

    result = np.full_like(residual, np.nan)
    ExpertLayer(weights, geometry).run(residual, attended, result, 1)
    assert np.abs(residual - wide).max() < 1e-5
    assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("count, used", [(9, 3), (128, 8), (64, 33)])
def test_of_equal_scores_the_expert_of_the_lower_number_is_chosen(
    engine_of: EngineOf, count: int, used: int
) -> None:
    engine_of("qwen3moe", "float32", "float32")  # graphs need the thread pool of an engine
    graph = Graph()
    chosen, shares = graph.choose("scores", Experts(count, used, True))
    session = graph.session({"scores": count}, {chosen: used, shares: used})
    random = np.random.default_rng(0)
    for rows in (1, 2, 7, 300):
        scores = random.integers(0, 3, (rows, count)).astype(np.float32)
        found, weighed = session.run(None, {"scores": scores})
        assert np.array_equal(found, np.argsort(-scores, axis=1, kind="stable")[:, :used])
        best = scores == scores.max(1, keepdims=True)
        for row in range(rows):
            assert len(set(weighed[row, : best[row].sum()].tolist())) == 1


def test_shares_are_those_of_the_softmax_over_all_experts_where_they_are_not_normalised(
    engine_of: EngineOf,
) -> None:
    engine_of("qwen3moe", "float32", "float32")
    graph = Graph()
    chosen, shares = graph.choose("scores", Experts(4, 2, False))
    session = graph.session({"scores": 4}, {chosen: 2, shares: 2})
    scores = np.log(np.array([[1, 4, 2, 3]], np.float32))
    found, weighed = session.run(None, {"scores": scores})
    assert found.tolist() == [[1, 3]]
    assert np.abs(weighed - [[0.4, 0.3]]).max() < 1e-6


@pytest.mark.parametrize("recipe", ["float32", "int8", "int4"])
def test_an_expert_padded_to_more_rows_gives_the_same_bits(engine_of: EngineOf, recipe: str) -> None:
    engine = engine_of("qwen3moe", recipe, "float32")
    tokens = random_tokens(engine, 150)
    plain = Run(engine, tokens).steps([1] * 30).bits()
    before = engine.graphs.least_expert_rows
    engine.graphs.least_expert_rows = 8
    try:
        assert Run(engine, tokens).steps([1] * 30).bits() == plain
    finally:
        engine.graphs.least_expert_rows = before


def test_experts_that_need_company_are_padded_to_it(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("qwen3moe", "int8", "float32")
    run = ExpertLayer.run

    def crooked(
        layer: ExpertLayer, residual: np.ndarray, attended: np.ndarray, mixed: np.ndarray, least: int
    ) -> None:
        """An expert layer whose experts compute otherwise where they are not padded to two rows."""
        run(layer, residual, attended, mixed, least)
        if least < 2:
            mixed += np.float32(1e-3) * len(mixed)

    monkeypatch.setattr(ExpertLayer, "run", crooked)
    before = engine.graphs.least_expert_rows
    try:
        assert numerics.least_rows(engine.graphs)[0] == 2 == engine.graphs.least_expert_rows
    finally:
        engine.graphs.least_expert_rows = before


@pytest.mark.parametrize("part", ["choose", "linear"])
def test_a_router_or_expert_that_rounds_otherwise_is_another_numerics(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = engine_of("qwen3moe", "int8", "float32")
    assert numerics.probe(engine.weights, "float32", 1) == engine.numerics.digest
    one = np.float32(1 + 2**-20)
    if part == "choose":
        choose = Graph.choose

        def nudged(graph: Graph, scores: str, experts: Experts) -> tuple[str, str]:
            chosen, shares = choose(graph, scores, experts)
            factor = graph.weight("factor", np.array([one], np.float32))
            return chosen, graph.node("Mul", [shares, factor], ["shares.nudged"])

        monkeypatch.setattr(Graph, "choose", nudged)
    else:
        linear = Graph.linear

        def nudged_linear(graph: Graph, x: str, weight: Linear, name: str) -> str:
            out = linear(graph, x, weight, name)
            if weight.in_features != engine.geometry.ffn_size:
                return out
            factor = graph.weight("factor", np.array([one], np.float32))
            return graph.node("Mul", [out, factor], ["linear.nudged"])

        monkeypatch.setattr(Graph, "linear", nudged_linear)
    assert numerics.probe(engine.weights, "float32", 1) != engine.numerics.digest
