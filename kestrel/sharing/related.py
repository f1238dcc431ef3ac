"""Namespaces of the same model computed with other numerics: by other kernels, or imported from elsewhere."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import Namespace
from kestrel.sharing.listing import Listing
from kestrel.store.artifact import parse_object, read_small
from kestrel.store.census import IDENTITY_NAME, NAMESPACE_NAME
from kestrel.store.files import READ_FLAGS

MAX_IDENTITY_NBYTES = 1 << 20


@dataclass(frozen=True)
class RelatedNamespace:
    """Pages of the same model that are not bit for bit what would be computed here."""

    namespace: Namespace
    origin: str  # what is different, in a few words


class RelatedNamespaces:
    """Finds the namespaces, in a store and among what is published, that differ from one in numerics only."""

    def __init__(
        self, root: Path, listing: Listing | None, identity: Mapping[str, Any], namespace: Namespace
    ) -> None:
        self._root = root
        self._listing = listing
        self._own = without_numerics(identity)
        self._name = namespace.name
        self._known: dict[str, RelatedNamespace | None] = {}  # by folder; an identity never changes

    def find(self) -> list[RelatedNamespace]:
        """All of them, in a fixed order. StoreError if the store cannot be read."""
        for folder, text in self._identities().items():
            self._known[folder] = self._relation(folder, text)
        return [related for _, related in sorted(self._known.items()) if related is not None]

    def _identities(self) -> dict[str, bytes]:
        """The identities not known yet, by the folder they name."""
        try:
            names = {
                entry.name
                for entry in os.scandir(self._root)
                if NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            }
        except FileNotFoundError:
            names = set()
        except OSError as error:
            raise StoreError(f"cannot list {self._root}: {error}") from error
        published = self._listing.namespaces if self._listing is not None else {}
        texts = {digest.hex()[:16]: page.identity_text.encode("ascii") for digest, page in published.items()}
        for name in names - texts.keys() - self._known.keys():
            try:
                path = self._root / name / IDENTITY_NAME
                texts[name] = read_small(os.open(path, READ_FLAGS), path, MAX_IDENTITY_NBYTES)
            except (OSError, ArtifactError):  # no identity, no relation; it may be written later
                pass
        return {name: text for name, text in texts.items() if name not in self._known and name != self._name}

    def _relation(self, folder: str, text: bytes) -> RelatedNamespace | None:
        digest = xxhash.xxh3_128_digest(text)
        try:
            identity = parse_object(text, folder)
        except ArtifactError:
            return None
        if digest.hex()[:16] != folder or without_numerics(identity) != self._own:
            return None
        return RelatedNamespace(Namespace(digest), describe_numerics(identity))


def without_numerics(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for KV to mean the same, even if it was rounded differently."""
    return {name: value for name, value in identity.items() if name != "numerics"}


def describe_numerics(identity: Mapping[str, Any]) -> str:
    """Whose numerics, in a few words."""
    numerics = identity.get("numerics")
    if not isinstance(numerics, Mapping):
        return "numerics unknown"
    imported = numerics.get("imported")
    return f"imported from {imported}" if imported else f"numerics {str(numerics.get('probe'))[:8]}"
