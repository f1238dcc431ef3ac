"""The numerics probe is stable where kernels are, and changes with anything that changes a result."""

import dataclasses

import numpy as np
import pytest

from kestrel.engine import numerics
from tests.engine.conftest import EngineOf


def test_the_probe_gives_the_same_digest_again(engine_of: EngineOf) -> None:
    engine = engine_of("qwen3", "int8", "float32")
    assert numerics.probe(engine.weights, "float32", 1) == engine.numerics.digest


def test_other_kernels_give_other_digests(engine_of: EngineOf) -> None:
    digests = {
        engine_of(*choice).numerics.digest
        for choice in [
            ("qwen3", "int8", "float32"),
            ("qwen3", "int4", "float32"),
            ("qwen3", "float32", "float32"),
            ("qwen3", "int8", "int8"),
            ("llama", "int8", "float32"),
        ]
    }
    assert len(digests) == 5


def test_a_rotary_table_that_rounds_one_value_differently_is_another_numerics(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("qwen3", "int8", "float32")
    table = numerics.rope_table

    def nudged(*args: object) -> tuple[np.ndarray, np.ndarray]:
        cosine, sine = table(*args)
        cosine[7, 3] = np.nextafter(cosine[7, 3], np.float32(2))
        return cosine, sine

    monkeypatch.setattr(numerics, "rope_table", nudged)
    assert numerics.probe(engine.weights, "float32", 1) != engine.numerics.digest


def test_kernels_that_need_company_are_padded_and_kernels_that_never_agree_are_not_called_exact(
    engine_of: EngineOf,
) -> None:
    graphs = engine_of("qwen3", "int8", "float32").graphs

    class Crooked:
        """The real graphs, but a result depends on the row count below `fair` rows."""

        def __init__(self, fair: int):
            self.fair = fair

        def __getattr__(self, name: str) -> object:
            return getattr(graphs, name)

        def logits(self, picked: range, least: int, head: object) -> np.ndarray:
            skew = np.float32(len(picked) if len(picked) < self.fair else 0)
            return graphs.logits(picked, least, head) + skew * np.float32(1e-3)

    assert numerics.least_rows(Crooked(1))[0] == 1  # type: ignore[arg-type]
    assert numerics.least_rows(Crooked(2))[0] == 2  # type: ignore[arg-type]
    assert numerics.least_rows(Crooked(4))[0] == 4  # type: ignore[arg-type]
    assert numerics.least_rows(Crooked(99))[0] is None  # type: ignore[arg-type]


def test_padding_rows_do_not_change_a_result(engine_of: EngineOf) -> None:
    from tests.engine.sequences import Run, random_tokens

    engine = engine_of("llama", "int8", "float32")
    tokens = random_tokens(engine, 40)
    plain = Run(engine, tokens).steps([1] * 40).bits()
    before = engine.numerics
    engine.numerics = dataclasses.replace(before, least_rows=4)
    try:
        assert Run(engine, tokens).steps([1] * 40).bits() == plain
    finally:
        engine.numerics = before
