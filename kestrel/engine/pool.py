"""The page pool: all KV in memory, as pages that sequences share.

A page is one contiguous block laid out exactly as the payload of its artifact, so a restore reads file
bytes into it and a save writes it. Pages are counted by reference. A page nobody refers to any more
stays as a RAM cache under its key until the pool needs room, least recently released first.
"""

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.engine.memory import commit, forbid_huge_pages
from kestrel.engine.priority import FOR_LATER, give_way
from kestrel.errors import CapacityError, ConfigError
from kestrel.identity import Tokens, page_key
from kestrel.store.layout import PageLayout

_QUIET_SECONDS = 0.5  # without a page taken, before memory is committed for later


@dataclass(frozen=True)
class CachedPage:
    """What the pool remembers of a page whose content is final: its place in the tree of prefixes."""

    page: int
    key: bytes
    parent: bytes
    tokens: Tokens  # [num_tokens]; fewer than page_tokens for a partial page


class PagePool:
    """A fixed number of pages in one lazily committed mapping: memory is used as pages are first touched."""

    def __init__(self, layout: PageLayout, page_tokens: int, budget_nbytes: int, touched_nbytes: int = 0):
        """budget_nbytes: upper bound of all pages together; ConfigError if not even two pages fit.

        touched_nbytes: most memory kept committed ahead of use, see `expect`.
        """
        self.layout = layout
        self.page_tokens = page_tokens
        self.page_nbytes = layout.page_nbytes(page_tokens)
        self.num_pages = budget_nbytes // self.page_nbytes
        if self.num_pages < 2:
            raise ConfigError(
                f"engine.kv_ram_bytes={budget_nbytes} is too small: a page of {page_tokens} tokens takes "
                f"{self.page_nbytes} bytes and at least two are needed"
            )
        # Private: Python's default is shared memory, which is dearer to touch. No huge pages: they commit more than is
        # touched, and a virtual machine may have to ask its host for each of them (5 ms instead of 0.6 for 2 MB).
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self.num_pages * self.page_nbytes, flags)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        forbid_huge_pages(self._bytes.ctypes.data, self._bytes.nbytes)
        self.scales: npt.NDArray[np.float32] = self._bytes.view(np.float32)
        self.kv: npt.NDArray[Any] = self.scales if layout.kv_dtype == "float32" else self._bytes.view(np.int8)
        self.quantised = layout.kv_dtype == "int8"
        self.page_size = self.page_nbytes // self.kv.itemsize  # elements of kv from one page to the next
        self._lock = threading.RLock()  # the writer thread releases pages too; guards all of the below
        self._offsets = [self._find_offsets(layer) for layer in range(layout.num_layers)]
        self._touched_nbytes = touched_nbytes
        self._touching = _Toucher(self._bytes, self.page_nbytes, self.num_pages)
        self._references = [0] * self.num_pages
        self._never_used = iter(range(self.num_pages))
        self._free: list[int] = []
        self._cached: dict[bytes, CachedPage] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without references, oldest first

    def layer_offsets(self, layer: int) -> tuple[int, int, int, int]:
        """Where a layer's K, K scales, V and V scales begin inside a page.

        K and V in elements of `kv`, scales in elements of `scales` (0 when the pool holds float32).
        """
        return self._offsets[layer]

    def _find_offsets(self, layer: int) -> tuple[int, int, int, int]:
        at = layer * self.layout.layer_nbytes(self.page_tokens)
        offsets = {}
        for name, _, _, nbytes in self.layout.layer_tensors(layer, self.page_tokens):
            offsets[name.split(".")[-1]] = at
            at += nbytes
        size = self.kv.itemsize
        return (
            offsets["k"] // size,
            offsets.get("k_scale", 0) // 4,
            offsets["v"] // size,
            offsets.get("v_scale", 0) // 4,
        )

    @property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one token, all layers, as they are kept."""
        return self.page_nbytes // self.page_tokens

    def layer_block(self, page: int, layer: int, count: int = 1) -> npt.NDArray[np.uint8]:
        """The bytes of layers [layer, layer + count) of a page: contiguous, writable, as in a full page's artifact."""
        nbytes = self.layout.layer_nbytes(self.page_tokens)
        at = page * self.page_nbytes + layer * nbytes
        return self._bytes[at : at + count * nbytes]

    def layer_arrays(self, page: int, layer: int) -> list[tuple[npt.NDArray[Any], int]]:
        """The tensors of one layer of one page as (array view, axis of tokens), in the artifact's order."""
        block = self.layer_block(page, layer)
        arrays = []
        at = 0
        for name, dtype, shape, nbytes in self.layout.layer_tensors(layer, self.page_tokens):
            view = block[at : at + nbytes].view(np.int8 if dtype == "I8" else np.float32).reshape(shape)
            arrays.append((view, 1 if name.endswith(".v") else len(shape) - 1))
            at += nbytes
        return arrays

    def expect(self, nbytes: int) -> None:
        """Keep memory for so much of a restore committed ahead of use, so that it need not wait for the kernel."""
        self._touching.expect(min(nbytes, self._touched_nbytes))

    def allocate(self) -> int:
        """Take a page with one reference; its content is undefined. CapacityError when all are in use."""
        with self._lock:
            if self._free:
                page = self._free.pop()
            else:
                page = next(self._never_used, -1)
                self._touching.reach(page)
                if page < 0:
                    if not self._idle:
                        raise CapacityError(
                            f"all {self.num_pages} KV pages ({self.num_pages * self.page_tokens} tokens) are in use; "
                            "raise engine.kv_ram_bytes or send shorter prompts"
                        )
                    page, _ = self._idle.popitem(last=False)
                    self._forget(page)
            self._references[page] = 1
            return page

    def retain(self, page: int) -> None:
        """Add a reference: the page's present rows stay as they are until it is released."""
        with self._lock:
            self._references[page] += 1
            self._idle.pop(page, None)

    def take(self, cached: CachedPage) -> bool:
        """`retain` a page that `find` has found; False if it was forgotten or reused since."""
        with self._lock:
            if self._cached.get(cached.key) is not cached:
                return False
            self.retain(cached.page)
            return True

    def release(self, page: int) -> None:
        """Drop a reference; the last one leaves the page as RAM cache if it has a key, else frees it."""
        with self._lock:
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def references(self, page: int) -> int:
        """How many sequences, saves and restores hold the page."""
        return self._references[page]

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still hand out."""
        return self.num_pages - sum(1 for count in self._references if count)

    def remember(self, page: int, parent: bytes, tokens: Tokens) -> None:
        """Note the final content of a page so that later sequences find it; a shorter note of it is replaced.

        A page that equals one already remembered stays unnamed and is freed with its last reference.
        """
        with self._lock:
            key = page_key(parent, tokens)
            if key in self._cached:
                return
            self._forget(page)
            self._cached[key] = CachedPage(page, key, parent, tokens)
            self._children.setdefault(parent, {})[key] = None
            self._key_of[page] = key

    def find(self, root: bytes, tokens: Tokens) -> list[tuple[CachedPage, int]]:
        """Longest prefix of `tokens` in memory: pages from the root key on, each with how many rows are usable.

        Every page but the last is full and wholly matched.
        """
        with self._lock:
            found: list[tuple[CachedPage, int]] = []
            position, parent = 0, root
            while position < len(tokens):
                best: tuple[CachedPage, int] | None = None
                wanted = tokens[position : position + self.page_tokens]
                exact = self._cached.get(page_key(parent, wanted))
                if exact is not None:
                    best = (exact, len(wanted))
                else:
                    for key in self._children.get(parent, ()):
                        page = self._cached[key]
                        common = common_prefix(page.tokens, wanted)
                        if common and (best is None or common > best[1]):
                            best = (page, common)
                if best is None:
                    break
                found.append(best)
                position += best[1]
                parent = best[0].key
                if best[1] < self.page_tokens:
                    break
            return found

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let no later sequence find these pages; those that hold them keep them."""
        with self._lock:
            for key in keys:
                cached = self._cached.get(key)
                if cached is None:
                    continue
                self._forget(cached.page)
                if cached.page in self._idle:
                    del self._idle[cached.page]
                    self._free.append(cached.page)

    def remembered(self) -> list[CachedPage]:
        """All pages that later sequences can find."""
        with self._lock:
            return list(self._cached.values())

    def copy(self, page: int) -> int:
        """A new page with the same bytes and one reference."""
        with self._lock:
            self.retain(page)  # allocating must not take the very page that is copied
            try:
                target = self.allocate()
                source = self._bytes[page * self.page_nbytes : (page + 1) * self.page_nbytes]
                self._bytes[target * self.page_nbytes : (target + 1) * self.page_nbytes] = source
            finally:
                self.release(page)
            return target

    def close(self) -> None:
        """Stop committing memory ahead of use; the pool is not used any more."""
        self._touching.stop()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            cached = self._cached.pop(key)
            siblings = self._children[cached.parent]
            del siblings[key]
            if not siblings:
                del self._children[cached.parent]


class _Toucher:
    """Commits the memory of the next pages in the background: a first touch costs more than reading a file into it.

    That changes no content, so it may meet pages already in use. Where the kernel cannot, pages are committed as they
    are touched. What is expected first is committed at once. Later the thread gives way to all that computes or reads:
    it prepares for later requests, and begins when no page has been taken for a while, so that it does not take the
    memory's bandwidth from a restore.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], page_nbytes: int, num_pages: int):
        self._memory = memory
        self._page_nbytes = page_nbytes
        self._num_pages = num_pages
        self._ahead = 0  # pages to have ready beyond those in use
        self._used = 0
        self._taken_at = 0.0  # when a page was last taken, by time.monotonic
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def expect(self, nbytes: int) -> None:
        """Have so much ready, in whole pages; what is committed stays so."""
        with self._changed:
            self._ahead = nbytes // self._page_nbytes
            if self._ahead and self._thread is None:
                self._thread = threading.Thread(target=self._touch, name="kestrel-memory", daemon=True)
                self._thread.start()
            self._changed.notify()

    def reach(self, page: int) -> None:
        """Pages up to `page` are in use: commit those that follow."""
        with self._changed:
            self._used = max(self._used, page + 1)
            self._taken_at = time.monotonic()
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, which would otherwise keep the memory alive."""
        with self._changed:
            self._num_pages = 0
            self._changed.notify()

    def _touch(self) -> None:
        start = self._memory.ctypes.data
        done, is_first = 0, True
        while True:
            with self._changed:
                while done >= min(self._used + self._ahead, self._num_pages) and self._num_pages:
                    if is_first:
                        is_first = False
                        give_way(FOR_LATER)
                    self._changed.wait()
                while (
                    not is_first
                    and self._num_pages
                    and (left := self._taken_at + _QUIET_SECONDS - time.monotonic()) > 0
                ):
                    self._changed.wait(left)
                if done >= self._num_pages:
                    return
            if not commit(start + done * self._page_nbytes, self._page_nbytes):
                return
            done += 1


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading token ids are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
