"""Room within the limits: how much is missing, what leaves for it, and seeing it off."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import time

from kestrel.errors import StoreError
from kestrel.store.catalog import (
    REMOVALS_PER_TRANSACTION,
    ROW_NBYTES,
    Catalog,
    NewPage,
    PageRow,
    catalog_nbytes,
)
from kestrel.store.census import MARK_SUFFIX, Count
from kestrel.store.counters import Counters
from kestrel.store.eviction import Eviction, ExitOrder, Limits, Reason, Shortage, over
from kestrel.store.files import FileTree, page_names

log = logging.getLogger("kestrel.store")


class Room:
    """The limits of a store, and the pages that may not leave because a request of this process needs them.

    All but `protect` are for a caller that holds the store's lock. Methods raise OSError as the system gives it.
    """

    def __init__(self, tree: FileTree, limits: Limits, counters: Counters) -> None:
        self.tree = tree
        self.limits = limits
        self.counters = counters
        self.lock = threading.Lock()
        self.protected: Counter[bytes] = Counter()
        self.is_short = False  # the last sweep could not reach the limits

    @contextmanager
    def protect(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Let these pages, and hence their ancestors, not leave inside the block."""
        wanted = list(keys)
        with self.lock:
            self.protected.update(wanted)
        try:
            yield
        finally:
            with self.lock:
                self.protected.subtract(wanted)
                self.protected = +self.protected  # drops those at 0

    def is_protected(self, key: bytes) -> bool:
        """Whether a request in flight needs this page."""
        with self.lock:
            return self.protected[key] > 0

    def plan_page(self, catalog: Catalog, count: Count, page: NewPage, nbytes: int) -> list[Eviction]:
        """What must leave before `nbytes` are written for a page.

        Raises StoreError if the page does not fit even then.
        """
        nbytes += ROW_NBYTES
        shortage = self.shortage(catalog, count, nbytes, 1, page.num_tokens)
        if not shortage.is_over():
            return []
        plan = self.plan(catalog, count, shortage, keep=page.parent, all_expired=False)
        if shortage.is_over():
            totals = catalog.totals()
            raise StoreError(
                f"a page of {page.nbytes:,} bytes and {page.num_tokens} tokens does not fit into "
                f"{self.tree.root}: {shortage}, even without the {len(plan)} files that may leave; "
                f"{totals.files} pages take {totals.nbytes:,} bytes, {count.strangers} strangers "
                f"{count.stranger_bytes:,}, the catalog {catalog_nbytes(self.tree.root)[1]:,}. "
                f"Raise the limits, unpin pages or remove strangers"
            )
        return plan

    def plan_sweep(self, catalog: Catalog, count: Count, in_vain: bool) -> list[Eviction]:
        """What a sweep removes: all expired pages, and what exceeds the limits; see `Store.sweep`."""
        shortage = self.shortage(catalog, count, 0, 0, 0)
        plan = self.plan(catalog, count, shortage, keep=None, all_expired=True)
        is_short = shortage.is_over()
        if is_short and not self.is_short:
            log.warning("%s cannot be brought within its limits: %s", self.tree.root, shortage)
        self.is_short = is_short
        if shortage.is_of_disk_only() and not in_vain:
            return [eviction for eviction in plan if eviction.reason == "expired"]
        return plan

    def shortage(
        self, catalog: Catalog, count: Count, new_bytes: int, new_files: int, new_tokens: int
    ) -> Shortage:
        """How far the limits would be exceeded with so much more."""
        totals = catalog.totals()
        used = totals.nbytes + count.other_bytes + catalog_nbytes(self.tree.root)[1]
        disk = os.statvfs(self.tree.root)
        return Shortage(
            nbytes=over(used + new_bytes, self.limits.max_bytes),
            files=over(totals.files + new_files, self.limits.max_files),
            tokens=over(totals.tokens + new_tokens, self.limits.max_tokens),
            free_bytes=self.limits.min_free_bytes + new_bytes - disk.f_bavail * disk.f_frsize,
        )

    def plan(
        self, catalog: Catalog, count: Count, shortage: Shortage, keep: bytes | None, all_expired: bool
    ) -> list[Eviction]:
        """What leaves to end the shortage, in order; `shortage` is reduced to what then remains."""
        plan = []
        for file in count.quarantined:
            if shortage.needs_bytes():
                path = self.tree.root.joinpath(*file.names)
                plan.append(Eviction(path, None, file.nbytes, "quarantined", file.num_links))
                shortage.subtract(plan[-1])

        def is_kept(page: PageRow) -> bool:
            if page.key == keep or self.is_protected(page.key) or self.is_only_copy(page):
                return True
            return shortage.is_of_disk_only() and self.num_links(page) > 1

        now = time()
        expired_before = -inf if self.limits.ttl_seconds is None else now - self.limits.ttl_seconds
        for page, reason in ExitOrder(catalog, is_kept).pages(expired_before, now):
            if not shortage.is_over() and not (all_expired and reason == "expired"):
                break
            plan.append(self.eviction(page, reason))
            shortage.subtract(plan[-1])
        return plan

    def eviction(self, page: PageRow, reason: Reason) -> Eviction:
        """The eviction of a page."""
        path = self.tree.root.joinpath(*page_names(page.namespace, page.key))
        return Eviction(path, page, page.nbytes, reason, self.num_links(page), self.is_published(page))

    def num_links(self, page: PageRow) -> int:
        """Hard links of a page's file; 0 if it is gone."""
        status = self.tree.status(page_names(page.namespace, page.key))
        return status.st_nlink if status else 0

    def is_published(self, page: PageRow) -> bool:
        """Whether a page is part of the repository: its mark lies beside it."""
        *folder, name = page_names(page.namespace, page.key)
        return self.tree.status((*folder, name + MARK_SUFFIX)) is not None

    def is_only_copy(self, page: PageRow) -> bool:
        """Whether a published page may have no other copy: nothing but its own name leads to its bytes.

        Where DVC's cache shares files with the store by hard links, that is a page whose object left the cache;
        where it keeps copies of its own, we cannot tell, and no published page leaves by itself.
        """
        return self.num_links(page) == 1 and self.is_published(page)

    def evict(self, catalog: Catalog, plan: Sequence[Eviction]) -> list[Eviction]:
        """Carry out a plan; returns what left.

        A page that was used, or got a child, a pin or protection, since the plan was made stays, and with it its
        ancestors.
        """
        done = []
        for start in range(0, len(plan), REMOVALS_PER_TRANSACTION):
            with catalog.transaction():
                for eviction in plan[start : start + REMOVALS_PER_TRANSACTION]:
                    page = eviction.page
                    if page is not None and (
                        self.is_protected(page.key)
                        or self.is_only_copy(page)
                        or not catalog.remove(
                            page,
                            only_leaf=True,
                            only_unused=eviction.reason in ("expired", "least recently used"),
                        )
                    ):
                        continue
                    # Others see the row until the transaction ends, so the room counts as used until it is free.
                    self.tree.remove_file(eviction.path.relative_to(self.tree.root).parts)
                    done.append(eviction)
        for eviction in done:
            if eviction.reason == "covered by a longer page":
                self.counters.add("covered_pages")
            else:
                self.counters.add("evicted_pages" if eviction.page else "deleted_quarantined_files")
                self.counters.add("evicted_bytes", eviction.nbytes)
            log.debug("removed %s (%d bytes): %s", eviction.path, eviction.nbytes, eviction.reason)
        if done:
            num_linked = sum(eviction.num_links > 1 for eviction in done)
            linked = f"; other hard links keep {num_linked} of them on disk" if num_linked else ""
            num_bytes = sum(eviction.nbytes for eviction in done)
            log.info("removed %d files (%d bytes) from %s%s", len(done), num_bytes, self.tree.root, linked)
        return done
