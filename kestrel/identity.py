"""Names: what makes KV valid (the identity), the namespace it hashes to, and the keys of pages.

Everything here is a pure function of its arguments, so two boards that agree on the inputs agree on
every name without talking to each other.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT = 1  # version of the artifact format (store/FORMAT.md); part of every identity

Tokens = npt.NDArray[np.int32]


def canonical_json(value: Any) -> bytes:
    """Encode plain data as the one JSON text that every board writes for it.

    Keys sorted, no spaces, ASCII only, NaN and infinities refused (ValueError).
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


@dataclass(frozen=True)
class Namespace:
    """The digest of one identity: the root of all page keys and the name of a folder of the store."""

    digest: bytes  # 16 bytes

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> "Namespace":
        """Hash an identity (plain JSON data holding everything that makes KV valid, nothing incidental)."""
        return cls(xxhash.xxh3_128_digest(canonical_json(identity)))

    @property
    def name(self) -> str:
        """Folder name: the first 16 hex digits of the digest."""
        return self.digest.hex()[:16]


def as_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> Tokens:
    """Token ids as the little-endian int32 array that is hashed and stored."""
    return np.ascontiguousarray(tokens, dtype="<i4")


def page_key(parent: bytes, tokens: Tokens) -> bytes:
    """Key (16 bytes) of the page holding `tokens`; `parent` is the previous page's key, or the namespace digest."""
    return xxhash.xxh3_128_digest(parent + as_tokens(tokens).tobytes())


def branch_key(parent: bytes, namespace: Namespace) -> bytes:
    """The key (16 bytes) after which a namespace goes on with pages of its own, where `parent` is another's page.

    It takes the place of a parent's key: no two namespaces get equal page keys behind a common prefix.
    """
    return xxhash.xxh3_128_digest(b"branch" + parent + namespace.digest)


def prefix_sha256(tokens: Tokens) -> str:
    """SHA-256 (hex) of all token ids from position 0, int32 little-endian: the collision-proof name of a prefix."""
    return hashlib.sha256(as_tokens(tokens).tobytes()).hexdigest()
