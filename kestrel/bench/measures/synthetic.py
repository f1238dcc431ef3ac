"""Stores of made-up artifacts: small pages in the shape of many sessions, to see how things grow with their number."""

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kestrel.identity import Namespace, Tokens, canonical_json, page_key
from kestrel.store.artifact import PageHeader, encode_header
from kestrel.store.files import page_names
from kestrel.store.layout import PageLayout

PAGE_TOKENS = 256
SESSION_PAGES = 32  # 8,192 tokens
SHARED_PAGES = 2  # a system prompt that every GROUP sessions have in common
GROUP = 16
LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=4, kv_dtype="int8")
IDENTITY = {"format": 1, "model": "made up, for measuring a store"}


@dataclass(frozen=True)
class SyntheticStore:
    """Where it is, and the token ids of some of its sessions."""

    root: Path
    namespace: Namespace
    num_pages: int
    sessions: list[Tokens] = field(repr=False)


def write_store(root: Path, num_pages: int) -> SyntheticStore:
    """Make a store of so many artifacts, without a catalog; what was at `root` is removed.

    The files are valid in every byte; they are not synced, so that 100,000 take seconds to write.
    """
    shutil.rmtree(root, ignore_errors=True)
    namespace = Namespace.of(IDENTITY)
    folder = root / namespace.name
    for number in range(256):
        (folder / f"{number:02x}").mkdir(parents=True, mode=0o700)
    (folder / "identity.json").write_bytes(canonical_json(IDENTITY))
    random = np.random.default_rng(0)
    payload = random.integers(0, 100, LAYOUT.layer_nbytes(PAGE_TOKENS), np.uint8).tobytes()
    digest = xxhash.xxh3_128_hexdigest(payload)
    sessions: list[Tokens] = []
    shared: Tokens = np.empty(0, "<i4")
    written = 0
    while written < num_pages:
        own_pages = SESSION_PAGES - SHARED_PAGES
        if len(sessions) % GROUP == 0:
            shared = _random_tokens(random, SHARED_PAGES)
            own_pages = SESSION_PAGES
        own = _random_tokens(random, SESSION_PAGES - SHARED_PAGES)
        tokens: Tokens = np.concatenate([shared, own])
        first_new = SESSION_PAGES - own_pages
        count = min(own_pages, num_pages - written)
        _write_pages(root, namespace, tokens, first_new, first_new + count, payload, digest)
        written += count
        sessions.append(tokens[: (first_new + count) * PAGE_TOKENS])
    return SyntheticStore(root, namespace, num_pages, sessions)


def _random_tokens(random: np.random.Generator, num_pages: int) -> Tokens:
    tokens: npt.NDArray[np.int32] = random.integers(0, 150_000, num_pages * PAGE_TOKENS, np.int32)
    return tokens


def _write_pages(
    root: Path, namespace: Namespace, tokens: Tokens, begin: int, end: int, payload: bytes, digest: str
) -> None:
    """Write pages [begin, end) of a prefix; those before `begin` are there."""
    parent = namespace.digest
    prefix = hashlib.sha256()
    for index in range(end):
        page = tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
        key = page_key(parent, page)
        prefix.update(page.tobytes())
        if index >= begin:
            header = PageHeader(
                namespace=namespace.digest.hex(),
                key=key.hex(),
                parent=parent.hex(),
                first=index * PAGE_TOKENS,
                num_tokens=PAGE_TOKENS,
                prefix_sha256=prefix.hexdigest(),
                layer_digests=(digest,),
            )
            path = root.joinpath(*page_names(namespace.digest, key))
            path.write_bytes(encode_header(LAYOUT, header) + payload + page.tobytes())
        parent = key
