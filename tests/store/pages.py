"""Pages of no model in particular, whose bytes follow from their key: whoever knows the key can check the bits."""

import os
import tempfile
from pathlib import Path

import numpy as np

from kestrel.errors import ArtifactError
from kestrel.identity import Namespace, Tokens, as_tokens, page_key, prefix_sha256
from kestrel.store.layout import PageLayout
from kestrel.store.store import Limits, PageRef, Store

LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, head_dim=4)
IDENTITY = {"architecture": "toy", "weights": "none"}
NAMESPACE = Namespace.of(IDENTITY)
PAGE_TOKENS = 16


def payload_of(key: bytes, num_tokens: int, layout: PageLayout = LAYOUT) -> list[bytes]:
    """One layer's bytes each, random but fixed by the key: any bits, NaN included, are legal."""
    random = np.random.default_rng(int.from_bytes(key, "big"))
    return [random.bytes(layout.layer_nbytes(num_tokens)) for _ in range(layout.num_layers)]


def cut(tokens: Tokens, sizes: int | list[int]) -> list[tuple[int, Tokens]]:
    """(first, tokens) of the pages of a prefix: of one size, the last one perhaps shorter, or of given sizes."""
    tokens = as_tokens(tokens)
    if isinstance(sizes, int):
        sizes = [sizes] * -(-len(tokens) // sizes)
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(first, tokens[first : first + size]) for first, size in zip(firsts, sizes, strict=True)]


def publish(
    store: Store,
    tokens: Tokens,
    sizes: int | list[int] = PAGE_TOKENS,
    identity: dict[str, str] = IDENTITY,
    layout: PageLayout = LAYOUT,
) -> list[bytes]:
    """Save a prefix page by page; returns its keys."""
    namespace = Namespace.of(identity)
    keys: list[bytes] = []
    parent = namespace.digest
    for first, page in cut(tokens, sizes):
        key = page_key(parent, page)
        digest = prefix_sha256(tokens[: first + len(page)])
        payload = payload_of(key, len(page), layout)
        store.publish(namespace, identity, layout, key, parent, first, page, digest, payload)
        keys.append(key)
        parent = key
    return keys


def check_bits(store: Store, ref: PageRef, layout: PageLayout = LAYOUT) -> None:
    """Read every layer of a page and compare its bits; ArtifactError if it is damaged."""
    with store.open_page(ref, layout) as page:
        buffer = np.empty(page.layer_nbytes, np.uint8)
        for layer, expected in enumerate(payload_of(ref.key, ref.num_tokens, layout)):
            page.read_layer_into(layer, buffer)
            assert buffer.tobytes() == expected


def restore(store: Store, tokens: Tokens, page_tokens: int = PAGE_TOKENS, min_match: int = 1) -> int:
    """Do what a request does: find, read, and on damage quarantine and shorten; returns the tokens restored."""
    match = store.find_prefix(NAMESPACE, tokens, page_tokens, min_match)
    covered = 0
    for ref in match.pages:
        assert ref.first == covered
        try:
            check_bits(store, ref)
        except ArtifactError as error:
            store.quarantine(ref.path, str(error))
            return covered
        covered += ref.num_used
    assert covered == match.num_tokens
    return covered


def fast_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder in memory where there is one: these tests fsync thousands of times."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def open_store(root: Path, **limits: float | None) -> Store:
    """An open store with these limits."""
    return Store(root, Limits(**limits)).open()  # type: ignore[arg-type]


def all_files(root: Path) -> list[Path]:
    """Every file under a root, links not followed."""
    return [path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()]


def all_bytes(root: Path) -> int:
    """Sum of their sizes."""
    return sum(path.lstat().st_size for path in all_files(root))
