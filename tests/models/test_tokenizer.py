"""Text becomes the ids the model was trained on, and ids become text without ever showing half a character."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import ModelError, RequestError
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.tokenizer import (
    Tokenizer,
    add_tokens,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from tests.models.gguf_writing import write_gguf
from tests.models.tiny import random_checkpoint

# Ids that other implementations give for SmolLM2's vocabulary.
KNOWN = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "<|im_start|>user\nHello<|im_end|>": [1, 4093, 198, 19556, 2],
}
# SmolLM2's vocabulary lacks bytes of control characters and the far planes: they vanish, in every implementation.
ASSIGNED = st.characters(exclude_categories=("C",), max_codepoint=0x3FFFF)
PRINTABLE = st.one_of(ASSIGNED, st.sampled_from("\n\t"))
SPM = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "h",
    "e",
    "l",
    "o",
    "he",
    "ll",
]
SPM += ["hell", "hello", "▁hello", "▁h", "w"]
SPM_SCORES = [0.0] * 259 + [-100.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -100.0]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    """The tokenizer rebuilt from the default model's metadata."""
    return open_checkpoint(smollm2).tokenizer()


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Tokenizer:
    """One token per byte: every character of more than one byte is split."""
    return random_checkpoint().tokenizer()


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A SentencePiece vocabulary with byte fallback."""
    backend = sentencepiece_tokenizer(SPM, SPM_SCORES, 0, add_space_prefix=True)
    add_tokens(backend, special=SPM[:3], plain=())
    return Tokenizer(backend, [2], prefix=[1])


def test_smollm2_gives_the_known_ids(smollm2_tokenizer: Tokenizer) -> None:
    assert {text: smollm2_tokenizer.encode(text) for text in KNOWN} == KNOWN
    assert smollm2_tokenizer.eos_ids == {0, 2}


def test_smollm2_cuts_digits_one_by_one(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("in 2024")
    assert [smollm2_tokenizer.token_bytes(token) for token in ids] == [b"in", b" ", b"2", b"0", b"2", b"4"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(PRINTABLE, max_size=40))
def test_text_survives_the_round_trip_whole_and_token_by_token(
    smollm2_tokenizer: Tokenizer, text: str
) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert smollm2_tokenizer.decode(ids, skip_special=False) == text
    stream = smollm2_tokenizer.stream(skip_special=False)
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text
    assert b"".join(smollm2_tokenizer.token_bytes(token) for token in ids) == text.encode()


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=30))
def test_a_stream_gives_what_decoding_all_at_once_gives(bytes_tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip_special in (True, False):
        stream = bytes_tokenizer.stream(skip_special)
        parts = [stream.push(token) for token in ids]
        assert "".join(parts) + stream.flush() == bytes_tokenizer.decode(ids, skip_special)


def test_a_stream_waits_until_a_character_is_whole(bytes_tokenizer: Tokenizer) -> None:
    stream = bytes_tokenizer.stream()
    assert [stream.push(token) for token in bytes_tokenizer.encode("é🦅a")] == [
        "",
        "é",
        "",
        "",
        "",
        "🦅",
        "a",
    ]
    assert stream.flush() == ""
    stream.push(bytes_tokenizer.encode("é")[0])
    assert stream.flush() == "\ufffd"


def test_bytes_that_are_no_utf8_become_replacement_characters(bytes_tokenizer: Tokenizer) -> None:
    first, second = bytes_tokenizer.encode("é")
    letter = bytes_tokenizer.encode("a")[0]
    assert bytes_tokenizer.decode([second, letter, first, letter]) == "\ufffda\ufffda"


def test_special_tokens_are_recognised_and_left_out_of_answers(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("<|im_start|>assistant\nHi<|im_end|>")
    assert smollm2_tokenizer.decode(ids) == "assistant\nHi"
    assert smollm2_tokenizer.decode(ids, skip_special=False) == "<|im_start|>assistant\nHi<|im_end|>"
    assert smollm2_tokenizer.is_special(2) and not smollm2_tokenizer.is_special(198)
    assert smollm2_tokenizer.token_id("<|im_end|>") == 2
    assert smollm2_tokenizer.token_id("no such token") is None


def test_ids_past_the_vocabulary_are_shown_as_placeholders(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.decode([19556, 50000]) == "Hello<|50000|>"


def test_half_a_surrogate_pair_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83E at character 3"):
        smollm2_tokenizer.encode("abc\ud83e")


def test_bos_is_not_added_to_a_text_that_begins_with_it(sentencepiece: Tokenizer) -> None:
    bare = sentencepiece.encode("hello", add_special=False)
    assert sentencepiece.encode("hello") == [1, *bare]
    assert sentencepiece.encode("<s>hello") == [1, *bare]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [SPM[token] for token in sentencepiece.encode(text, add_special=False)]

    assert pieces("hello") == ["▁hello"]
    assert pieces("hell hello") == ["▁", "hell", "▁hello"]
    assert pieces("é") == ["▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("text", ["hello", " hello", "hello  w", "wé🦅 hello", ""])
def test_sentencepiece_text_survives_the_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids) == text
    stream = sentencepiece.stream()
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text


@pytest.mark.parametrize(
    "pre, text, words",
    [
        ("smollm", "it's 42 €5", ["it", "'s", " ", "4", "2", " €", "5"]),
        ("gpt-2", "it's 42 €5", ["it", "'s", " 42", " €", "5"]),
        ("default", "a, 1234+5", ["a", ",", " ", "123", "4", "+", "5"]),
        ("qwen2", "IT'S 42\n\n x", ["IT", "'S", " ", "4", "2", "\n\n", " x"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", " ", "123", "45"]),
    ],
)
def test_words_are_cut_as_the_file_says(pre: str, text: str, words: list[str]) -> None:
    cut = byte_level_tokenizer(["a"], [], pre).pre_tokenizer.pre_tokenize_str(text)
    starts = [span[0] for _, span in cut]
    assert [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)] == words


def test_qwen2_composes_characters_before_it_cuts() -> None:
    normalizer = byte_level_tokenizer(["a"], [], "qwen2").normalizer
    assert normalizer is not None and normalizer.normalize_str("e\u0301") == "\u00e9"
    assert byte_level_tokenizer(["a"], [], "smollm").normalizer is None


TOKENS = ["<a>", "</s>", "x", "y", "xy", "<tool>"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["x y"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
}


def test_gguf_metadata_says_which_tokens_are_special_and_whether_bos_is_added(tmp_path: Path) -> None:
    metadata = METADATA | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_checkpoint(), metadata=metadata))
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template()
    assert tokenizer.encode("xyx<tool>") == [0, 4, 2, 5, 1]
    assert tokenizer.decode([0, 4, 5, 1]) == "xy<tool>"
    assert template is not None
    assert tokenizer.encode(template.render([{"content": "xy"}])) == [0, 4, 1]


@pytest.mark.parametrize("model, pre, expected", [("gpt2", "smollm", [4]), ("gpt2", "llama-bpe", [0, 4])])
def test_a_file_that_does_not_say_adds_bos_as_llama_cpp_does(
    model: str, pre: str, expected: list[int], tmp_path: Path
) -> None:
    metadata = METADATA | {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_checkpoint(), metadata=metadata))
    assert file.tokenizer().encode("xy") == expected


@pytest.mark.parametrize(
    "metadata, complaint",
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported; supported: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-processing 'tekken' is not supported; supported: smollm"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.token_type": [1]}, "6 tokens but 1 token types"),
        ({"tokenizer.ggml.merges": ["xy"]}, "'xy' is not a merge"),
        ({"tokenizer.ggml.merges": ["x z"]}, "its tokenizer is not consistent"),
        ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id is 99"),
        ({"tokenizer.ggml.model": "llama"}, "scores does not match"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_named(
    metadata: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_checkpoint(), metadata=METADATA | metadata)
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(path).tokenizer()
