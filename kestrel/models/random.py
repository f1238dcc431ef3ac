"""Checkpoints of random weights: a model of any shape for measuring and testing, with no file behind it.

Every number is a pure function of (seed, tensor name, place), computed with integer arithmetic: the same on every
processor and with every library version, and any rows can be had without the others.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash

from kestrel.errors import ModelError
from kestrel.identity import canonical_json
from kestrel.models.chat import ChatTemplate
from kestrel.models.checkpoint import Bytes, Floats
from kestrel.models.geometry import Geometry
from kestrel.models.tokenizer import Tokenizer, add_tokens, byte_characters, byte_level_tokenizer

GENERATOR = 1  # raise it when the same seed and geometry would give other numbers
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; then one token per byte
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The sum of four 16-bit fields of one hash, minus its mean, divided by its standard deviation: close to normal.
_MEAN = 2 * 65535
_DEVIATION = math.sqrt(4 * (65536.0**2 - 1) / 12)


class RandomCheckpoint:
    """A `Checkpoint` whose tensors are generated when they are read.

    Matrices are normal with deviation in ** -0.5, so that activations keep their size; norms are near 1.
    """

    def __init__(self, geometry: Geometry, seed: int, name: str = "random") -> None:
        """ModelError if the vocabulary has no room for the bytes and the special tokens."""
        least = len(SPECIAL_TOKENS) + 256
        if geometry.vocab_size < least:
            raise ModelError(f"random weights need vocab_size >= {least}, found {geometry.vocab_size}")
        self.geometry = geometry
        self.name = name
        self._seed = seed
        self._shapes = geometry.tensor_shapes()

    @property
    def digest(self) -> str:
        """xxh3_128 of what the numbers are a function of."""
        source: dict[str, Any] = {
            "random": GENERATOR,
            "seed": self._seed,
            "geometry": self.geometry.as_identity(),
        }
        return xxhash.xxh3_128_hexdigest(canonical_json(source))

    @property
    def embed_digest(self) -> str:
        """The same: seed and geometry fix the matrix."""
        return self.digest

    def tensor(self, name: str) -> Floats:
        """A whole tensor."""
        shape = self._shapes[name]
        if len(shape) > 1:
            return self.rows(name, 0, shape[0])
        offset = np.float32(1 if name.endswith("norm") else 0)
        return offset + np.float32(0.1) * self._normal(name, np.arange(shape[0], dtype=np.uint64))

    def rows(self, name: str, first: int, end: int) -> Floats:
        """Rows [first, end) of a matrix."""
        return self._rows(name, np.arange(first, end))

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        """None: the numbers are not quantised."""
        return None

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Rows of the embedding matrix."""
        return self._rows("embed", np.asarray(ids, np.int64))

    def tokenizer(self) -> Tokenizer:
        """One token per byte, and the special tokens of the ChatML format."""
        tokens = [*SPECIAL_TOKENS, *byte_characters().values()]
        backend: tokenizers.Tokenizer = byte_level_tokenizer(tokens, [], "gpt-2")
        add_tokens(backend, special=SPECIAL_TOKENS, plain=())
        return Tokenizer(backend, eos_ids=[SPECIAL_TOKENS.index("<|im_end|>")])

    def chat_template(self) -> ChatTemplate:
        """ChatML."""
        return ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<|im_end|>"})

    def _rows(self, name: str, rows: npt.NDArray[np.int64]) -> Floats:
        in_features = self._shapes[name][1]
        columns = np.arange(in_features, dtype=np.uint64)
        places = np.add(np.multiply(rows[:, None], in_features, dtype=np.int64).view(np.uint64), columns)
        numbers = self._normal(name, places)
        numbers *= np.float32(1 / math.sqrt(in_features))
        return numbers

    def _normal(self, name: str, places: npt.NDArray[np.uint64]) -> Floats:
        """Numbers of mean 0 and deviation 1 at the given places of a tensor (splitmix64 of place and stream)."""
        stream = np.uint64(xxhash.xxh3_64_intdigest(f"{GENERATOR} {self._seed} {name}".encode()))
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
            bits = places * np.uint64(0x9E3779B97F4A7C15) + stream
            bits ^= bits >> np.uint64(30)
            bits *= np.uint64(0xBF58476D1CE4E5B9)
            bits ^= bits >> np.uint64(27)
            bits *= np.uint64(0x94D049BB133111EB)
            bits ^= bits >> np.uint64(31)
        fields = bits.view("<u2").reshape(*bits.shape, 4)
        total = fields[..., 0].astype(np.int32)
        for field in range(1, 4):
            total += fields[..., field]
        total -= _MEAN
        numbers = total.astype(np.float32)
        numbers *= np.float32(1 / _DEVIATION)
        return numbers
