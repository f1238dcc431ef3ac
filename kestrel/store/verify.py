"""Reading everything: are the artifacts still what was written?"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kestrel.errors import ArtifactError
from kestrel.store.artifact import OpenPage
from kestrel.store.branches import find_trunk
from kestrel.store.catalog import PageRow
from kestrel.store.files import FileTree, page_names


@dataclass(frozen=True)
class VerifyReport:
    """What reading everything found."""

    files: int  # sound artifacts
    bytes: int  # of those
    orphans: int  # sound pages out of reach, because one before them is not stored or damaged
    damaged: tuple[tuple[Path, str], ...]  # file and reason


@dataclass(frozen=True)
class Verdict:
    """On one artifact."""

    page: PageRow
    path: Path
    damage: str | None
    is_orphan: bool


def verify_pages(tree: FileTree, pages: Iterable[PageRow]) -> Iterator[Verdict]:
    """Read every byte of the pages' artifacts: names, headers, digests of layers, digests of whole prefixes."""
    prefixes: dict[tuple[bytes, bytes], Any] = {}  # SHA-256 state at the end of each sound prefix
    ending: dict[int, list[PageRow]] = defaultdict(list)  # by the position behind them
    for page in sorted(pages, key=lambda page: page.first):
        path = tree.root.joinpath(*page_names(page.namespace, page.key))
        is_root = page.parent == page.namespace
        before = hashlib.sha256() if is_root else prefixes.get((page.namespace, page.parent))
        if before is None:
            trunk = find_trunk(page, ending[page.first])
            before = prefixes.get((trunk.namespace, trunk.key)) if trunk is not None else None
        ending[page.first + page.num_tokens].append(page)
        try:
            prefix = verify_page(tree, page, path, before)
        except ArtifactError as error:
            yield Verdict(page, path, str(error), False)
            continue
        if prefix is not None:
            prefixes[page.namespace, page.key] = prefix
        yield Verdict(page, path, None, prefix is None)


def verify_page(tree: FileTree, row: PageRow, path: Path, before: Any) -> Any:
    """Check one artifact; returns the SHA-256 state behind its tokens, given the one before (None: unknown)."""
    with OpenPage(tree.open_file(page_names(row.namespace, row.key)), path, None) as page:
        header = page.header
        found = (header.namespace, header.key, header.parent, header.first, header.num_tokens)
        expected = (row.namespace.hex(), row.key.hex(), row.parent.hex(), row.first, row.num_tokens)
        if found != expected:
            raise ArtifactError(f"{path}: expected the page {expected}, found {found}")
        buffer = np.empty(page.layer_nbytes, np.uint8)
        for layer in range(page.layout.num_layers):
            page.read_layer_into(layer, buffer)
    if before is None:
        return None
    prefix = before.copy()
    prefix.update(page.tokens.tobytes())
    if prefix.hexdigest() != header.prefix_sha256:
        raise ArtifactError(f"{path}: prefix_sha256 is not that of the pages before it")
    return prefix
