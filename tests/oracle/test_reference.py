"""Every architecture computes what transformers computes: the logits noted beside the tiny checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from tests.oracle.comparison import NAMES, TINY, Sequence, reference


@pytest.mark.parametrize("name", NAMES)
def test_float32_weights_give_the_reference_logits_at_every_position(name: str, tmp_path: Path) -> None:
    noted = reference(name)
    logits = Sequence(TINY / name, "float32", tmp_path).extend(noted["tokens"])
    assert np.abs(logits[:, noted["columns"]] - noted["logits"]).max() < 2e-4
    assert np.abs(logits[noted["positions"]] - noted["full"]).max() < 2e-4
    assert np.mean(logits.argmax(-1) == noted["best"]) > 0.99


@pytest.mark.parametrize("name", NAMES)
def test_float32_weights_continue_greedily_as_the_reference_does(name: str, tmp_path: Path) -> None:
    noted = reference(name)
    sequence = Sequence(TINY / name, "float32", tmp_path)
    last = sequence.extend(noted["tokens"][:200])[-1]
    assert sequence.greedy(last, len(noted["greedy"])) == noted["greedy"].tolist()


@pytest.mark.parametrize("recipe, agreement, error", [("int8", 0.9, 0.08), ("int4", 0.3, 0.6)])
@pytest.mark.parametrize("name", NAMES)
def test_quantised_weights_stay_close_to_the_reference(
    name: str, recipe: str, agreement: float, error: float, tmp_path: Path
) -> None:
    # The bounds are wide: random weights leave no margin between tokens and damp no error, unlike trained ones.
    noted = reference(name)
    logits = Sequence(TINY / name, recipe, tmp_path).extend(noted["tokens"])
    difference = logits[:, noted["columns"]] - noted["logits"]
    assert np.sqrt(np.mean(difference**2)) < error * noted["logits"].std()
    assert np.mean(logits.argmax(-1) == noted["best"]) > agreement
