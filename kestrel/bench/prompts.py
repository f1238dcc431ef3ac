"""The prompts of the restart experiment: pages of text with a fact near the end, a question, and a follow-up.

The text is Python's own language reference (`pydoc_data.topics`), which every Python carries, so that nothing has
to be downloaded. The fact stands at the end and is worded as the questions are: a model of 135M parameters finds
it again there and nowhere else, and an answer that names it shows that the restored KV is the one computed before.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kestrel.errors import ConfigError, TemplateError
from kestrel.models.chat import ChatTemplate
from kestrel.models.tokenizer import Tokenizer

OPENING = "Here are pages of a manual.\n\n"
FACT = "Note: The name of the city where Alice lives is Paris. The name of the city where Bob lives is Tokyo."
QUESTION = "What is the name of the city where Alice lives?"
FOLLOW_UP = "What is the name of the city where Bob lives?"
EXPECTED = "Tokyo"  # what an answer to FOLLOW_UP must hold
WARM_UP = "One, two, three,"  # shares no token with the beginning of a first prompt

_ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the answer while the follow-up is rendered
_PADDING = " ."  # one token in every tokenizer seen; fills what a cut of the text cannot hit
_MOST_PADDING = 8
_CUTS = 200  # characters before the estimated cut that are tried

_Encode = Callable[[int, int], list[int]]  # (characters of the manual, pieces of padding) -> token ids


@dataclass(frozen=True)
class Conversation:
    """A two-turn conversation in token ids.

    The second prompt is `first`, the tokens of an answer as they were generated, then `follow_up`: it continues the
    stored session id by id, whatever the answer was.
    """

    first: tuple[int, ...]
    follow_up: tuple[int, ...]  # ends the answer's turn, asks FOLLOW_UP and opens the next answer


def build_conversation(tokenizer: Tokenizer, chat: ChatTemplate | None, num_tokens: int) -> Conversation:
    """A conversation whose first prompt has exactly `num_tokens` tokens, through the chat template if there is one.

    Prompts are token ids rather than messages because text is not token-stable: an answer that is decoded and
    encoded again, or a template that rewrites earlier turns, need not give the ids of the stored session.

    Raises ConfigError when `num_tokens` cannot hold the fact and the question.
    """
    if chat is None:
        before, between, after = _plain_turns()
    else:
        before, between, after = _chat_turns(chat)

    def encode(num_characters: int, num_padding: int) -> list[int]:
        text = manual(num_characters) + _PADDING * num_padding
        return tokenizer.encode(f"{before}{OPENING}{text}\n\n{FACT}\n\n{QUESTION}{between}")

    least = len(encode(0, 0))
    if num_tokens < least:
        raise ConfigError(
            f"bench.context_tokens: expected {least} or more (the fact and the question alone), found {num_tokens}"
        )
    first = _of_length(encode, num_tokens)
    return Conversation(tuple(first), tuple(tokenizer.encode(after, add_special=False)))


def _of_length(encode: _Encode, num_tokens: int) -> list[int]:
    """The encoding of exactly `num_tokens` tokens, found by moving the cut, then by padding what no cut hits."""
    low, high = 0, 8 * num_tokens
    while len(encode(high, 0)) < num_tokens:
        high *= 2
    while low < high:  # the count grows with the text, but for a token or two where the cut splits a word
        middle = (low + high) // 2
        if len(encode(middle, 0)) < num_tokens:
            low = middle + 1
        else:
            high = middle
    for num_padding in range(_MOST_PADDING + 1):
        for cut in range(low, max(-1, low - _CUTS), -1):
            tokens = encode(cut, num_padding)
            if len(tokens) == num_tokens:
                return tokens
    raise ConfigError(
        f"bench.context_tokens: no prompt of exactly {num_tokens} tokens was found with this tokenizer; "
        f"try bench.context_tokens={num_tokens + 1}"
    )


def manual(num_characters: int) -> str:
    """The first characters of the language reference, which is repeated when it is too short."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics)) + "\n\n"
    return (whole * (num_characters // len(whole) + 1))[:num_characters]


def _chat_turns(chat: ChatTemplate) -> tuple[str, str, str]:
    """Text before the first message, from its end to the answer, and from the answer's end to the next answer."""
    asked = chat.render([{"role": "user", "content": _ANSWER}])
    before, _, between = asked.partition(_ANSWER)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": FOLLOW_UP},
    ]
    _, _, after = chat.render(messages).partition(_ANSWER)
    if not between or not after:
        raise TemplateError(
            "the chat template does not repeat the messages it is given; try another model.chat_template"
        )
    return before, between, after


def _plain_turns() -> tuple[str, str, str]:
    """The same three texts for a model without a chat template."""
    return "", "\nAnswer:", f"\n\n{FOLLOW_UP}\nAnswer:"
