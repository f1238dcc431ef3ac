"""The store: artifacts of pages under one root, found by their tokens, kept within limits.

Any number of processes may use one root. Finding and reading take no lock; publishing and deleting take the
store's lock for the time of one page, or of a few evictions. What counts is on disk in the artifacts: the
catalog beside them is made anew from their headers whenever it is missing, damaged or deleted, also while the
store is in use.
"""

import logging
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import sleep, time
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import xxhash

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import Namespace, Tokens, as_tokens, canonical_json, page_key
from kestrel.identity import prefix_sha256 as sha256_of
from kestrel.store.artifact import HEX_SHA256, OpenPage, PageHeader, encode_header, parse_object, read_small
from kestrel.store.branches import find_trunk
from kestrel.store.catalog import (
    CATALOG_FILES,
    CATALOG_NAME,
    Catalog,
    CatalogDamaged,
    NewPage,
    PageRow,
    catalog_nbytes,
    create_catalog,
    little_endian,
    order_bytes,
)
from kestrel.store.census import IDENTITY_NAME, LOCK_NAME
from kestrel.store.counters import Counters
from kestrel.store.direct import read_ahead
from kestrel.store.eviction import Eviction, Limits
from kestrel.store.files import LOCK_POLL_SECONDS, FileTree, FolderLock, Holding, Names, page_names
from kestrel.store.inventory import Inventory
from kestrel.store.layout import PageLayout
from kestrel.store.match import Match, PageRef, Start, find_prefix
from kestrel.store.room import Room
from kestrel.store.verify import VerifyReport, verify_pages

__all__ = [
    "Eviction",
    "Limits",
    "Match",
    "NamespaceRow",
    "OpenPage",
    "PageRef",
    "PageRow",
    "Store",
    "Usage",
    "VerifyReport",
]

log = logging.getLogger("kestrel.store")

WRITE_SECONDS = 10.0  # how long a publish waits for another process that is publishing
EVICTIONS_AT_ONCE = 64  # under one hold of the lock
EVICTION_REST_SECONDS = 2 * LOCK_POLL_SECONDS  # between two, for those who wait for it
OPEN_SECONDS = 2.0  # how long opening waits before it does without removing leftovers
MAX_IDENTITY_NBYTES = 1 << 20
HEADER_NBYTES = 1 << 14  # a header of some 100 tensors; token ids take less
HOUR_SECONDS = 3600
KEY_TEXT = re.compile(r"[0-9a-f]{1,32}")

# SQLite result codes (https://sqlite.org/rescode.html) that mean the catalog is not one: ERROR (a table is
# missing), CORRUPT, CONSTRAINT (rows contradict each other), MISMATCH, NOTADB. Others are faults of the disk.
DAMAGE_CODES = {1, 11, 19, 20, 26}

T = TypeVar("T")


@dataclass(frozen=True)
class Usage:
    """What is under the root now."""

    bytes: int  # everything: artifacts, catalog, quarantine, strangers, leftovers
    files: int  # artifacts
    tokens: int  # sum of num_tokens over all pages
    strangers: int  # files that are not the store's; counted, never deleted
    quarantined: int  # damaged files moved aside; the first to go when space is needed
    stranger_bytes: int
    quarantined_bytes: int
    catalog_bytes: int


@dataclass(frozen=True)
class NamespaceRow:
    """One model identity that has pages."""

    digest: bytes
    files: int
    bytes: int


@contextmanager
def os_errors(action: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that says what was being done."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action}: {error}") from error


class Store:
    """The artifacts under one root. Open it before use; thread-safe.

    Every method raises StoreError when the store as a whole cannot be used (disk full, root read-only or
    unreadable, no room within the limits): the caller carries on without, and the next call tries afresh, so
    the store recovers by itself once the fault has ended. ArtifactError means that one file is at fault.
    """

    def __init__(self, root: Path, limits: Limits) -> None:
        self.root = Path(root)
        self.limits = limits
        self._counters = Counters()
        self._tree = FileTree(self.root)
        self._lock = FolderLock(self.root / LOCK_NAME)
        self._inventory = Inventory(self._tree, self._counters)
        self._room = Room(self._tree, limits, self._counters)
        self._catalog: Catalog | None = None
        self._spent_hour: int | None = None  # in which a page was refused: none is written before the next
        self._is_closed = True

    # Opening

    def open(self) -> "Store":
        """Create the root if needed, remove leftovers of killed processes, bring the catalog up to date.

        After a StoreError it counts as open all the same: the next call tries afresh.
        """
        self._is_closed = False
        try:
            totals = self._ask(Catalog.totals)
        except StoreError:
            raise
        except BaseException:
            self.close()
            raise
        log.info("%d artifacts, %d bytes in %s", totals.files, totals.nbytes, self.root)
        return self

    def close(self) -> None:
        """Close the catalog. Pages that are open stay readable."""
        with self._lock.threads:
            self._is_closed = True
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None

    def __enter__(self) -> "Store":
        return self.open() if self._is_closed else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current_catalog(self) -> Catalog:
        """The open catalog; opens it, or makes it anew from the artifacts, when it is not (any more) there."""
        catalog = self._catalog
        if catalog is not None and catalog.is_current():
            return catalog
        if self._is_closed:
            raise StoreError(f"the store {self.root} is closed")
        with os_errors(f"open the store {self.root}"):
            self._tree.create_root()
            with self._lock.held(OPEN_SECONDS) as holding:
                if holding is Holding.NOTHING:
                    raise StoreError(f"the catalog of {self.root} is being opened by another thread")
                if self._catalog is not None and self._catalog.is_current():
                    return self._catalog
                if self._catalog is not None:
                    self._catalog.close()
                self._catalog = self._open_catalog(holding)
                return self._catalog

    def _open_catalog(self, holding: Holding) -> Catalog:
        """Open the catalog file and compare it with the folders; make it anew if it is missing or damaged."""
        try:
            return self._open_reconciled(holding)
        except (sqlite3.Error, CatalogDamaged) as error:
            self._make_catalog(holding, error)
        try:
            return self._open_reconciled(holding)
        except (sqlite3.Error, CatalogDamaged) as error:
            raise StoreError(f"cannot make a catalog in {self.root}: {error}") from error

    def _open_reconciled(self, holding: Holding) -> Catalog:
        """Open the catalog file as it is and bring it up to date."""
        catalog = Catalog(self.root)
        try:
            self._inventory.start_over()  # this catalog may know less than the last one
            self._inventory.reconcile(catalog, holding)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def _make_catalog(self, holding: Holding, error: sqlite3.Error | CatalogDamaged) -> None:
        """Replace the catalog file by an empty one if `error` is a reason to; else raises StoreError."""
        if not is_damage(error):
            raise StoreError(f"cannot use the catalog of {self.root}: {error}") from error
        if holding is not Holding.ALL:
            message = f"the catalog of {self.root} has to be made anew, but another process is publishing"
            raise StoreError(message) from error
        is_new = not os.path.lexists(self.root / CATALOG_NAME)
        level = logging.INFO if is_new else logging.WARNING
        log.log(level, "making the catalog of %s from its artifacts: %s", self.root, error)
        try:
            for name in CATALOG_FILES:
                if (self.root / name).is_dir() and not (self.root / name).is_symlink():
                    self._inventory.move_to_quarantine((name,), "it is a folder in the place of the catalog")
            create_catalog(self.root)
        except sqlite3.Error as failure:
            raise StoreError(f"cannot make a catalog in {self.root}: {failure}") from failure
        self._counters.add("made_catalogs")

    def _ask(self, question: Callable[[Catalog], T]) -> T:
        """The answer of the catalog; if that turns out to be damaged, of one made anew from the artifacts."""
        catalog = self._current_catalog()
        try:
            return question(catalog)
        except (sqlite3.Error, CatalogDamaged) as error:
            self._discard_catalog(catalog, error)
        try:
            return question(self._current_catalog())
        except (sqlite3.Error, CatalogDamaged) as error:
            raise StoreError(f"the catalog of {self.root} failed twice: {error}") from error

    def _discard_catalog(self, catalog: Catalog, error: sqlite3.Error | CatalogDamaged) -> None:
        """Get a catalog that failed out of the way; raises StoreError if asking again would not help."""
        with os_errors(f"replace the catalog of {self.root}"), self._lock.held(OPEN_SECONDS) as holding:
            if self._catalog is not catalog or not catalog.is_current():
                return  # replaced meanwhile, by another thread or process
            self._make_catalog(holding, error)

    # Finding and reading

    def find_prefix(
        self,
        namespace: Namespace,
        tokens: Tokens,
        page_tokens: int,
        min_match: int,
        start: Start | None = None,
    ) -> Match:
        """The stored pages covering the longest prefix of `tokens`, to the token; see match.find_prefix.

        Pass the tokens without the last one if at least that one must be computed. Looks at the catalog only:
        a file may turn out to be missing or damaged when its page is opened.
        """
        return self._ask(
            lambda catalog: find_prefix(catalog, self.root, namespace, tokens, page_tokens, min_match, start)
        )

    def read_ahead(self, refs: Iterable[PageRef]) -> None:
        """Let the disk look for what `open_page` is going to read of these pages: all at once, not one by one."""
        for ref in refs:
            with suppress(ArtifactError, StoreError):  # opening it says so
                fd = self._tree.open_file(page_names(ref.namespace, ref.key))
                read_ahead(fd, HEADER_NBYTES)
                os.close(fd)

    def open_page(self, ref: PageRef, layout: PageLayout) -> OpenPage:
        """Open the artifact of a match and check all of its header and tokens against the match.

        Raises ArtifactError if the file is missing, damaged or another page; pass that to `quarantine`.
        """
        page = OpenPage(self._tree.open_file(page_names(ref.namespace, ref.key)), ref.path, layout)
        header = page.header
        found = {
            "namespace": header.namespace,
            "key": header.key,
            "parent": header.parent,
            "first position": header.first,
            "tokens": page.tokens.tobytes(),
            "prefix_sha256": header.prefix_sha256,
        }
        expected = {
            "namespace": ref.namespace.hex(),
            "key": ref.key.hex(),
            "parent": ref.parent.hex(),
            "first position": ref.first,
            "tokens": ref.token_bytes,
            "prefix_sha256": ref.prefix_sha256,
        }
        for what, value in expected.items():
            if found[what] != value:
                page.close()
                detail = "" if what == "tokens" else f": expected {value}, found {found[what]}"
                raise ArtifactError(f"{ref.path}: not the page that was looked for, other {what}{detail}")
        return page

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of these pages: a hit each, and the newest rank in the order of eviction."""
        wanted = list(keys)
        self._ask(lambda catalog: catalog.touch(wanted))

    # Saving

    def publish(
        self,
        namespace: Namespace,
        identity: Mapping[str, Any],
        layout: PageLayout,
        key: bytes,
        parent: bytes,
        first: int,
        tokens: Tokens,
        prefix_sha256: str,
        payload: Sequence[Any],
        ttl_seconds: float | None = None,
    ) -> int:
        """Write the artifact of one page; returns the bytes of the file, 0 if it is there already.

        ttl_seconds: it leaves when it is unused for so long; says nothing of a page that is there already.

        `payload` has one C-contiguous buffer of `layout.layer_nbytes(len(tokens))` bytes per layer; `key` is the
        page key of `parent` and `tokens`, `prefix_sha256` covers positions [0, first + len(tokens)). When this
        returns the page survives a power cut. Pages are evicted first if limits require it, never `parent`.
        Raises StoreError if it does not fit or cannot be written, or if what may be written in this hour is spent;
        ValueError if the arguments contradict each other.
        """
        tokens = as_tokens(tokens)
        identity_bytes = canonical_json(identity)
        check_page(namespace, identity_bytes, layout, key, parent, first, tokens, prefix_sha256, payload)

        def save(catalog: Catalog) -> int:
            if self._has_page(catalog, namespace.digest, key):
                return 0
            header = PageHeader(
                namespace=namespace.digest.hex(),
                key=key.hex(),
                parent=parent.hex(),
                first=first,
                num_tokens=len(tokens),
                prefix_sha256=prefix_sha256,
                layer_digests=tuple(xxhash.xxh3_128_hexdigest(memoryview(layer)) for layer in payload),
            )
            chunks = [encode_header(layout, header), *payload, tokens]
            nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)
            is_room_made = False
            while True:
                with self.writing() as holding:
                    count = self._inventory.reconcile(catalog, holding)
                    if self._has_page(catalog, namespace.digest, key):
                        return 0
                    now = time()
                    page = NewPage(
                        namespace.digest, key, parent, first, len(tokens), nbytes, now, order_bytes(tokens)
                    )
                    self._check_budget(catalog, nbytes, now)
                    plan = self._room.plan_page(catalog, count, page, nbytes + len(identity_bytes))
                    if is_room_made or len(plan) <= EVICTIONS_AT_ONCE:
                        self._room.evict(catalog, plan)
                        self.write_identity(namespace.digest, identity_bytes)
                        self._write_page(catalog, page, chunks, ttl_seconds)
                        return nbytes
                self._evict(catalog, plan)  # much has to leave: others get the lock in between
                is_room_made = True

        with os_errors(f"save a page in {self.root}"):
            written = self._ask(save)
        if not written:
            self._counters.add("present_pages")
        return written

    def _write_page(
        self, catalog: Catalog, page: NewPage, chunks: Sequence[Any], ttl_seconds: float | None
    ) -> None:
        """Write an artifact, of these buffers, and its row. The caller is `writing`."""
        names = page_names(page.namespace, page.key)
        if not self._tree.publish_file(names, chunks):
            raise StoreError(f"{self.page_path(page.namespace, page.key)} was put there by someone else")
        self._inventory.census.expect(names[:2])
        catalog.insert([page], int(page.created // HOUR_SECONDS), ttl_seconds)
        self._counters.add("published_pages")
        self._counters.add("published_bytes", page.nbytes)

    def _check_budget(self, catalog: Catalog, nbytes: int, now: float) -> None:
        """StoreError if so many more bytes are not to be written in the hour of `now`.

        Once a page was refused none is written until the hour ends, not even a smaller one: a prefix without its
        beginning is of no use. A clock that jumps starts another hour, no more.
        """
        limit = self.limits.write_bytes_per_hour
        if limit is None:
            return
        hour = int(now // HOUR_SECONDS)
        written = catalog.written_bytes(hour)
        if self._spent_hour != hour and written + nbytes <= limit:
            return
        self._spent_hour = hour
        self._counters.add("refused_pages")
        minutes = ceil(((hour + 1) * HOUR_SECONDS - now) / 60)
        raise StoreError(
            f"{written:,} bytes have been written to {self.root} in this hour and a page of {nbytes:,} is one too many "
            f"(write_bytes_per_hour={limit:,}); the next hour begins in {minutes} min"
        )

    def _has_page(self, catalog: Catalog, namespace: bytes, key: bytes) -> bool:
        """Whether the catalog knows a page and a file of its size is in place; a file of another size is moved."""
        page = catalog.find_page(namespace, key)
        if page is None:
            return False
        names = page_names(namespace, key)
        status = self._tree.status(names)
        if status is not None and stat.S_ISREG(status.st_mode) and status.st_size == page.nbytes:
            return True
        found = (
            "nothing" if status is None else f"{status.st_size} bytes of kind {stat.filemode(status.st_mode)}"
        )
        self._inventory.set_aside(catalog, names, f"expected a file of {page.nbytes} bytes, found {found}")
        return False

    def write_identity(self, namespace: bytes, identity_bytes: bytes) -> None:
        """Write identity.json of a namespace digest unless it is there; what else has its name is moved away.

        The caller is `writing`. OSError as the system gives it.
        """
        names = (namespace.hex()[:16], IDENTITY_NAME)
        if self._tree.status(names) is not None:
            try:
                if self._read_small(names) == identity_bytes:
                    return
                reason = "is not the identity of its namespace"
            except ArtifactError as error:
                reason = str(error)
            self._inventory.move_to_quarantine(names, reason)
        self._tree.publish_file(names, [identity_bytes])

    def _read_small(self, names: Names) -> bytes:
        """Content of a small regular file; ArtifactError if it is something else."""
        return read_small(self._tree.open_file(names), self.root.joinpath(*names), MAX_IDENTITY_NBYTES)

    def covers(self, namespace: Namespace, parent: bytes, tokens: Tokens) -> bool:
        """Whether a child of `parent` is stored that begins with `tokens` and goes on: no need to save these."""
        ordered = order_bytes(as_tokens(tokens))

        def ask_next(catalog: Catalog) -> bool:
            # Blobs that begin with another one follow it directly in sorted order.
            page = catalog.find_next_child(namespace.digest, parent, ordered)
            return page is not None and page.tokens.startswith(ordered)

        return self._ask(ask_next)

    def remove_covered(self, namespace: Namespace, parent: bytes, tokens: Tokens) -> int:
        """Remove the pages that the page of `parent` and `tokens` makes redundant; returns how many.

        Those are the children of `parent` whose tokens are a proper prefix of `tokens` and that nothing needs:
        no child, not pinned, not protected, not published. Removes nothing unless the covering page is in the catalog.
        """
        tokens = as_tokens(tokens)

        def remove(catalog: Catalog) -> int:
            if catalog.find_page(namespace.digest, page_key(parent, tokens)) is None:
                return 0
            covered = catalog.prefix_children(namespace.digest, parent, order_bytes(tokens)[:-4])
            pages = [row for page in covered for row in catalog.rows_of(page.key)]
            evictions = [
                self._room.eviction(page, "covered by a longer page")
                for page in pages
                if page.namespace == namespace.digest and page.num_children == 0 and not page.pinned
                if not self._room.is_published(page)
            ]
            if not evictions:
                return 0
            with self.writing():
                return len(self._room.evict(catalog, evictions))

        with os_errors(f"remove covered pages in {self.root}"):
            return self._ask(remove)

    @contextmanager
    def writing(self) -> Iterator[Holding]:
        """Hold the store's lock, of this process and against others; StoreError if it cannot be had in time."""
        with self._lock.held(WRITE_SECONDS) as holding:
            if holding is not Holding.ALL:
                raise StoreError(
                    f"{self._lock.path} has been held by another {'process' if holding.value else 'thread'} "
                    f"for {WRITE_SECONDS:.0f} s"
                )
            yield holding

    # Keeping and evicting

    def pin(self, keys: Iterable[bytes]) -> int:
        """Keep these pages, and thereby their ancestors, until unpinned; returns how many of them are stored.

        Pins live in the catalog: they outlast a restart, but not the loss of the catalog.
        """
        wanted = list(keys)
        return self._ask(lambda catalog: catalog.set_pinned(wanted, True))

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Let these pages be evicted again; returns how many of them are stored."""
        wanted = list(keys)
        return self._ask(lambda catalog: catalog.set_pinned(wanted, False))

    def expire(self, keys: Iterable[bytes], seconds: float | None) -> int:
        """Let these pages leave with the next `sweep` once they are unused for so long, whatever the limits say.

        None takes that away. Returns how many of the keys are stored. Lives in the catalog, like a pin.
        """
        wanted = list(keys)
        return self._ask(lambda catalog: catalog.set_ttl(wanted, seconds))

    def protect(self, keys: Iterable[bytes]) -> AbstractContextManager[None]:
        """Keep this process from evicting these pages, and thereby their ancestors, inside a `with` block.

        Another process may still evict them: that costs a page its name, not the readers who have it open.
        """
        return self._room.protect(keys)

    def sweep(self, dry_run: bool = False, in_vain: bool = True) -> list[Eviction]:
        """Remove expired pages and whatever exceeds the limits; returns what left, or would leave.

        Goes as far as possible where pinned pages or strangers keep it from reaching a limit. in_vain: also where
        others fill the disk. If not, only what has expired leaves then: emptying the store would help nobody.
        """

        def remove(catalog: Catalog) -> list[Eviction]:
            with self.writing() as holding:
                plan = self._room.plan_sweep(catalog, self._inventory.reconcile(catalog, holding), in_vain)
            return plan if dry_run else self._evict(catalog, plan)

        with os_errors(f"sweep {self.root}"):
            return self._ask(remove)

    def remove(self, pages: Iterable[PageRow]) -> list[Eviction]:
        """Remove these pages, the last ones of a prefix first; returns what left.

        A page stays while it is pinned, protected, or continued by a page that stays.
        """
        ordered = sorted(pages, key=lambda page: page.first, reverse=True)

        def remove_all(catalog: Catalog) -> list[Eviction]:
            return self._evict(catalog, [self._room.eviction(page, "removed on request") for page in ordered])

        with os_errors(f"remove pages from {self.root}"):
            return self._ask(remove_all)

    def _evict(self, catalog: Catalog, plan: Sequence[Eviction]) -> list[Eviction]:
        """Carry out a plan in pieces, so that whoever saves gets the lock in between; returns what left."""
        done: list[Eviction] = []
        for start in range(0, len(plan), EVICTIONS_AT_ONCE):
            if start:
                sleep(EVICTION_REST_SECONDS)
            with self.writing():
                done += self._room.evict(catalog, plan[start : start + EVICTIONS_AT_ONCE])
        return done

    # Damage and files that come and go

    def quarantine(self, path: Path, reason: str) -> None:
        """Move a damaged artifact to <root>/quarantine and forget its page; logged and counted.

        If the file is gone the page is just forgotten. Raises ValueError for a path that is no artifact's.
        """
        names = self._inventory.artifact_names(path)
        with os_errors(f"quarantine {path}"):
            self._ask(lambda catalog: self._inventory.set_aside(catalog, names, reason))

    def adopt(self, path: Path) -> PageRow:
        """Add an artifact that someone else put into place (a pull, a copy) to the catalog; returns its row.

        Checks its header and tokens, not yet its layers. Raises ArtifactError if it is not an artifact, leaving
        it where it is, and ValueError for a path where none belongs. The limits are enforced by the next save.
        """
        names = self._inventory.artifact_names(path)

        def add(catalog: Catalog) -> PageRow:
            page = self._inventory.read_new_page(names)
            self._counters.add("adopted_pages", catalog.insert([page]))
            return next(row for row in catalog.rows_of(page.key) if row.namespace == page.namespace)

        with os_errors(f"adopt {path}"):
            return self._ask(add)

    def verify(
        self, progress: Callable[[int, int], None] | None = None, quarantine: bool = False
    ) -> VerifyReport:
        """Read every byte of every artifact and check digests, names and chains; damaged ones may be moved away.

        `progress` is called with (files done, files in all) after each. Takes as long as reading the store takes.
        """
        self.usage()  # finds what was put there meanwhile
        pages = self.list_pages()
        sound: list[PageRow] = []
        damaged: list[tuple[Path, str]] = []
        num_orphans = 0
        with os_errors(f"verify {self.root}"):
            for done, verdict in enumerate(verify_pages(self._tree, pages), 1):
                if verdict.damage is None:
                    sound.append(verdict.page)
                    num_orphans += verdict.is_orphan
                elif self.find_row(verdict.page.key) is not None:  # else it was evicted meanwhile
                    damaged.append((verdict.path, verdict.damage))
                    if quarantine:
                        self.quarantine(verdict.path, verdict.damage)
                if progress is not None:
                    progress(done, len(pages))
        return VerifyReport(len(sound), sum(page.nbytes for page in sound), num_orphans, tuple(damaged))

    # Looking

    def usage(self) -> Usage:
        """Bytes and counts of everything under the root; while this process publishes, as of just before."""
        with os_errors(f"count {self.root}"):
            return self._ask(self._count_usage)

    def _count_usage(self, catalog: Catalog) -> Usage:
        """Usage from a fresh walk, or from the last one if another thread is at work."""
        with self._lock.held(0.0) as holding:
            count = self._inventory.count if holding is Holding.NOTHING else None
            count = count or self._inventory.reconcile(catalog, holding)
        totals = catalog.totals()
        catalog_bytes, _ = catalog_nbytes(self.root)
        return Usage(
            bytes=totals.nbytes + count.other_bytes + catalog_bytes,
            files=totals.files,
            tokens=totals.tokens,
            strangers=count.strangers,
            quarantined=len(count.quarantined),
            stranger_bytes=count.stranger_bytes,
            quarantined_bytes=count.quarantined_bytes,
            catalog_bytes=catalog_bytes,
        )

    def stats(self) -> dict[str, int]:
        """What this object did since it was made, see counters.NAMES."""
        return self._counters.read()

    def page_path(self, namespace: bytes, key: bytes) -> Path:
        """Where the artifact of a page is, or would be; `namespace` is the full digest."""
        return self.root.joinpath(*page_names(namespace, key))

    def list_pages(self, namespace: bytes | None = None) -> list[PageRow]:
        """All pages, or those of one namespace digest, most recently used first."""
        return self._ask(lambda catalog: catalog.rows(namespace))

    def list_namespaces(self) -> list[NamespaceRow]:
        """The model identities that have pages."""
        found = self._ask(Catalog.namespaces)
        return [NamespaceRow(digest, files, nbytes) for digest, files, nbytes in found]

    def load_identity(self, namespace: bytes) -> dict[str, Any]:
        """The identity behind a namespace digest; ArtifactError if identity.json is missing or another one."""
        names = (namespace.hex()[:16], IDENTITY_NAME)
        with os_errors(f"read {self.root.joinpath(*names)}"):
            content = self._read_small(names)
        if xxhash.xxh3_128_digest(content) != namespace:
            raise ArtifactError(f"{self.root.joinpath(*names)} is not the identity of {namespace.hex()}")
        return parse_object(content, str(self.root.joinpath(*names)))

    def find_row(self, key: bytes) -> PageRow | None:
        """The catalog row of a page, or None."""
        rows = self._ask(lambda catalog: catalog.rows_of(key))
        return rows[0] if rows else None

    def resolve_key(self, text: str) -> bytes:
        """The key that begins with these hex digits; StoreError unless it is exactly one."""
        text = text.strip().lower()
        if not KEY_TEXT.fullmatch(text):
            raise StoreError(f"a page key is up to 32 hex digits, found {text[:80]!r}")
        low, high = bytes.fromhex(text.ljust(32, "0")), bytes.fromhex(text.ljust(32, "f"))
        found = self._ask(lambda catalog: catalog.keys_between(low, high, 5))
        if not found:
            raise StoreError(
                f"no page in {self.root} has a key beginning with {text}; `kestrel kv ls` lists them"
            )
        if len(set(found)) > 1:
            some = ", ".join(key.hex() for key in found)
            raise StoreError(f"several keys begin with {text}: {some}; give more digits")
        return found[0]

    def chain(self, key: bytes) -> tuple[PageRow, ...]:
        """A page and the pages before it, from position 0; StoreError if one of them is not stored.

        Of a tenant's page the first ones may be those of a prefix that all tenants share, in another namespace.
        """

        def follow(catalog: Catalog) -> tuple[PageRow, ...]:
            rows = catalog.rows_of(key)
            if not rows:
                raise StoreError(f"page {key.hex()} is not in {self.root}")
            chain = [rows[0]]
            while chain[-1].parent != chain[-1].namespace:
                page = chain[-1]
                parents = [row for row in catalog.rows_of(page.parent) if row.namespace == page.namespace]
                if not parents:
                    trunk = find_trunk(page, catalog.rows_ending_at(page.first))
                    parents = [] if trunk is None else [trunk]
                if not parents or parents[0].first >= page.first:
                    raise StoreError(
                        f"page {page.parent.hex()}, which precedes position {page.first} of {key.hex()}, "
                        f"is not in {self.root}: the page is out of reach until that prefix is computed again"
                    )
                chain.append(parents[0])
            return tuple(reversed(chain))

        return self._ask(follow)

    def prefix_tokens(self, key: bytes) -> Tokens:
        """All token ids from position 0 to the end of a page."""
        pages = self.chain(key)
        blobs = self._ask(lambda catalog: [catalog.page_tokens(page.id) for page in pages])
        return np.frombuffer(b"".join(little_endian(blob) for blob in blobs), dtype="<i4")


def is_damage(error: sqlite3.Error | CatalogDamaged) -> bool:
    """Whether an error means that the catalog file is broken, rather than that the disk or the lock is."""
    if isinstance(error, CatalogDamaged):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # absent where Python itself found something undecodable
    return code is None or code & 0xFF in DAMAGE_CODES


def check_page(
    namespace: Namespace,
    identity_bytes: bytes,
    layout: PageLayout,
    key: bytes,
    parent: bytes,
    first: int,
    tokens: Tokens,
    prefix_sha256: str,
    payload: Sequence[Any],
) -> None:
    """ValueError if the arguments of `publish` contradict each other."""
    if xxhash.xxh3_128_digest(identity_bytes) != namespace.digest:
        raise ValueError(f"the identity does not hash to the namespace {namespace.digest.hex()}")
    if not len(tokens):
        raise ValueError("a page holds at least one token")
    if key != page_key(parent, tokens):
        raise ValueError(
            f"expected key {page_key(parent, tokens).hex()} of parent and tokens, found {key.hex()}"
        )
    if (first == 0) != (parent == namespace.digest) or first < 0:
        raise ValueError(f"a page at position {first} cannot have the parent {parent.hex()}")
    if not HEX_SHA256.fullmatch(prefix_sha256):
        raise ValueError(f"prefix_sha256 must be 64 hex digits, found {prefix_sha256!r}")
    if first == 0 and prefix_sha256 != sha256_of(tokens):
        raise ValueError("prefix_sha256 of a page at position 0 must be that of its tokens")
    views = [memoryview(layer) for layer in payload]
    expected_sizes = [layout.layer_nbytes(len(tokens))] * layout.num_layers
    if [view.nbytes for view in views] != expected_sizes:
        raise ValueError(
            f"expected layers of {expected_sizes} bytes, found {[view.nbytes for view in views]}"
        )
    if not all(view.c_contiguous for view in views):
        raise ValueError("layers must be C-contiguous buffers")
