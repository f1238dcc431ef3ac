"""Tokenizer: text to token ids as the model was trained, and ids back to text, also one at a time."""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from kestrel.errors import ModelError, RequestError

# Control tokens that end an assistant's turn in the chat formats of the supported families. Checkpoints often name
# only one of them as end of sequence.
TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
# Places for images and videos in the prompts of Qwen3-VL, whose text decoder alone is run.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is cut into words before merging, by GGUF's `tokenizer.ggml.pre`: (each digit alone?, patterns in turn).
# "default" is what llama.cpp does for a file that names nothing.
_CUTS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "smollm": (True, (_GPT2_WORDS,)),
    "qwen2": (False, (_QWEN2_WORDS,)),
    "deepseek-r1-qwen": (False, (_QWEN2_WORDS,)),
    "llama-bpe": (False, (_LLAMA3_WORDS,)),
    "llama3": (False, (_LLAMA3_WORDS,)),
    "llama-v3": (False, (_LLAMA3_WORDS,)),
    "gpt-2": (False, (_GPT2_WORDS,)),
    "default": (False, (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
)  # a word that is in the vocabulary is not merged piece by piece
_COMPOSED = ("qwen2",)  # text is brought to Unicode form NFC first


class Tokenizer:
    """A `tokenizers` pipeline with what a server needs to know about it.

    Special tokens written out in a text (as chat templates do) are recognised. Ids outside the vocabulary, which a
    model with a padded embedding matrix can produce, decode to a visible placeholder.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Iterable[int],
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        refused: Iterable[str] = (),
    ) -> None:
        """`prefix` and `suffix` are the special tokens put around a text. ModelError for an unknown decoder.

        refused: tokens that no prompt may hold, where the vocabulary has them.
        """
        self._backend = backend
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self._pieces, self._special_ids, self._drops_leading_space = _pieces(backend)
        ends = {self.token_id(text) for text in TURN_ENDS} & self._special_ids
        self.eos_ids = frozenset(ends | set(eos_ids))
        self.refused = {
            token: text for text in refused for token in (self.token_id(text),) if token is not None
        }

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. `add_special` adds bos where the model wants it, unless the text begins with it.

        RequestError for a text that is not Unicode: JSON can spell half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise RequestError(
                f"the text holds half of a surrogate pair ({found}); send valid Unicode"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_special:
            if ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if self._suffix and ids[-len(self._suffix) :] != self._suffix:
                ids = ids + self._suffix
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. Special tokens are left out unless asked for."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A decoder for ids that arrive one at a time."""
        return TextStream(self, skip_special)

    def token_id(self, text: str) -> int | None:
        """The id of one vocabulary entry, such as "<|im_end|>"."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token: never part of the text."""
        return token in self._special_ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, which may be part of a character; special tokens as they are written."""
        return self._pieces.get(token) or f"<|{token}|>".encode()


class TextStream:
    """Turns ids into text as they come; never emits half a character.

    The concatenation of everything returned by `push` and one final `flush` is `Tokenizer.decode` of the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer._drops_leading_space

    def push(self, token: int) -> str:
        """The characters that this token completes; empty while a character is unfinished."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        piece = self._tokenizer.token_bytes(token)
        if self._drop_space and not self._tokenizer.is_special(token):
            piece = piece.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The rest: U+FFFD if the last character stayed unfinished."""
        return self._utf8.decode(b"", final=True)


def byte_level_tokenizer(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], pre: str
) -> tokenizers.Tokenizer:
    """Byte-level BPE as GGUF's "gpt2" model describes it; `pre` names how text is cut into words before merging.

    ModelError for a `pre` that Kestrel does not know: a wrong cut would silently change every prompt.
    """
    if pre not in _CUTS:
        raise ModelError(f"tokenizer pre-processing {pre!r} is not supported; supported: {', '.join(_CUTS)}")
    digits, patterns = _CUTS[pre]
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    cuts += [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=pre in _WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece_tokenizer(
    tokens: Sequence[str], scores: Sequence[float], unknown: int, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, as GGUF's "llama" model describes it.

    The merge of two pieces is worth the score of what they make (best first), which is how SentencePiece chooses.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token[:cut], token[cut:]))
    merges.sort(key=lambda merge: merge[:3])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [merge[3:] for merge in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ending = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    return backend


def add_tokens(backend: tokenizers.Tokenizer, special: Iterable[str], plain: Iterable[str]) -> None:
    """Make vocabulary entries be recognised as a whole in any text: control tokens, and user-defined ones."""
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])


def _pieces(backend: tokenizers.Tokenizer) -> tuple[dict[int, bytes], frozenset[int], bool]:
    """(bytes of every token, ids of control tokens, whether the first token loses its leading space)."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    if "ByteLevel" in kinds:
        byte_of = {char: byte for byte, char in byte_characters().items()}
        pieces = {index: _from_byte_characters(token, byte_of) for token, index in vocabulary.items()}
        drops_space = False
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        pieces = {index: _from_sentencepiece(token) for token, index in vocabulary.items()}
        drops_space = "Strip" in kinds or "Metaspace" in kinds
    else:
        found = ", ".join(kinds) or "none"
        raise ModelError(
            f"the tokenizer's decoder ({found}) is not supported; expected ByteLevel or ByteFallback"
        )
    special = set()
    for index, added in backend.get_added_tokens_decoder().items():
        pieces[index] = added.content.encode()
        if added.special:
            special.add(index)
    return pieces, frozenset(special), drops_space


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next character from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    return stand_ins | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _from_byte_characters(token: str, byte_of: dict[str, int]) -> bytes:
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()  # a token that was never byte-mapped stands for itself, as in tokenizers


def _from_sentencepiece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
