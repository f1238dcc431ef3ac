"""Named prefixes of the configuration: the token ids they stand for."""

from collections.abc import Sequence
from pathlib import Path

from kestrel.config import PrefixConfig
from kestrel.errors import ConfigError
from kestrel.models.chat import ChatTemplate
from kestrel.models.tokenizer import Tokenizer

# Ways a text can go on that tokenizers treat differently: what follows may merge with what stands before.
CONTINUATIONS = ("A", "a", "1", " a", "\n", ".", "日")


def load_text(name: str, prefix: PrefixConfig) -> str:
    """The text of a prefix, read from its file (UTF-8) when it names one. Raises ConfigError."""
    if prefix.text is not None:
        return prefix.text
    if prefix.file is None:
        raise ConfigError(f"prefixes.{name}: expected exactly one of text and file, found neither")
    try:
        return Path(prefix.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prefixes.{name}.file: cannot read {prefix.file} as UTF-8 text: {error}"
        ) from error


def prefix_tokens(
    name: str, prefix: PrefixConfig, tokenizer: Tokenizer, chat: ChatTemplate | None
) -> list[int]:
    """The token ids that every prompt beginning with this prefix begins with.

    A raw prefix is its text from position 0; one with a role is that role's first message in a chat, through
    the template. Where what follows could change how the end is tokenized, the end is left out.

    Raises ConfigError naming the prefix, or TemplateError.
    """
    text = load_text(name, prefix)
    if prefix.role is None:
        prompts = [tokenizer.encode(text + continuation) for continuation in CONTINUATIONS]
    elif chat is None:
        raise ConfigError(
            f"prefixes.{name}.role: the model has no chat template; use role: null for raw text"
        )
    else:
        first = {"role": prefix.role, "content": text}
        prompts = [
            tokenizer.encode(
                chat.render([first, {"role": "user", "content": continuation}], add_generation_prompt=False)
            )
            for continuation in CONTINUATIONS
        ]
    tokens = common_prefix(prompts)
    if not tokens:
        raise ConfigError(
            f"prefixes.{name}: no token is common to the prompts that begin with it; is it empty?"
        )
    return tokens


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest run of token ids, from position 0, that all sequences share."""
    shared: list[int] = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) != 1:
            break
        shared.append(column[0])
    return shared
