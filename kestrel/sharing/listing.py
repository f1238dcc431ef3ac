"""What is published: the marks below a store's root, found and looked up without DVC and without any data."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import Tokens, as_tokens, page_key
from kestrel.sharing.mark import MARK_SUFFIX, PublishedPage, read_mark
from kestrel.store.census import is_settled

log = logging.getLogger("kestrel.sharing")

LOOK_SECONDS = 5.0  # marks that git brings while a server runs are noticed this much later at most


@dataclass
class _Folder:
    """One folder of marks as it was when last listed."""

    modified_ns: int
    listed_ns: int
    marks: dict[str, tuple[tuple[int, int], PublishedPage | None]] = field(default_factory=dict)


class Listing:
    """All published pages below one root. `refresh` looks at the disk, everything else at what that found.

    Safe to use from several threads. A mark that cannot be read is left out and logged once.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.unreadable: dict[Path, str] = {}
        self._folders: dict[Path, _Folder] = {}
        self._pages: dict[tuple[bytes, bytes], PublishedPage] = {}
        self._sizes: dict[tuple[bytes, bytes], list[int]] = {}  # (namespace, parent): lengths of its children
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def refresh(self, at_most_every: float = 0.0) -> "Listing":
        """Look for marks that came, changed or went, unless that was done in the last `at_most_every` seconds."""
        with self._lock:
            if time.monotonic() - self._looked >= at_most_every:
                if self._walk():
                    self._index()
                self._looked = time.monotonic()
        return self

    @property
    def pages(self) -> list[PublishedPage]:
        """Every published page, in order of position; pages of one prefix follow no other order."""
        return sorted(self._pages.values(), key=lambda page: (page.namespace, page.first, page.key))

    @property
    def namespaces(self) -> dict[bytes, PublishedPage]:
        """Any one page of each namespace that has some."""
        return {namespace: page for (namespace, _), page in self._pages.items()}

    def find(self, namespace: bytes, key: bytes) -> PublishedPage | None:
        """The published page with this key, or None."""
        return self._pages.get((namespace, key))

    def follow(self, namespace: bytes, tokens: Tokens) -> list[PublishedPage]:
        """The published pages that cover most of a prompt from position 0, each wholly.

        A page is recognised by its key alone, the digest of all tokens up to its end, so no data is needed; for
        the same reason a page that goes on otherwise than the prompt is not found even if it begins like it.
        """
        pages, sizes = self._pages, self._sizes  # replaced as a whole by refresh
        best: list[PublishedPage] = []
        places: list[tuple[bytes, list[PublishedPage]]] = [(namespace, [])]
        while places:
            parent, trail = places.pop()
            first = trail[-1].num_prefix_tokens if trail else 0
            if first > (best[-1].num_prefix_tokens if best else 0):
                best = trail
            for num_tokens in sizes.get((namespace, parent), ()):
                if first + num_tokens > len(tokens):
                    continue
                page = pages.get((namespace, page_key(parent, as_tokens(tokens[first : first + num_tokens]))))
                if page is not None and (page.parent, page.first) == (parent, first):
                    places.append((page.key, [*trail, page]))
        return best

    def chain(self, page: PublishedPage) -> list[PublishedPage]:
        """A page and the published pages before it, from position 0 if all of them are published."""
        chain = [page]
        while chain[0].first:
            before = self.find(page.namespace, chain[0].parent)
            if before is None or before.first >= chain[0].first:
                break
            chain.insert(0, before)
        return chain

    def prefixes(self) -> list[PublishedPage]:
        """The pages that a prefix ends with: those with a name, and those that nothing published continues."""
        continued = {(page.namespace, page.parent) for page in self._pages.values()}
        ends = [
            page
            for page in self._pages.values()
            if page.prefix is not None or (page.namespace, page.key) not in continued
        ]
        return sorted(ends, key=lambda page: (page.namespace, page.prefix or "~", page.key))

    def resolve(self, words: Sequence[str]) -> list[PublishedPage]:
        """The prefixes with these names or whose keys begin with these digits. StoreError for an unknown word."""
        found = []
        for word in words:
            named = [page for page in self._pages.values() if page.prefix == word]
            keyed = [page for page in self._pages.values() if page.key.hex().startswith(word.lower())]
            if not named and len(keyed) > 1:
                some = ", ".join(page.key.hex() for page in keyed[:5])
                raise StoreError(f"several published keys begin with {word}: {some}; give more digits")
            if not named and not keyed:
                names = sorted({page.prefix for page in self._pages.values() if page.prefix is not None})
                raise StoreError(
                    f"nothing published is called {word} or has a key beginning with it; "
                    f"names: {', '.join(names) or 'none'} (see `kestrel kv ls --published`)"
                )
            found += named or keyed
        return found

    def with_ancestors(self, ends: Iterable[PublishedPage]) -> list[PublishedPage]:
        """These pages and all published ones before them, each once, parents before their children."""
        pages = {page.key: page for end in ends for page in self.chain(end)}
        return sorted(pages.values(), key=lambda page: (page.namespace, page.first, page.key))

    # Looking

    def _walk(self) -> bool:
        """Read the marks that are new or changed; True if anything is different from the last time."""
        changed = False
        found: dict[Path, _Folder] = {}
        for path, modified_ns in _page_folders(self.root):
            known = self._folders.get(path)
            if known and known.modified_ns == modified_ns and is_settled(modified_ns, known.listed_ns):
                found[path] = known
                continue
            folder = self._list(path, modified_ns, known)
            found[path] = folder
            changed |= known is None or known.marks != folder.marks
        changed |= found.keys() != self._folders.keys()
        self._folders = found
        return changed

    def _list(self, path: Path, modified_ns: int, known: _Folder | None) -> _Folder:
        folder = _Folder(modified_ns, time.time_ns())
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(MARK_SUFFIX)]
        for name in names:
            status = os.stat(path / name, follow_symlinks=False)
            version = (status.st_mtime_ns, status.st_ino)
            before = known.marks.get(name) if known is not None else None
            if before is not None and before[0] == version:
                folder.marks[name] = before
                continue
            page = None
            try:
                page = read_mark(path / name)
                self.unreadable.pop(path / name, None)
            except ArtifactError as error:
                if self.unreadable.get(path / name) != str(error):
                    log.warning("left out of what is published: %s", error)
                self.unreadable[path / name] = str(error)
            folder.marks[name] = (version, page)
        return folder

    def _index(self) -> None:
        pages: dict[tuple[bytes, bytes], PublishedPage] = {}
        sizes: dict[tuple[bytes, bytes], set[int]] = {}
        for folder in self._folders.values():
            for _, page in folder.marks.values():
                if page is not None:
                    pages[page.namespace, page.key] = page
                    sizes.setdefault((page.namespace, page.parent), set()).add(page.num_tokens)
        self._pages = pages
        self._sizes = {place: sorted(lengths) for place, lengths in sizes.items()}


def _page_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders that artifacts are in, with their times of modification; none if there is no root."""
    if not root.is_dir():
        return
    for namespace in _folders(root, 16):
        for folder in _folders(namespace, 2):
            yield folder, os.stat(folder).st_mtime_ns


def _folders(path: Path, num_digits: int) -> list[Path]:
    with os.scandir(path) as entries:
        return [
            path / entry.name
            for entry in entries
            if len(entry.name) == num_digits
            and set(entry.name) <= set("0123456789abcdef")
            and entry.is_dir(follow_symlinks=False)
        ]
