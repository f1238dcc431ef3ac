"""A first prompt has exactly the wanted number of tokens, and the second one begins with it, id by id."""

from pathlib import Path

import pytest

from kestrel.bench.prompts import EXPECTED, FACT, FOLLOW_UP, QUESTION, WARM_UP, build_conversation
from kestrel.errors import ConfigError, TemplateError
from kestrel.models.chat import ChatTemplate
from kestrel.models.checkpoint import Checkpoint, open_checkpoint

TINY = Path(__file__).parent.parent / "oracle"
LENGTHS = (500, 501, 502, 503, 1000, 1024, 2044)


@pytest.fixture(scope="module", params=("llama", "qwen2", "qwen3"))
def tiny(request: pytest.FixtureRequest) -> Checkpoint:
    """A checkpoint with a tokenizer and a chat template of each family."""
    return open_checkpoint(TINY / request.param)


@pytest.mark.parametrize("with_template", (True, False))
def test_lengths_are_exact(tiny: Checkpoint, with_template: bool) -> None:
    chat = tiny.chat_template() if with_template else None
    for length in LENGTHS:
        assert len(build_conversation(tiny.tokenizer(), chat, length).first) == length


def test_the_default_model_gets_exactly_the_seed_experiments_length(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    for length in (100, 2044, 4096):
        assert (
            len(build_conversation(checkpoint.tokenizer(), checkpoint.chat_template(), length).first)
            == length
        )


def test_the_prompts_are_the_chat_template_s_own(tiny: Checkpoint) -> None:
    """What a chat client would send for the same messages has the same ids, wherever the answer is token-stable."""
    tokenizer, chat = tiny.tokenizer(), tiny.chat_template()
    assert chat is not None
    conversation = build_conversation(tokenizer, chat, 700)
    first = conversation.first[len(tokenizer.encode("")) :]  # without bos, which is no part of the text
    text = tokenizer.decode(first, skip_special=False)
    opening, closing = chat.render([{"role": "user", "content": "\0"}]).split("\0")
    assert text.startswith(opening) and text.endswith(closing)
    message = text[len(opening) : len(text) - len(closing)]
    assert f"\n\n{FACT}\n\n{QUESTION}" in message
    messages = [
        {"role": "user", "content": message},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": FOLLOW_UP},
    ]
    answer = tokenizer.encode("Paris.", add_special=False)
    second = [*conversation.first, *answer, *conversation.follow_up]
    assert second == tokenizer.encode(chat.render(messages))


def test_the_answer_is_not_in_the_questions() -> None:
    assert EXPECTED in FACT
    assert EXPECTED not in QUESTION + FOLLOW_UP


def test_the_warm_up_shares_no_token_with_a_first_prompt(tiny: Checkpoint) -> None:
    tokenizer = tiny.tokenizer()
    for chat in (tiny.chat_template(), None):
        first = build_conversation(tokenizer, chat, 600).first
        content = tokenizer.encode("", add_special=True)  # what every prompt begins with
        assert tokenizer.encode(WARM_UP)[len(content)] != first[len(content)]


def test_a_length_that_cannot_hold_the_fact_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"bench\.context_tokens: expected \d+ or more"):
        build_conversation(tiny.tokenizer(), tiny.chat_template(), 20)


def test_a_template_that_swallows_messages_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(TemplateError, match="does not repeat"):
        build_conversation(tiny.tokenizer(), ChatTemplate("always this", {}), 600)
