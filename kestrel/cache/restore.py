"""Reading matched pages from the store into the pool while the tail is already being computed."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kestrel.engine.pool import PagePool
from kestrel.errors import ArtifactError
from kestrel.store.match import PageRef
from kestrel.store.store import OpenPage

TRIAL_NBYTES = 1 << 20  # read in small pieces, to notice a slow disk early; larger ones are read faster


@dataclass(frozen=True)
class Damage:
    """The first page of a restore that could not be used, and why."""

    ref: PageRef
    error: ArtifactError


class DamagedRestore(Exception):
    """Raised into the step that waits for a layer: the hit is shorter than promised (see Restore.damage)."""


@dataclass
class Timeline:
    """When each layer was asked for by a step, and when it was ready: seconds from the start of the restore."""

    asked: dict[int, float] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)


class Restore:
    """One reader thread that fills pool pages layer by layer, across all pages of a match.

    A layer counts as ready when its bytes of every page are in the pool and their digests agree; a step
    may then read it while later layers are still on the disk. Pages after a damaged one are abandoned,
    those before it are read to the end. The caller keeps every page referenced until `join`.
    """

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[tuple[PageRef, OpenPage]],
        table: Sequence[int],
        is_too_slow: Callable[[float, int], bool] | None = None,
    ):
        """pages: what to read, opened and checked, in order of position; table: the sequence's pool pages.

        is_too_slow(seconds so far, bytes so far): asked on the way, often while little is read and then after every
        layer of a page; the read is given up when it says so.
        """
        self._pool = pool
        self._pages = list(pages)
        self._table = table
        self._ready = 0  # layers complete
        self._changed = threading.Condition()
        self._started = time.perf_counter()
        self.seconds = 0.0  # from start to the last layer
        self.nbytes = 0  # read so far
        self.timeline = Timeline()
        self.damage: Damage | None = None
        self.is_given_up = False  # too slow: nothing of it is of use
        self.failure: Exception | None = None  # a fault of the reader itself
        self._is_too_slow = is_too_slow
        self._brought = 0  # bytes read in pieces so far
        if is_too_slow is not None:
            for _, page in self._pages:
                page.progress = self._judge_piece
        self._thread = threading.Thread(target=self._read, name="kestrel-restore", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Block until `layer` is ready. Raises DamagedRestore as soon as any page is known to be of no use."""
        self.timeline.asked.setdefault(layer, time.perf_counter() - self._started)
        if self._ready > layer and not self._is_broken:
            return
        with self._changed:
            while self._ready <= layer and not self._is_broken:
                self._changed.wait()
        if self._is_broken:
            raise DamagedRestore

    @property
    def _is_broken(self) -> bool:
        return self.damage is not None or self.is_given_up or self.failure is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be read."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing is written to the pool any more. Raises what the reader itself failed with."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _read(self) -> None:
        try:
            layers = self._pool.layout.num_layers
            for layer in range(layers):
                for index, (ref, page) in enumerate(self._pages):
                    try:
                        self.nbytes += read_layer(self._pool, page, ref, layer, self._table)
                    except ArtifactError as error:
                        with self._changed:
                            self.damage = Damage(ref, error)
                            self._changed.notify_all()
                        del self._pages[index:]
                        page.close()
                        break
                    self._judge(self.nbytes)
                with self._changed:
                    self._ready = layer + 1
                    self.timeline.ready[layer] = time.perf_counter() - self._started
                    self._changed.notify_all()
        except _GivenUp:
            self.nbytes = max(self.nbytes, self._brought)
            with self._changed:
                self.is_given_up = True
                self._changed.notify_all()
        except Exception as error:  # handed to join(): the step must not wait for ever
            with self._changed:
                self.failure = error
                self._changed.notify_all()
        finally:
            for _, page in self._pages:
                page.close()
            self.seconds = time.perf_counter() - self._started

    def _judge(self, nbytes: int) -> None:
        if self._is_too_slow is not None and self._is_too_slow(time.perf_counter() - self._started, nbytes):
            raise _GivenUp

    def _judge_piece(self, nbytes: int) -> None:
        """Note a piece of a layer; once enough is read to know the disk, layers are read in one piece each."""
        self._brought += nbytes
        self._judge(self._brought)
        if self._brought >= TRIAL_NBYTES:
            for _, page in self._pages:
                page.progress = None


class _GivenUp(Exception):
    """Ends the reader: going on takes longer than computing."""


def read_layer(pool: PagePool, page: OpenPage, ref: PageRef, layer: int, table: Sequence[int]) -> int:
    """Read one layer of one artifact to where its rows belong in the pool; return the bytes read.

    A full page that lies on the pool's own page boundaries is read in place. Others (partial pages, pages
    of another size) are read aside, checked, and their rows are copied to their slots. Raises ArtifactError.
    """
    size = pool.page_tokens
    if ref.first % size == 0 and ref.num_tokens == size:
        block = pool.layer_block(table[ref.first // size], layer)
        page.read_layer_into(layer, block)
        return block.nbytes
    aside = np.empty(pool.layout.layer_nbytes(ref.num_tokens), np.uint8)
    page.read_layer_into(layer, aside)
    at = 0
    arrays = []
    for name, dtype, shape, nbytes in pool.layout.layer_tensors(layer, ref.num_tokens):
        rows = aside[at : at + nbytes].view(np.int8 if dtype == "I8" else np.float32).reshape(shape)
        arrays.append(np.moveaxis(rows, 1 if name.endswith(".v") else -1, 0))
        at += nbytes
    done = 0
    while done < ref.num_used:
        number, slot = divmod(ref.first + done, size)
        count = min(ref.num_used - done, size - slot)
        for source, (target, axis) in zip(arrays, pool.layer_arrays(table[number], layer), strict=True):
            np.moveaxis(target, axis, 0)[slot : slot + count] = source[done : done + count]
        done += count
    return aside.nbytes


def cut_page(pool: PagePool, page: int, rows: int) -> list[np.ndarray]:
    """The payload of an artifact of the first `rows` rows of a page: one uint8 array a layer."""
    layers = range(pool.layout.num_layers)
    if rows == pool.page_tokens:
        return [pool.layer_block(page, layer) for layer in layers]
    return [
        np.concatenate(
            [
                np.ascontiguousarray(array[:, :rows] if axis == 1 else array[:, :, :rows])
                .view(np.uint8)
                .reshape(-1)
                for array, axis in pool.layer_arrays(page, layer)
            ]
        )
        for layer in layers
    ]
