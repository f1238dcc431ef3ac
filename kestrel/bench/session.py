"""A session as the store holds it: the artifacts of one prefix, in order, and the token ids in them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kestrel.bench.records import BenchError, PageList
from kestrel.store.artifact import ArtifactHead, read_header


def artifact_paths(root: Path) -> list[Path]:
    """The artifacts of a store: `<namespace>/<two digits>/<key>.safetensors`."""
    return sorted(root.glob("*/*/*.safetensors"))


def total_size(paths: set[Path]) -> int:
    """Bytes of files."""
    return sum(path.stat().st_size for path in paths)


def find_session(root: Path, beginning: Sequence[int]) -> tuple[PageList, list[int]] | None:
    """The longest stored prefix that begins with `beginning`: its artifacts and all its token ids.

    None when no stored prefix does. Raises ArtifactError for a damaged artifact.
    """
    heads = {path: _read_head(path) for path in artifact_paths(root)}
    by_key = {head.header.key: path for path, head in heads.items()}
    best: tuple[list[Path], list[int]] | None = None
    for end in heads:
        chain = [end]
        while (parent := by_key.get(heads[chain[0]].header.parent)) is not None:
            chain.insert(0, parent)
        tokens = [token for path in chain for token in heads[path].tokens.tolist()]
        complete = heads[chain[0]].header.first == 0
        if complete and tokens[: len(beginning)] == list(beginning):
            if best is None or len(tokens) > len(best[1]):
                best = chain, tokens
    if best is None:
        return None
    chain, tokens = best
    return _page_list(root, chain), tokens


def _read_head(path: Path) -> ArtifactHead:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor, None)
    finally:
        os.close(descriptor)


def _page_list(root: Path, chain: Sequence[Path]) -> PageList:
    namespace = chain[0].relative_to(root).parts[0]
    identity_path = root / namespace / "identity.json"
    try:
        identity = json.loads(identity_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BenchError(
            f"{identity_path} is missing: the store did not write what its pages belong to"
        ) from None
    return PageList(
        namespace=namespace,
        numerics=identity["numerics"]["probe"],
        paths=[path.relative_to(root).as_posix() for path in chain],
    )
