"""The catalog: one SQLite row a page, for finding pages and for what an immutable artifact cannot hold itself.

Disposable: everything in `pages` is a copy of artifact headers, and losing `uses` costs hit counts, the order of
last use, and pins. Methods raise sqlite3.Error; the store decides which of those mean "throw it away".
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from kestrel.identity import Tokens

CATALOG_NAME = "catalog.sqlite3"
CATALOG_FILES = (CATALOG_NAME, f"{CATALOG_NAME}-wal", f"{CATALOG_NAME}-shm")
VERSION = 3  # of the tables below; another version is rebuilt from the artifacts
APPLICATION_ID = 0x4B535452  # "KSTR"
BUSY_SECONDS = 5.0

# A 256-token page is a 1 KiB blob in two b-trees: pages of 8 KiB keep it out of overflow pages.
SQLITE_PAGE_NBYTES = 8192
# The write-ahead log starts over after this many pages, and transactions are cut to touch few of them, so that
# the files beside the catalog stay below LOG_NBYTES and the store can count on that.
CHECKPOINT_PAGES = 24
TOUCHES_PER_TRANSACTION = 16
REMOVALS_PER_TRANSACTION = 8
LOG_NBYTES = 512 << 10
# What one more row can add to the database file: its page in each b-tree, split once.
ROW_NBYTES = 8 * SQLITE_PAGE_NBYTES

SCHEMA = f"""
PRAGMA page_size = {SQLITE_PAGE_NBYTES};
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE pages (            -- copied from the artifact's header, never changed
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    namespace BLOB NOT NULL,
    parent BLOB NOT NULL,
    first INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    created REAL NOT NULL,
    tokens BLOB NOT NULL,       -- int32 big-endian, so that memcmp orders children by their tokens
    UNIQUE (key, namespace)
);
CREATE INDEX children ON pages (namespace, parent, tokens);
CREATE TABLE uses (             -- small rows of their own: a hit on 32 pages rewrites few SQLite pages
    page INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL,      -- order of last use; a clock that jumps cannot confuse it
    last_used REAL NOT NULL,
    hits INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    num_children INTEGER NOT NULL
);
CREATE INDEX leaves ON uses (turn) WHERE num_children = 0 AND pinned = 0;
CREATE TABLE ttls (             -- pages with a time to live of their own
    page INTEGER PRIMARY KEY,
    seconds REAL NOT NULL       -- without use
);
CREATE TABLE totals (nbytes INTEGER NOT NULL, files INTEGER NOT NULL, tokens INTEGER NOT NULL, turn INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0, 0);
CREATE TABLE written (hour INTEGER NOT NULL, nbytes INTEGER NOT NULL); -- bytes written in the last such hour
INSERT INTO written VALUES (0, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""

ROW_COLUMNS = (
    "id, namespace, key, parent, first, num_tokens, nbytes,"
    " created, last_used, turn, hits, num_children, pinned"
)
ROWS = f"SELECT {ROW_COLUMNS} FROM pages JOIN uses ON uses.page = id"
STORED_COLUMNS = "id, key, parent, first, num_tokens, nbytes, num_children, tokens"
STORED = f"SELECT {STORED_COLUMNS} FROM pages JOIN uses ON page = id"


@dataclass(frozen=True)
class PageRow:
    """What the catalog knows of one page, without its tokens. Times are seconds since the epoch."""

    id: int
    namespace: bytes  # full digest
    key: bytes
    parent: bytes
    first: int
    num_tokens: int
    nbytes: int  # of the artifact file
    created: float
    last_used: float
    turn: int  # order of last use; smaller is longer ago
    hits: int
    num_children: int
    pinned: bool


class StoredPage(NamedTuple):
    """A page as the search for a prefix needs it."""

    id: int
    key: bytes
    parent: bytes
    first: int
    num_tokens: int
    nbytes: int
    num_children: int
    tokens: bytes  # int32 big-endian


class NewPage(NamedTuple):
    """A row to insert; it counts as used when it is inserted."""

    namespace: bytes
    key: bytes
    parent: bytes
    first: int
    num_tokens: int
    nbytes: int
    created: float  # seconds since the epoch
    tokens: bytes  # int32 big-endian


class Totals(NamedTuple):
    """Sums over all pages of all namespaces."""

    nbytes: int
    files: int
    tokens: int


class CatalogDamaged(Exception):
    """The file is not a catalog of this version, or holds what no catalog can: it has to be made anew."""


def stored_page(row: tuple[Any, ...]) -> StoredPage:
    """A result of STORED; the types are checked because a flipped bit can turn a blob into a number."""
    page = StoredPage(*row)
    numbers = (page.id, page.first, page.num_tokens, page.nbytes, page.num_children)
    if (
        any(type(blob) is not bytes for blob in (page.key, page.parent, page.tokens))
        or any(type(number) is not int for number in numbers)
        or (len(page.key), len(page.parent), len(page.tokens)) != (16, 16, 4 * page.num_tokens)
        or page.num_tokens < 1
    ):
        raise CatalogDamaged(f"row {page.id} is not a page")
    return page


def page_row(row: tuple[Any, ...]) -> PageRow:
    """A result of ROWS, its types checked."""
    page = PageRow(*row)
    numbers = (page.id, page.first, page.num_tokens, page.nbytes, page.turn, page.hits, page.num_children)
    if (
        any(type(blob) is not bytes or len(blob) != 16 for blob in (page.namespace, page.key, page.parent))
        or any(type(number) is not int for number in numbers)
        or any(type(seconds) is not float for seconds in (page.created, page.last_used))
        or page.pinned not in (0, 1)
    ):
        raise CatalogDamaged(f"row {page.id} is not a page")
    return replace(page, pinned=bool(page.pinned))


def order_bytes(tokens: Tokens) -> bytes:
    """Token ids as the big-endian blob whose byte order is their (unsigned) order."""
    return tokens.astype(">i4").tobytes()


def little_endian(ordered: bytes) -> bytes:
    """A big-endian token blob as the int32 little-endian bytes that artifacts hold."""
    return np.frombuffer(ordered, dtype=">i4").astype("<i4").tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length, in tokens, of the common prefix of two token blobs."""
    n = min(len(a), len(b)) // 4
    differs = np.frombuffer(a, dtype="<u4", count=n) != np.frombuffer(b, dtype="<u4", count=n)
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def create_catalog(root: Path) -> None:
    """Make an empty catalog in place of whatever is there; the caller holds the store's lock.

    The main file goes first: a log without its database is ignored, a database with a stranger's log is not.
    """
    for name in CATALOG_FILES:
        (root / name).unlink(missing_ok=True)
    path = root / CATALOG_NAME
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    connection = connect(path)
    try:
        connection.executescript(SCHEMA)
    finally:
        connection.close()


class CatalogConnection(sqlite3.Connection):
    """A connection that calls a catalog damaged when what SQLite says of it is no text."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """SQLite quotes a damaged schema in its message; Python fails to decode that before it can raise it."""
        try:
            return super().execute(sql, parameters)
        except UnicodeDecodeError as error:
            raise CatalogDamaged(f"SQLite's message about it cannot be decoded: {error.object!r}") from error


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode to an existing database, usable from any thread under a lock."""
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=CatalogConnection,
    )
    try:
        # A power cut may lose the last transactions (the next start finds those files) but corrupts nothing.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_PAGES * SQLITE_PAGE_NBYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


class Catalog:
    """An open catalog: one connection for reading and one for writing, so that finding never waits for a write."""

    def __init__(self, root: Path) -> None:
        """Open the catalog of a store; CatalogDamaged if there is none or the file is something else."""
        self.path = root / CATALOG_NAME
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError as error:
            raise CatalogDamaged(f"there is no {self.path}") from error
        for name in CATALOG_FILES:  # SQLite would follow links
            beside = root / name
            if beside.is_symlink() or (beside.exists() and not beside.is_file()):
                raise CatalogDamaged(f"{beside} is not a regular file")
        self.inode = (status.st_dev, status.st_ino)
        self.read_lock = threading.Lock()
        self.write_lock = threading.RLock()
        self.writer = connect(self.path)
        try:
            marks = (
                self.writer.execute("PRAGMA application_id").fetchone()[0],
                self.writer.execute("PRAGMA user_version").fetchone()[0],
            )
            if marks != (APPLICATION_ID, VERSION):
                raise CatalogDamaged(f"{self.path} has marks {marks}, expected {(APPLICATION_ID, VERSION)}")
            self.reader = connect(self.path)
        except BaseException:
            self.writer.close()
            raise

    def is_current(self) -> bool:
        """Whether the path still leads to the file this object has open (someone may have deleted the root)."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.inode

    def close(self) -> None:
        """Close both connections once no call is using them; later calls raise sqlite3.ProgrammingError."""
        with self.read_lock:
            self.reader.close()
        with self.write_lock:
            self.writer.close()

    # Reading

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query."""
        with self.read_lock:
            return self.reader.execute(sql, parameters).fetchall()

    def find_page(self, namespace: bytes, key: bytes) -> StoredPage | None:
        """The page with this key, or None."""
        found = self.read(f"{STORED} WHERE key = ? AND namespace = ?", (key, namespace))
        return stored_page(found[0]) if found else None

    def find_last_child(self, namespace: bytes, parent: bytes, tokens: bytes) -> StoredPage | None:
        """The greatest child of `parent` whose tokens are not after `tokens`, or None."""
        found = self.read(
            f"{STORED} WHERE namespace = ? AND parent = ? AND tokens <= ? ORDER BY tokens DESC LIMIT 1",
            (namespace, parent, tokens),
        )
        return stored_page(found[0]) if found else None

    def find_next_child(self, namespace: bytes, parent: bytes, tokens: bytes) -> StoredPage | None:
        """The smallest child of `parent` whose tokens are after `tokens`, or None."""
        found = self.read(
            f"{STORED} WHERE namespace = ? AND parent = ? AND tokens > ? ORDER BY tokens LIMIT 1",
            (namespace, parent, tokens),
        )
        return stored_page(found[0]) if found else None

    def nearest_child(self, namespace: bytes, parent: bytes, tokens: bytes) -> tuple[StoredPage, int] | None:
        """The child of `parent` sharing the longest token prefix with `tokens`, and that length in tokens.

        In sorted order the longest common prefix is always with a neighbour, so two index look-ups do, however
        many children there are. The length may be 0; None means there are no children.
        """
        neighbours = (
            self.find_last_child(namespace, parent, tokens),
            self.find_next_child(namespace, parent, tokens),
        )
        found = [(page, common_tokens(page.tokens, tokens)) for page in neighbours if page is not None]
        return max(found, key=lambda item: item[1], default=None)

    def prefix_children(self, namespace: bytes, parent: bytes, tokens: bytes) -> list[StoredPage]:
        """The children of `parent` whose whole token run begins `tokens`, longest first.

        Each look-up yields such a child or shortens the search to a prefix that any remaining one must have.
        """
        children = []
        while tokens:
            page = self.find_last_child(namespace, parent, tokens)
            if page is None:
                break
            common = 4 * common_tokens(page.tokens, tokens)
            if common == len(page.tokens):
                children.append(page)
                common -= 4
            tokens = tokens[:common]
        return children

    def totals(self) -> Totals:
        """Bytes, files and tokens of all pages."""
        found = self.read("SELECT nbytes, files, tokens FROM totals")
        if len(found) != 1 or any(type(number) is not int for number in found[0]):
            raise CatalogDamaged(f"totals are {found}")
        return Totals(*found[0])

    def written_bytes(self, hour: int) -> int:
        """Bytes of artifacts that any process wrote in an hour, counted since the epoch."""
        found = self.read("SELECT hour, nbytes FROM written")
        if len(found) != 1 or any(type(number) is not int for number in found[0]):
            raise CatalogDamaged(f"written is {found}")
        last, nbytes = found[0]
        return int(nbytes) if last == hour else 0

    def rows(self, namespace: bytes | None = None) -> list[PageRow]:
        """All pages, or those of one namespace, most recently used first."""
        where = "" if namespace is None else "WHERE namespace = ?"
        found = self.read(f"{ROWS} {where} ORDER BY turn DESC", () if namespace is None else (namespace,))
        return [page_row(row) for row in found]

    def rows_of(self, key: bytes) -> list[PageRow]:
        """The page with this key; more than one only if digests collide between namespaces."""
        return [page_row(row) for row in self.read(f"{ROWS} WHERE key = ?", (key,))]

    def rows_ending_at(self, position: int) -> list[PageRow]:
        """The pages of all namespaces whose last token stands before this position."""
        return [page_row(row) for row in self.read(f"{ROWS} WHERE first + num_tokens = ?", (position,))]

    def keys_between(self, low: bytes, high: bytes, limit: int) -> list[bytes]:
        """Up to `limit` keys in [low, high]."""
        found = self.read("SELECT key FROM pages WHERE key BETWEEN ? AND ? LIMIT ?", (low, high, limit))
        return [key for (key,) in found]

    def page_tokens(self, page: int) -> bytes:
        """Token blob (big-endian) of the page with this row id."""
        return bytes(self.read("SELECT tokens FROM pages WHERE id = ?", (page,))[0][0])

    def leaves(self, after: tuple[int, int], limit: int) -> list[PageRow]:
        """Unpinned pages without children, least recently used first, behind the (turn, id) `after`."""
        found = self.read(
            f"{ROWS} WHERE num_children = 0 AND pinned = 0 AND (turn, page) > (?, ?) ORDER BY turn, page LIMIT ?",
            (*after, limit),
        )
        return [page_row(row) for row in found]

    def expired_leaves(self, before: float, now: float) -> list[PageRow]:
        """Unpinned pages without children last used before a time, or longer ago than their own time to live."""
        is_leaf = "num_children = 0 AND pinned = 0"
        # From the few that have a time of their own, in this order: any other would read every leaf.
        found = self.read(
            f"SELECT {ROW_COLUMNS} FROM ttls CROSS JOIN uses USING (page) CROSS JOIN pages ON id = page"
            f" WHERE {is_leaf} AND last_used + seconds < ?",
            (now,),
        )
        if before > -inf:
            found += self.read(f"{ROWS} WHERE {is_leaf} AND last_used < ?", (before,))
        return list({row[0]: page_row(row) for row in found}.values())

    def is_expired(self, page: PageRow, before: float, now: float) -> bool:
        """Whether a page was last used before a time, or longer ago than its own time to live."""
        found = self.read("SELECT seconds FROM ttls WHERE page = ?", (page.id,))
        return page.last_used < before or bool(found and page.last_used + found[0][0] < now)

    def names(self) -> list[tuple[bytes, bytes]]:
        """(namespace, key) of every page."""
        return self.read("SELECT namespace, key FROM pages")

    def names_under(self, byte: int) -> list[tuple[bytes, bytes]]:
        """(namespace, key) of the pages whose key begins with this byte: those of equally named folders."""
        return self.read(
            "SELECT namespace, key FROM pages WHERE key BETWEEN ? AND ?",
            (bytes([byte]) + b"\x00" * 15, bytes([byte]) + b"\xff" * 15),
        )

    def namespaces(self) -> list[tuple[bytes, int, int]]:
        """(namespace digest, pages, bytes) of every namespace that has pages."""
        return self.read("SELECT namespace, COUNT(*), SUM(nbytes) FROM pages GROUP BY namespace")

    # Writing

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: committed at the end, rolled back on any error."""
        with self.write_lock:
            self.writer.execute("BEGIN IMMEDIATE")
            try:
                yield self.writer
                self.writer.execute("COMMIT")
            except BaseException:
                if self.writer.in_transaction:
                    self.writer.execute("ROLLBACK")
                raise

    def insert(
        self, pages: Iterable[NewPage], hour: int | None = None, ttl_seconds: float | None = None
    ) -> int:
        """Add rows for pages whose artifacts are in place; those already there are left alone. Returns how many.

        hour: since the epoch, when they were written just now: their bytes count as written in it. ttl_seconds: a
        time to live of their own.
        """
        inserted, now = 0, time.time()
        with self.transaction() as writer:
            for page in pages:
                cursor = writer.execute(
                    "INSERT OR IGNORE INTO pages (namespace, key, parent, first, num_tokens, nbytes, created, tokens)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    page,
                )
                if cursor.rowcount == 0:
                    continue
                inserted += 1
                if ttl_seconds is not None:
                    writer.execute("INSERT INTO ttls VALUES (?, ?)", (cursor.lastrowid, ttl_seconds))
                if hour is not None:
                    writer.execute(
                        "UPDATE written SET nbytes = ? + CASE hour WHEN ? THEN nbytes ELSE 0 END, hour = ?",
                        (page.nbytes, hour, hour),
                    )
                writer.execute(
                    "UPDATE totals SET nbytes = nbytes + ?, files = files + 1, tokens = tokens + ?, turn = turn + 1",
                    (page.nbytes, page.num_tokens),
                )
                # Children may be there already: files arrive in any order when a catalog is rebuilt.
                writer.execute(
                    "INSERT INTO uses VALUES (?, (SELECT turn FROM totals), ?, 0, 0,"
                    " (SELECT COUNT(*) FROM pages WHERE namespace = ? AND parent = ?))",
                    (cursor.lastrowid, now, page.namespace, page.key),
                )
                self.count_child(page.namespace, page.parent, 1)
        return inserted

    def remove(self, page: PageRow, only_leaf: bool, only_unused: bool = False) -> bool:
        """Drop a page's row inside a transaction; False if it has to stay.

        only_leaf: not if it has children or is pinned by now. only_unused: not if it was used since `page` was read.
        """
        found = self.writer.execute(
            "SELECT num_children, pinned, turn FROM uses JOIN pages ON id = page"
            " WHERE page = ? AND key = ? AND namespace = ?",
            (page.id, page.key, page.namespace),
        ).fetchone()
        if found is None or (only_leaf and found[:2] != (0, 0)) or (only_unused and found[2] != page.turn):
            return False
        self.writer.execute("DELETE FROM uses WHERE page = ?", (page.id,))
        self.writer.execute("DELETE FROM ttls WHERE page = ?", (page.id,))
        self.writer.execute("DELETE FROM pages WHERE id = ?", (page.id,))
        self.writer.execute(
            "UPDATE totals SET nbytes = nbytes - ?, files = files - 1, tokens = tokens - ?",
            (page.nbytes, page.num_tokens),
        )
        self.count_child(page.namespace, page.parent, -1)
        return True

    def count_child(self, namespace: bytes, parent: bytes, change: int) -> None:
        """Adjust a parent's number of children inside a transaction; it may not be there."""
        self.writer.execute(
            "UPDATE uses SET num_children = num_children + ?"
            " WHERE page = (SELECT id FROM pages WHERE key = ? AND namespace = ?)",
            (change, parent, namespace),
        )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a hit and renew the last use of pages. All of one transaction share one turn."""
        for start in range(0, len(keys), TOUCHES_PER_TRANSACTION):
            with self.transaction() as writer:
                writer.execute("UPDATE totals SET turn = turn + 1")
                writer.executemany(
                    "UPDATE uses SET turn = (SELECT turn FROM totals), last_used = ?, hits = hits + 1"
                    " WHERE page IN (SELECT id FROM pages WHERE key = ?)",
                    [(time.time(), key) for key in keys[start : start + TOUCHES_PER_TRANSACTION]],
                )

    def set_pinned(self, keys: Sequence[bytes], pinned: bool) -> int:
        """Pin or unpin pages; returns how many of the keys are there."""
        found = 0
        for start in range(0, len(keys), TOUCHES_PER_TRANSACTION):
            with self.transaction() as writer:
                for key in keys[start : start + TOUCHES_PER_TRANSACTION]:
                    found += writer.execute(
                        "UPDATE uses SET pinned = ? WHERE page IN (SELECT id FROM pages WHERE key = ?)",
                        (int(pinned), key),
                    ).rowcount
        return found

    def set_ttl(self, keys: Sequence[bytes], seconds: float | None) -> int:
        """Give pages a time to live without use, or take it away; returns how many of the keys are there."""
        found = 0
        for start in range(0, len(keys), TOUCHES_PER_TRANSACTION):
            with self.transaction() as writer:
                for key in keys[start : start + TOUCHES_PER_TRANSACTION]:
                    ids = [row[0] for row in writer.execute("SELECT id FROM pages WHERE key = ?", (key,))]
                    for page in ids:
                        writer.execute("DELETE FROM ttls WHERE page = ?", (page,))
                        if seconds is not None:
                            writer.execute("INSERT INTO ttls VALUES (?, ?)", (page, seconds))
                    found += len(ids)
        return found

    def order_by_age(self) -> None:
        """Renumber all turns by time of creation: after a rebuild, which meets the files in no useful order."""
        with self.transaction() as writer:
            writer.execute(
                "UPDATE uses SET turn = ranks.turn FROM"
                " (SELECT id, row_number() OVER (ORDER BY created, id) AS turn FROM pages) AS ranks"
                " WHERE page = ranks.id"
            )
            writer.execute("UPDATE totals SET turn = (SELECT COUNT(*) FROM uses)")

    def truncate_log(self) -> None:
        """Copy the write-ahead log into the database and empty it, if no other process is in the way."""
        with self.write_lock:
            self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def catalog_nbytes(root: Path) -> tuple[int, int]:
    """Bytes the catalog takes now, and with its log at the size it may grow to before it starts over."""
    sizes = []
    for name in CATALOG_FILES:
        try:
            sizes.append(os.stat(root / name, follow_symlinks=False).st_size)
        except FileNotFoundError:
            sizes.append(0)
    database, *log = sizes
    return database + sum(log), database + max(sum(log), LOG_NBYTES)
