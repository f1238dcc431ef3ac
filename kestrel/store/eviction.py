"""Limits of a store, and the order in which pages leave when they are reached."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kestrel.store.catalog import Catalog, PageRow

LEAVES_PER_QUERY = 256

Reason = Literal[
    "quarantined", "expired", "least recently used", "covered by a longer page", "removed on request"
]


@dataclass(frozen=True)
class Limits:
    """What a store may hold; None means no such limit."""

    max_bytes: int | None = None  # of every file under the root: strangers, catalog and all
    max_files: int | None = None  # artifacts
    max_tokens: int | None = None  # sum of num_tokens over all pages
    min_free_bytes: int = 0  # to be left free on the file system
    ttl_seconds: float | None = None  # a page unused for longer has expired
    write_bytes_per_hour: int | None = None  # of artifacts, by all processes together: flash wears out


@dataclass(frozen=True)
class Eviction:
    """One file that was removed, or would be."""

    path: Path
    page: PageRow | None  # None for a quarantined file
    nbytes: int
    reason: Reason
    num_links: int  # more than 1: another hard link (of a DVC cache, say) keeps the bytes on disk
    is_published: bool = False  # a mark says that the page is part of the repository

    @property
    def key(self) -> bytes | None:
        """Key of the page, None for a quarantined file."""
        return self.page.key if self.page else None


@dataclass
class Shortage:
    """By how much limits are exceeded; nothing is short where all are 0 or less."""

    nbytes: int
    files: int
    tokens: int
    free_bytes: int  # missing on the file system

    def is_over(self) -> bool:
        """Whether anything has to leave."""
        return max(self.nbytes, self.files, self.tokens, self.free_bytes) > 0

    def needs_bytes(self) -> bool:
        """Whether removing files that are no artifacts helps."""
        return max(self.nbytes, self.free_bytes) > 0

    def is_of_disk_only(self) -> bool:
        """Whether only the file system is short: then removing one of several hard links helps nobody."""
        return self.free_bytes > 0 and max(self.nbytes, self.files, self.tokens) <= 0

    def subtract(self, eviction: Eviction) -> None:
        """Account for a file that leaves."""
        self.nbytes -= eviction.nbytes
        if eviction.page is not None:
            self.files -= 1
            self.tokens -= eviction.page.num_tokens
        if eviction.num_links == 1:
            self.free_bytes -= eviction.nbytes

    def __str__(self) -> str:
        amounts = {
            "bytes over max_bytes": self.nbytes,
            "files over max_files": self.files,
            "tokens over max_tokens": self.tokens,
            "bytes short of min_free_bytes": self.free_bytes,
        }
        return ", ".join(f"{amount:,} {what}" for what, amount in amounts.items() if amount > 0)


def over(amount: int, limit: int | None) -> int:
    """By how much an amount exceeds a limit; 0 without one."""
    return 0 if limit is None else amount - limit


class ExitOrder:
    """All pages that may leave, in the order they leave: expired ones, then the least recently used.

    A page comes only after all its children, so whichever first part of the sequence is removed, complete
    chains remain. Pages that are pinned or that `is_kept` answers yes to, and hence the ancestors of both, never come.
    Changes nothing by itself.
    """

    def __init__(self, catalog: Catalog, is_kept: Callable[[PageRow], bool]) -> None:
        self.catalog = catalog
        self.is_kept = is_kept
        self.gone: set[int] = set()
        self.num_children: dict[int, int] = {}  # of parents that lost some
        self.uncovered: list[tuple[int, int, PageRow]] = []  # heap of parents that lost all

    def pages(self, expired_before: float, now: float) -> Iterator[tuple[PageRow, Reason]]:
        """The sequence; expired are pages last used before the first time, and those whose own time is over `now`."""
        expired = self.catalog.expired_leaves(expired_before, now)
        expired.sort(key=lambda page: (page.turn, page.id))
        fresh = []  # uncovered, but not expired: their time comes with the least recently used
        for page in self.in_turn(iter(expired)):
            if self.catalog.is_expired(page, expired_before, now):
                yield page, "expired"
                self.leave(page)
            else:
                fresh.append(page)
        for page in fresh:
            self.uncover(page)
        for page in self.in_turn(leaves_by_turn(self.catalog)):
            yield page, "least recently used"
            self.leave(page)

    def in_turn(self, leaves: Iterator[PageRow]) -> Iterator[PageRow]:
        """Merge a sorted stream of leaves with the parents that become leaves on the way."""
        leaf = next(leaves, None)
        while leaf is not None or self.uncovered:
            if leaf is not None and (not self.uncovered or (leaf.turn, leaf.id) < self.uncovered[0][:2]):
                page, leaf = leaf, next(leaves, None)
            else:
                page = heapq.heappop(self.uncovered)[2]
            if page.id not in self.gone and not self.is_kept(page):
                yield page

    def leave(self, page: PageRow) -> None:
        """Take a page out of the picture; its parent may be the next."""
        self.gone.add(page.id)
        for parent in self.catalog.rows_of(page.parent):
            if parent.namespace == page.namespace:
                left = self.num_children.get(parent.id, parent.num_children) - 1
                self.num_children[parent.id] = left
                if left == 0 and not parent.pinned:
                    self.uncover(parent)

    def uncover(self, page: PageRow) -> None:
        """Put a page without children among those that may leave."""
        heapq.heappush(self.uncovered, (page.turn, page.id, page))


def leaves_by_turn(catalog: Catalog) -> Iterator[PageRow]:
    """Pages without children, least recently used first, fetched as they are needed."""
    after = (-1, -1)
    while leaves := catalog.leaves(after, LEAVES_PER_QUERY):
        yield from leaves
        after = (leaves[-1].turn, leaves[-1].id)
