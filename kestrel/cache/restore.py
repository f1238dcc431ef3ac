"""Reading matched pages from the store into the pool while the tail is already being computed."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kestrel.engine.pool import PagePool
from kestrel.engine.priority import waited_for_a_core
from kestrel.errors import ArtifactError
from kestrel.store.match import PageRef
from kestrel.store.store import OpenPage

NUM_READERS = 4  # disks want several reads at once (8K float32, not in the page cache: 490 -> 440 ms)
PIECE_NBYTES = 1 << 20  # of a page read at once: 10 layers of int8, 2 of float32 in a small model
# Where the disk may turn out too slow each reader asks for so much of what has come so far: with all of them a quarter,
# so that what is under way when a read is given up takes little longer, and a disk that wants large reads gets them.
PART_AT_ONCE = 1 / 16
LEAST_PART_NBYTES = 4096  # and a multiple of it, as reads past the page cache must be


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
    """Reader threads that fill pool pages layer by layer, across all pages of a match.

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
        began: float | None = None,
    ):
        """pages: what to read, opened and checked, in order of position; table: the sequence's pool pages.

        is_too_slow(seconds so far, bytes so far): asked after every part, small ones while little is read; the read is
        given up when it says so. began: by time.perf_counter, if opening the pages is to count as well, without what
        that waited for a core.
        """
        self._pool = pool
        self._pages = list(pages)
        self._table = table
        self._changed = threading.Condition()  # guards all of the below
        self._pieces = self._in_order()
        self._num_sound = len(self._pages)  # pages before the first damaged one
        self._left = [len(self._pages)] * pool.layout.num_layers  # pages still to be read, of each layer
        self._ready = 0  # layers complete
        self._started = time.perf_counter()
        self._began = began or self._started
        self.seconds = 0.0  # from start to the last layer
        self.nbytes = 0  # read so far
        self.timeline = Timeline()
        self.damage: Damage | None = None
        self.is_given_up = False  # too slow: nothing of it is of use
        self.failure: Exception | None = None  # a fault of a reader itself
        self._is_too_slow = is_too_slow
        self._brought = 0  # bytes read in parts so far
        if is_too_slow is not None:
            for _, page in self._pages:
                page.progress = self._judge_part
        self._num_reading = NUM_READERS
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(NUM_READERS):
                thread = threading.Thread(target=self._read, name="kestrel-restore", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the process may have no more threads: its own reads what is left
            for _ in range(NUM_READERS - len(self._threads)):
                self._read()

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
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until nothing is written to the pool any more. Raises what a reader itself failed with."""
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _in_order(self) -> Iterator[tuple[range, int]]:
        """Layers and number of page of everything there is to read; pages known to be of no use are left out.

        The first layers go one by one, as a step waits for them; then as many as have gone before, up to a limit.
        """
        num_layers = self._pool.layout.num_layers
        most = max(1, PIECE_NBYTES // self._pool.layout.layer_nbytes(self._pool.page_tokens))
        end = 0
        while end < num_layers:
            layers = range(end, min(num_layers, end + max(1, min(end, most))))
            end = layers.stop
            for number in range(len(self._pages)):
                if number < self._num_sound:
                    yield layers, number

    def _read(self) -> None:
        """What each thread does: take the next layers of a page and read them, until there are none."""
        try:
            while True:
                with self._changed:
                    layers, number = next(self._pieces, (range(0), -1))
                if not layers or self.is_given_up or self.failure is not None:
                    break
                ref, page = self._pages[number]
                if layers.start == 0:
                    page.avoid_page_cache()
                try:
                    nbytes = read_layers(self._pool, page, ref, layers, self._table)
                except ArtifactError as error:
                    self._note_damage(number, error)
                else:
                    self._note_layers(layers, nbytes)
        except _GivenUp:
            pass
        except Exception as error:  # handed to join(): the step must not wait for ever
            with self._changed:
                self.failure = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._num_reading -= 1
                is_last = not self._num_reading
            if is_last:
                for _, page in self._pages:
                    page.close()
                self.seconds = time.perf_counter() - self._started

    def _note_layers(self, layers: range, nbytes: int) -> None:
        with self._changed:
            self.nbytes += nbytes
            for layer in layers:
                self._left[layer] -= 1
            while self._ready < len(self._left) and not self._left[self._ready]:
                self.timeline.ready[self._ready] = time.perf_counter() - self._started
                self._ready += 1
                self._changed.notify_all()

    def _note_damage(self, number: int, error: ArtifactError) -> None:
        with self._changed:
            if number < self._num_sound:
                self._num_sound = number
                self.damage = Damage(self._pages[number][0], error)
                self._changed.notify_all()

    def _judge_part(self, nbytes: int) -> int:
        """Note a part of what is read, and say how much to read next; ends the reader once the read is too slow.

        That is decided once, for all readers.
        """
        assert self._is_too_slow is not None
        with self._changed:
            self._brought += nbytes
            if nbytes and not self.is_given_up and self._is_too_slow(self._spent(), self._brought):
                self.nbytes = self._brought
                self.is_given_up = True
                self._changed.notify_all()
            if self.is_given_up:
                raise _GivenUp
            num_least = int(self._brought * PART_AT_ONCE) // LEAST_PART_NBYTES
        return LEAST_PART_NBYTES * max(1, num_least)

    def _spent(self) -> float:
        """Seconds since the read began, without those that the reader waited for a core."""
        elapsed = time.perf_counter() - self._began
        if threading.current_thread() in self._threads:  # any other has waited for more than this read
            elapsed -= waited_for_a_core()
        return elapsed


class _GivenUp(Exception):
    """Ends the reader: going on takes longer than computing."""


def read_layers(pool: PagePool, page: OpenPage, ref: PageRef, layers: range, table: Sequence[int]) -> int:
    """Read some layers of one artifact to where their rows belong in the pool; return the bytes read.

    A full page that lies on the pool's own page boundaries is read in place. Others (partial pages, pages
    of another size) are read aside, checked, and their rows are copied to their slots. Raises ArtifactError.
    """
    size = pool.page_tokens
    if ref.first % size == 0 and ref.num_tokens == size:
        block = pool.layer_block(table[ref.first // size], layers.start, len(layers))
        page.read_layer_into(layers.start, block, len(layers))
        return block.nbytes
    return sum(_read_aside(pool, page, ref, layer, table) for layer in layers)


def _read_aside(pool: PagePool, page: OpenPage, ref: PageRef, layer: int, table: Sequence[int]) -> int:
    size = pool.page_tokens
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
