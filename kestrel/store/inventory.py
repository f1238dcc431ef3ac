"""Keeping the catalog in line with the files: new artifacts, lost ones, damaged ones, leftovers."""

import logging
import os
import secrets
from pathlib import Path

from kestrel.errors import ArtifactError, StoreError
from kestrel.store.artifact import OpenPage
from kestrel.store.catalog import Catalog, NewPage, order_bytes
from kestrel.store.census import QUARANTINE_NAME, Census, Count, is_page_folder, is_page_name
from kestrel.store.counters import Counters
from kestrel.store.files import FileTree, Holding, Names, page_names

log = logging.getLogger("kestrel.store")


class Inventory:
    """What the store knows of the files below its root, and what it does about those that are not as they should.

    Used by one thread of a process at a time (under the store's lock), except `set_aside`, `forget` and
    `read_new_page`, which any thread may use.
    """

    def __init__(self, tree: FileTree, counters: Counters) -> None:
        self.tree = tree
        self.counters = counters
        self.census = Census(tree)
        self.count: Count | None = None  # of the last walk

    def start_over(self) -> None:
        """Take nothing for known: the next walk looks at every file again."""
        self.census = Census(self.tree)

    def reconcile(self, catalog: Catalog, holding: Holding) -> Count:
        """Bring the catalog in line with the folders that changed since the last time; returns what is there.

        Unknown artifacts are read and added, or quarantined; rows without a file are dropped; and if nobody
        else can be writing, temporary files are leftovers and removed. Raises OSError.
        """
        try:
            count = self.census.walk()
            while self.reconcile_folders(catalog, count, holding):
                count = self.census.walk()
        except BaseException:
            self.start_over()  # what the walk took for seen has not been dealt with
            raise
        self.count = count
        return count

    def reconcile_folders(self, catalog: Catalog, count: Count, holding: Holding) -> bool:
        """One round of `reconcile`; True if it moved or removed files, so that the count is out of date."""
        changed = False
        if holding is Holding.ALL:
            for names in count.temps:
                log.info("removing leftover %s", self.path(names))
                changed |= self.tree.remove_file(names)
        for names in count.misfits:
            self.set_aside(catalog, names, "it is not a regular file")
            changed = True
        num_before = catalog.totals().files
        num_adopted = num_lost = 0
        for folder, known in self.known_files(catalog, count).items():
            there = set(self.census.pages_in(folder))
            new_pages, num_moved = self.read_new_pages(folder, there - known)
            num_adopted += catalog.insert(new_pages) if new_pages else 0
            changed |= num_moved > 0
            for name in known - there:
                if self.tree.status((*folder, name)) is None:
                    num_lost += self.forget(catalog, (*folder, name))
        if num_adopted or num_lost:
            log.info("found %d new artifacts in %s, %d are gone", num_adopted, self.tree.root, num_lost)
            self.counters.add("adopted_pages", num_adopted)
            self.counters.add("lost_pages", num_lost)
            if num_before == 0:
                catalog.order_by_age()
            catalog.truncate_log()
        return changed

    def known_files(self, catalog: Catalog, count: Count) -> dict[Names, set[str]]:
        """Names of the artifacts the catalog has in each folder that was listed anew, or is gone."""
        known: dict[Names, set[str]] = {folder: set() for folder in (*count.listed, *count.vanished)}
        if self.census.num_walks == 1:
            pages = catalog.names()  # it may also have pages in folders that went before our time
        else:
            first_bytes = {int(folder[1], 16) for folder in known}
            pages = [page for byte in first_bytes for page in catalog.names_under(byte)]
        for namespace, key in pages:
            *folder, name = page_names(namespace, key)
            if self.census.num_walks == 1:
                known.setdefault(tuple(folder), set()).add(name)
            elif tuple(folder) in known:
                known[tuple(folder)].add(name)
        return known

    def read_new_pages(self, folder: Names, names: set[str]) -> tuple[list[NewPage], int]:
        """Rows for unknown artifacts of a folder, and how many turned out damaged and were moved away."""
        pages = []
        num_moved = 0
        for name in names:
            try:
                pages.append(self.read_new_page((*folder, name)))
            except ArtifactError as error:
                num_moved += self.move_to_quarantine((*folder, name), str(error))
            except StoreError as error:
                if not isinstance(error.__cause__, PermissionError):
                    raise
                log.warning("leaving what belongs to someone else: %s", error)
        return pages, num_moved

    def read_new_page(self, names: Names) -> NewPage:
        """The catalog row of an artifact, from its header; ArtifactError if it is not the one its name says."""
        path = self.path(names)
        with OpenPage(self.tree.open_file(names), path, None) as page:
            status = os.fstat(page.fd)
        header = page.header
        namespace, key = bytes.fromhex(header.namespace), bytes.fromhex(header.key)
        if page_names(namespace, key) != names:
            raise ArtifactError(f"{path} holds page {header.key} of namespace {header.namespace}")
        return NewPage(
            namespace=namespace,
            key=key,
            parent=bytes.fromhex(header.parent),
            first=header.first,
            num_tokens=header.num_tokens,
            nbytes=status.st_size,
            created=status.st_mtime,
            tokens=order_bytes(page.tokens),
        )

    def set_aside(self, catalog: Catalog, names: Names, reason: str) -> None:
        """Quarantine an artifact, then drop its row."""
        self.move_to_quarantine(names, reason)
        self.forget(catalog, names)

    def move_to_quarantine(self, names: Names, reason: str) -> bool:
        """Move a file (or link, or folder) that is not what its name says; False if it is gone already."""
        target = (QUARANTINE_NAME, f"{names[-1]}.{secrets.token_hex(4)}")
        if not self.tree.move(names, target):
            log.warning("%s is gone: %s", self.path(names), reason)
            return False
        self.counters.add("quarantined_files")
        log.warning("moved %s to %s: %s", self.path(names), "/".join(target), reason)
        return True

    def forget(self, catalog: Catalog, names: Names) -> int:
        """Drop the rows of an artifact whose file is gone; returns how many there were."""
        dropped = 0
        for page in catalog.rows_of(bytes.fromhex(names[-1][:32])):
            if page_names(page.namespace, page.key) == names:
                with catalog.transaction():
                    dropped += catalog.remove(page, only_leaf=False)
        return dropped

    def artifact_names(self, path: Path) -> Names:
        """A path as names below the root; ValueError unless it is where an artifact belongs."""
        path = Path(path)
        names = path.relative_to(self.tree.root).parts if path.is_relative_to(self.tree.root) else ()
        if len(names) != 3 or not is_page_folder(names[:2]) or not is_page_name(names[:2], names[2]):
            root = self.tree.root
            raise ValueError(f"{path} is not <root>/<namespace>/<2 digits>/<key>.safetensors below {root}")
        return names

    def path(self, names: Names) -> Path:
        """Names below the root as a path, for messages."""
        return self.tree.root.joinpath(*names)
