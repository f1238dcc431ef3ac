"""Random checkpoints are the same numbers everywhere, whatever part is asked for."""

import numpy as np
import pytest
import xxhash

from kestrel.errors import ModelError
from tests.models.tiny import GEOMETRY, random_checkpoint


def test_the_numbers_are_fixed_for_ever() -> None:
    checkpoint = random_checkpoint(seed=7)
    digest = xxhash.xxh3_128()
    for name in GEOMETRY.tensor_shapes():
        digest.update(checkpoint.tensor(name).tobytes())
    assert digest.hexdigest() == "652a49af9e0e6df419edb338163c5e1a"
    assert checkpoint.digest == "479b0b6f0b2f1041acb2bb9eff91ad33"


def test_seed_and_geometry_change_every_matrix() -> None:
    base = random_checkpoint(0)
    for other in (random_checkpoint(1), random_checkpoint(0, num_heads=8)):
        assert other.digest != base.digest
    assert (random_checkpoint(1).tensor("layers.0.o") != base.tensor("layers.0.o")).mean() > 0.99
    assert (base.tensor("layers.1.o") != base.tensor("layers.0.o")).mean() > 0.99


def test_any_rows_are_those_of_the_whole_matrix() -> None:
    checkpoint = random_checkpoint()
    whole = checkpoint.tensor("embed")
    assert np.array_equal(checkpoint.rows("embed", 100, 217), whole[100:217])
    assert np.array_equal(checkpoint.embed([299, 4, 4]), whole[[299, 4, 4]])


def test_activations_keep_their_size() -> None:
    checkpoint = random_checkpoint(hidden_size=512)
    matrix = checkpoint.tensor("layers.0.q")
    assert abs(matrix.std() * 512**0.5 - 1) < 0.02 and abs(matrix.mean()) < 0.001
    norm = checkpoint.tensor("layers.0.input_norm")
    assert abs(norm.mean() - 1) < 0.05 and 0.05 < norm.std() < 0.2


def test_the_tokenizer_has_every_byte_and_shows_what_it_does_not_know() -> None:
    tokenizer = random_checkpoint(vocab_size=1000).tokenizer()
    text = "<|im_start|>user\nnaïve 🦅 12<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert max(ids) < 259 and ids[0] == 1
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode([tokenizer.encode("a")[0], 999]) == "a<|999|>"
    assert tokenizer.eos_ids == {0, 2}


def test_the_template_is_chatml() -> None:
    rendered = random_checkpoint().chat_template().render([{"role": "user", "content": "Hi"}])
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ModelError, match="vocab_size >= 259, found 200"):
        random_checkpoint(vocab_size=200)
