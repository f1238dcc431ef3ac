"""One request's KV from prompt to close: matched, restored, computed, remembered and saved.

This is where engine and store meet. The data path of a request: find the longest prefix in memory and
on disk; reference the pages that are in memory, read the others while the tail is computed; remember
and save each page when its last token is computed; on close, save the last partial page.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields

from kestrel.cache.restore import DamagedRestore, Restore
from kestrel.cache.save import PageSave, RequestEnd, SaveReport, Writer
from kestrel.engine.engine import Engine, Span, StepSeconds
from kestrel.engine.layers import Floats
from kestrel.engine.pool import CachedPage
from kestrel.errors import ArtifactError, CapacityError, RequestError, StoreError
from kestrel.identity import Namespace, Tokens, as_tokens, page_key
from kestrel.store.match import Match, PageRef
from kestrel.store.store import OpenPage, Store


@dataclass
class PrefillStats:
    """What became of a prompt's tokens. Milliseconds; restored + ram + computed = prompt tokens."""

    prompt_tokens: int
    matched_tokens: int = 0  # found in memory or on disk
    restored_tokens: int = 0  # of those, read from disk
    ram_tokens: int = 0  # of those, already in memory
    computed_tokens: int = 0
    prefill_ms: float = 0.0  # lookup, restore and tail together
    find_ms: float = 0.0
    restore_ms: float = 0.0  # from the first read to the last, overlapping with the tail
    bytes_read: int = 0
    miss_reason: str | None = None
    diverged_at: int | None = None  # position at which the nearest stored page holds another token
    seconds: StepSeconds = field(default_factory=StepSeconds)  # of the steps that computed the tail


@dataclass(frozen=True)
class CachePolicy:
    """The part of the configuration that decides what is looked up and saved."""

    min_match: int = 16
    max_prefix_tokens: int | None = None


class PrefixCache:
    """Engine, store and writer of one namespace: opens sequences."""

    def __init__(
        self,
        engine: Engine,
        namespace: Namespace,
        store: Store | None,
        writer: Writer | None,
        policy: CachePolicy,
        log: Callable[[str], None],
    ):
        self.engine = engine
        self.namespace = namespace
        self.store = store
        self.writer = writer
        self.policy = policy
        self.log = log
        self._store_failing = False

    def find(self, tokens: Tokens) -> Match:
        """Longest stored prefix of a prompt; the last token is left out, because its logits must be computed."""
        if self.store is None:
            return Match((), 0, "the store is switched off (cache.enabled=false)", None)
        try:
            match = self.store.find_prefix(
                self.namespace, tokens[:-1], self.engine.pool.page_tokens, self.policy.min_match
            )
            self._store_failing = False
            return match
        except StoreError as error:
            if not self._store_failing:
                self.log(f"[KV-DISK] not searched, prompts are computed until the store works again: {error}")
                self._store_failing = True
            return Match((), 0, f"the store cannot be read: {error}", None)

    def allocate(self) -> int:
        """A pool page; waits for the writer when pages are held only because they are still to be written."""
        try:
            return self.engine.pool.allocate()
        except CapacityError:
            if self.writer is None or not self.writer.num_pending:
                raise
            self.writer.drain()
            return self.engine.pool.allocate()

    def open(self, tokens: Sequence[int]) -> "CachedSequence":
        """Begin a request on a prompt of at least one token: match it and start reading what is on disk."""
        return CachedSequence(self, as_tokens(tokens))

    def step(self, work: Sequence[tuple["CachedSequence", int]]) -> list[Floats | None]:
        """Compute up to so many pending tokens of each sequence in one engine step.

        Returns for each the logits after its last token, float32 [vocab_size], or None while tokens are
        still pending. The numbers must be positive and sum to at most `engine.chunk_tokens`. CapacityError
        when the pool has no room; nothing is lost then.
        """
        before = StepSeconds(**vars(self.engine.seconds))
        while True:
            spans = [sequence.span(rows) for sequence, rows in work]
            try:
                logits = self.engine.forward(spans, self._waiter([sequence for sequence, _ in work]))
                break
            except DamagedRestore:  # a shorter hit: more tokens are pending than before
                for sequence, _ in work:
                    sequence.settle()
        spent = StepSeconds(
            *(getattr(self.engine.seconds, f.name) - getattr(before, f.name) for f in fields(StepSeconds))
        )
        results: list[Floats | None] = []
        row = 0
        for (sequence, _), span in zip(work, spans, strict=True):
            sequence.advance(len(span.tokens), spent)
            results.append(logits[row] if span.num_logits else None)
            row += span.num_logits
        return results

    def _waiter(self, sequences: Sequence["CachedSequence"]) -> Callable[[int], None] | None:
        """What a step calls before it reads a layer: waits for every restore that is under way."""
        restores = [sequence.restore for sequence in sequences if sequence.restore is not None]
        if not restores:
            return None

        def wait(layer: int) -> None:
            for restore in restores:
                restore.wait(layer)

        return wait


class CachedSequence:
    """The KV of one request: its tokens, its pages, and how far they are computed. Always `close` it.

    Steps go through `PrefixCache.step`; `prefill` and `append` are steps of this sequence alone.
    """

    def __init__(self, cache: PrefixCache, tokens: Tokens):
        if not len(tokens):
            raise RequestError("a prompt needs at least one token")
        self._cache = cache
        self._pool = cache.engine.pool
        self.tokens: list[int] = tokens.tolist()
        self.stats = PrefillStats(len(tokens))
        self.saves = SaveReport()
        self._prompt = tokens
        self._table: list[int] = []
        self._computed = 0  # tokens whose K and V are in the pages
        self._keys: list[bytes] = []  # of the full pages, in order
        self._hash = hashlib.sha256()  # of the tokens in full pages
        self._stored: set[bytes] = set()  # keys known to be in the store already
        self.restore: Restore | None = None  # under way
        self._restored: list[PageRef] = []
        self._guards = ExitStack()
        self._closed = False
        self._started = time.perf_counter()
        try:
            self._match()
        except BaseException:
            self.close()
            raise

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are present or being read."""
        return self._computed

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed yet."""
        return len(self.tokens) - self._computed

    @property
    def is_reading(self) -> bool:
        """Whether a step of this sequence might have to wait for the disk."""
        return self.restore is not None and not self.restore.is_done

    def prefill(self) -> Floats:
        """Compute all pending tokens; the logits after the last one, float32 [vocab_size]."""
        logits: Floats | None = None
        while logits is None:
            (logits,) = self._cache.step([(self, self._cache.engine.chunk_tokens)])
        return logits

    def append(self, token: int) -> Floats:
        """Add one token (the last sampled one) and compute it; the logits after it, float32 [vocab_size]."""
        self.extend(token)
        return self.prefill()

    def extend(self, token: int) -> None:
        """Add one token, to be computed by the next step."""
        self.tokens.append(token)

    def span(self, rows: int) -> Span:
        """The next `rows` pending tokens (fewer if fewer are pending) for a step, with pages to put them in."""
        rows = min(rows, self.num_pending)
        end = self._computed + rows
        while len(self._table) * self._pool.page_tokens < end:
            self._table.append(self._cache.allocate())
        tokens = as_tokens(self.tokens[self._computed : end])
        return Span(tokens, self._computed, self._table, int(end == len(self.tokens)))

    def advance(self, rows: int, spent: StepSeconds) -> None:
        """Note that a step has computed the next `rows` tokens, and what it spent."""
        self.settle()  # the step has waited for every layer, so this does not
        prompt_was_pending = self._computed < len(self._prompt)
        self._computed += rows
        self._end_pages()
        if prompt_was_pending:
            for name, seconds in vars(spent).items():
                setattr(self.stats.seconds, name, getattr(self.stats.seconds, name) + seconds)
            self.stats.prefill_ms = (time.perf_counter() - self._started) * 1e3
            self.stats.computed_tokens = (
                min(self._computed, len(self._prompt)) - self.stats.restored_tokens - self.stats.ram_tokens
            )

    def close(self) -> None:
        """Save and remember the last partial page, then let go of all pages. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self.settle()
            self._save_rest()
        finally:
            for page in reversed(self._table):  # leaves become the oldest in the RAM cache
                self._pool.release(page)
            self._table = []
            self._guards.close()

    # -- matching -----------------------------------------------------------------------------------

    def _match(self) -> None:
        """Take pages from memory and start reading further ones from the store."""
        started = time.perf_counter()
        cache, size = self._cache, self._pool.page_tokens
        wanted = self._prompt[:-1]
        match = cache.find(self._prompt)
        in_ram = self._pool.find(cache.namespace.digest, wanted, cache.policy.min_match)
        num_in_ram = sum(rows for _, rows in in_ram)
        self.stats.find_ms = (time.perf_counter() - started) * 1e3
        self._stored = {ref.key for ref in match.pages if ref.num_used == ref.num_tokens}
        if num_in_ram >= match.num_tokens:
            self._take_from_ram(in_ram)
        else:
            # Full pages that both have are taken from memory; everything after them is read.
            full = [(page, rows) for page, rows in in_ram if rows == size]
            aligned = [page for (page, _), ref in zip(full, match.pages, strict=False) if page.key == ref.key]
            self._take_from_ram([(page, size) for page in aligned])
            self._start_restore(match.pages[len(aligned) :])
        self.stats.matched_tokens = self._computed
        if not self._computed:
            self.stats.miss_reason = match.reason or "the matching pages are damaged"
        self.stats.diverged_at = match.diverged_at
        if cache.store is not None and match.pages:
            try:
                self._guards.enter_context(cache.store.protect([ref.key for ref in match.pages]))
                cache.store.touch([ref.key for ref in match.pages])
            except StoreError as error:
                cache.log(f"[KV-DISK] use of {match.num_tokens} tokens not recorded: {error}")

    def _take_from_ram(self, found: list[tuple[CachedPage, int]]) -> None:
        for cached, rows in found:
            page = cached.page
            self._pool.retain(page)
            self._table.append(page)
            self._computed += rows
            self.stats.ram_tokens += rows
            if rows == self._pool.page_tokens:
                self._end_page(save=cached.key not in self._stored)
            elif rows < len(cached.tokens) or self._pool.references(page) > 1:
                # Others may still need the rows that this sequence is going to overwrite.
                self._table[-1] = self._pool.copy(page)
                self._pool.release(page)

    def _start_restore(self, refs: Sequence[PageRef]) -> None:
        opened: list[tuple[PageRef, OpenPage]] = []
        store = self._cache.store
        assert store is not None
        for ref in refs:
            try:
                opened.append((ref, store.open_page(ref, self._pool.layout)))
            except (ArtifactError, StoreError) as error:
                self._reject(ref, error)
                break
        if not opened:
            return
        try:
            last = opened[-1][0]
            while len(self._table) * self._pool.page_tokens < last.first + last.num_used:
                self._table.append(self._cache.allocate())
        except CapacityError:
            for _, page in opened:
                page.close()
            raise
        self._restored = [ref for ref, _ in opened]
        self._computed = last.first + last.num_used
        self.stats.restored_tokens = self._computed - self.stats.ram_tokens
        self.restore = Restore(self._pool, opened, self._table)

    def _reject(self, ref: PageRef, error: Exception) -> None:
        """Put a file that cannot be used out of the way, so that it is met once only and can be saved anew."""
        self._stored.discard(ref.key)
        if isinstance(error, ArtifactError) and self._cache.store is not None:
            try:
                self._cache.store.quarantine(ref.path, str(error))
            except StoreError as problem:
                self._cache.log(f"[KV-DISK] {ref.path} is damaged but stays where it is: {problem}")

    def settle(self) -> None:
        """Wait for a restore to end and account for it; after damage, keep the pages before it only."""
        restore = self.restore
        if restore is None:
            return
        restore.join()
        self.restore = None
        self.stats.restore_ms = restore.seconds * 1e3
        self.stats.bytes_read = restore.nbytes
        if restore.damage is not None:
            self._reject(restore.damage.ref, restore.damage.error)
            self._drop_from(restore.damage.ref.first)
            self.stats.miss_reason = f"a matching page is damaged: {restore.damage.error}"
        if self._restored:
            self._cache.log(
                f"[KV-DISK] loaded {self._computed}-token KV prefix from {self._restored[-1].path}"
            )
        self._end_pages()

    def _drop_from(self, position: int) -> None:
        """Forget restored rows from `position` on: their file was damaged."""
        keep = -(-position // self._pool.page_tokens)
        for page in self._table[keep:]:
            self._pool.release(page)
        del self._table[keep:]
        self._stored -= {ref.key for ref in self._restored if ref.first >= position}
        self._restored = [ref for ref in self._restored if ref.first < position]
        self._computed = position
        self.stats.matched_tokens = position
        self.stats.restored_tokens = max(0, position - self.stats.ram_tokens)

    # -- remembering and saving -----------------------------------------------------------------------

    def _end_pages(self) -> None:
        """Name all full pages that have no name yet."""
        while (len(self._keys) + 1) * self._pool.page_tokens <= self._computed:
            self._end_page(save=True)

    def _end_page(self, save: bool) -> None:
        """Name the next full page: remember it in the pool and queue it for the store."""
        size = self._pool.page_tokens
        index = len(self._keys)
        tokens = as_tokens(self.tokens[index * size : (index + 1) * size])
        parent = self._keys[-1] if self._keys else self._cache.namespace.digest
        key = page_key(parent, tokens)
        self._keys.append(key)
        self._hash.update(tokens.tobytes())
        self._pool.remember(self._table[index], parent, tokens)
        if save and key not in self._stored:
            self._save(self._table[index], key, parent, index * size, tokens, self._hash.hexdigest())

    def _save(
        self, page: int, key: bytes, parent: bytes, first: int, tokens: Tokens, prefix_sha256: str
    ) -> None:
        limit = self._cache.policy.max_prefix_tokens
        if self._cache.writer is None or (limit is not None and first + len(tokens) > limit):
            return
        if self._cache.writer.submit(PageSave(page, key, parent, first, tokens, prefix_sha256, self.saves)):
            self._stored.add(key)

    def _save_rest(self) -> None:
        """The last, partial page: remembered and saved under a key of its own."""
        size = self._pool.page_tokens
        index = len(self._keys)
        rest = as_tokens(self.tokens[index * size : self._computed])
        parent = self._keys[-1] if self._keys else self._cache.namespace.digest
        key = parent
        if len(rest):
            key = page_key(parent, rest)
            self._pool.remember(self._table[index], parent, rest)
            if key not in self._stored:
                self._hash.update(rest.tobytes())
                self._save(self._table[index], key, parent, index * size, rest, self._hash.hexdigest())
        if self._cache.writer is not None and self._computed:
            self._cache.writer.end_request(RequestEnd(self._computed, key, self.saves))
