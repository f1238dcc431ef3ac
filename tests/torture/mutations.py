"""Ways to spoil an artifact: every kind is a function of a random generator and sound files' bytes."""

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes, bytes], bytes]

# What a header may be made to say. None of it is ever right where it is put.
HOSTILE_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    10**40,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "F32",
    "F64",
    "I32",
    "BF16",
    "/etc/passwd",
    "../../../../etc/passwd",
    "layers/0/k",
    "a\x00b",
    "\n",
    "\ud800",
    "0" * 32,
    "f" * 64,
    "x" * 5000,
    [],
    {},
    [0, 0],
    [0, -64],
    [0, 2**62],
    [64, 0],
    [[[[[]]]]],
    {"a": {"b": {"c": []}}},
]
HOSTILE_NAMES = [
    "../x",
    "/etc/passwd",
    "layers.0.k/../v",
    "a\x00b",
    "",
    "__metadata__ ",
    "layers.-1.k",
    "tokens ",
]


def split(content: bytes) -> tuple[bytes, bytes]:
    """Header text and payload of a sound file."""
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def joined(text: bytes, payload: bytes) -> bytes:
    """A file of this header text, padded as the format demands."""
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + payload


def flip_bits(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """One to 64 bits, anywhere, or all in the header, or all in the token ids at the end."""
    spoilt = bytearray(content)
    header = 8 + len(split(content)[0])
    low, high = rng.choice(
        [(0, len(content)), (0, header), (header, len(content)), (len(content) - 48, len(content))]
    )
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        spoilt[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def overwrite(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A run of bytes that never reached the disk, or is something else's."""
    start = rng.randrange(len(content))
    length = rng.choice([1, 8, 64, 512, 4096])
    fill = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length), other[start : start + length]])
    return content[:start] + fill[: len(content) - start] + content[start + length :]


def resize(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Cut anywhere, or with something appended, or a piece missing or doubled in the middle."""
    start, end = sorted(rng.randrange(len(content)) for _ in range(2))
    return rng.choice(
        [
            content[:start],
            content + rng.choice([b"\0", content[start:end], bytes(64), rng.randbytes(100)]),
            content[:start] + content[end:],
            content[:end] + content[start:],
        ]
    )


def lie_about_length(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Another length in front of the header."""
    (length,) = struct.unpack("<Q", content[:8])
    wrong = rng.choice(
        [0, 1, 2, length - 1, length + 1, length + 64, length - 64, len(content), len(content) - 8]
        + [1 << 20, (1 << 20) + 1, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)]
    )
    return struct.pack("<Q", wrong) + content[8:]


def splice(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """The header of one artifact before the payload of another, or part of it; or wholly another artifact."""
    text, payload = split(content)
    other_text, other_payload = split(other)
    cut = rng.randrange(len(payload))
    return rng.choice(
        [
            other,
            joined(text, other_payload),
            joined(other_text, payload),
            joined(text, payload[:cut] + other_payload[cut : len(payload)] + payload[len(other_payload) :]),
        ]
    )


def edit_header(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """One to three places of the header, or of the facts inside it, say something else; the form stays canonical."""
    text, payload = split(content)
    header = json.loads(text)
    facts = json.loads(header["__metadata__"]["kestrel"])
    for _ in range(rng.choice([1, 1, 2, 3])):
        _spoil(rng, facts if rng.random() < 0.4 else header)
    if rng.random() < 0.9 and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["kestrel"] = _canonical(facts)
    return joined(_canonical(header).encode("utf-8", "surrogatepass"), payload)


def overlap_offsets(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Tensors that share bytes, leave gaps, run backwards or beyond the end."""
    text, payload = split(content)
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    for name in rng.sample(names, rng.randrange(1, len(names))):
        start, end = header[name]["data_offsets"]
        shift = rng.choice([-64, -4, 4, 64, len(payload), -start])
        header[name]["data_offsets"] = rng.choice(
            [
                [start + shift, end + shift],
                [start, end + shift],
                [end, start],
                header[rng.choice(names)]["data_offsets"],
            ]
        )
    return joined(_canonical(header).encode(), payload)


def reform(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """The same facts in a form that is not the canonical one: spaces, order, duplicates, other numbers."""
    text, payload = split(content)
    plain = text.rstrip(b" ")
    return rng.choice(
        [
            joined(json.dumps(json.loads(text)).encode(), payload),
            joined(json.dumps(json.loads(text), indent=1, sort_keys=True).encode(), payload),
            joined(
                json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")).encode(), payload
            ),
            joined(plain + b"\t", payload),
            joined(b" " + plain, payload),
            joined(plain + b"\0", payload),
            joined(plain + b" " * rng.choice([64, 128, 1 << 20]), payload),
            joined(plain[:-1] + b',"layers.0.k":' + rng.choice([b"1", b"{}"]) + b"}", payload),
            joined(plain.replace(b":", b":" + b"[" * rng.choice([1, 1000, 100_000]), 1), payload),
            joined(rng.choice([b"", b"{}", b"[]", b"null", b"{", b"\xff\xfe"]), payload),
        ]
    )


def _spoil(rng: random.Random, node: Any) -> None:
    """Replace, remove or rename something, at a random depth."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        break
    how = rng.random()
    if how < 0.7 or isinstance(node, list):
        node[key] = copy.deepcopy(rng.choice(HOSTILE_VALUES))  # it may be spoilt further
    elif how < 0.85:
        del node[key]
    else:
        node[rng.choice(HOSTILE_NAMES)] = node.pop(key)


def _canonical(value: Any) -> str:
    """As the store writes JSON, but for values that it never writes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


MUTATIONS: list[Mutation] = [
    flip_bits,
    overwrite,
    resize,
    lie_about_length,
    splice,
    edit_header,
    overlap_offsets,
    reform,
]
