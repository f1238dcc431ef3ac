"""One request's KV from prompt to close: matched, restored, computed, remembered and saved.

The data path of a request: find the longest prefix in memory and on disk; reference the pages that are in memory, read
the others while the tail is computed; remember and save each page when its last token is computed; on close, save the
last partial page.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kestrel.cache.restore import Restore
from kestrel.cache.save import Keeping, PageSave, RequestEnd, SaveReport
from kestrel.cache.scope import Scope
from kestrel.cache.worth import Choice
from kestrel.engine.engine import Span, StepSeconds
from kestrel.engine.layers import Floats
from kestrel.engine.pool import CachedPage
from kestrel.engine.priority import waited_for_a_core
from kestrel.errors import ArtifactError, CapacityError, RequestError, StoreError
from kestrel.identity import Tokens, as_tokens, page_key, prefix_sha256
from kestrel.sharing.ondemand import Fetch
from kestrel.store.match import Match, PageRef
from kestrel.store.store import OpenPage

if TYPE_CHECKING:
    from kestrel.cache.prefix import PrefixCache


@dataclass
class PrefillStats:
    """What became of a prompt's tokens. Milliseconds; restored + ram + computed = prompt tokens."""

    prompt_tokens: int
    matched_tokens: int = 0  # found in memory or on disk
    restored_tokens: int = 0  # of those, read from disk
    ram_tokens: int = 0  # of those, already in memory
    computed_tokens: int = 0
    prefill_ms: float = 0.0  # computing alone: without lookup and without waiting for the disk
    total_ms: float = 0.0  # from the request to the last prompt token computed
    find_ms: float = 0.0  # looking up, in memory and in the store
    open_ms: float = 0.0  # opening what was found, up to where reading has begun
    restore_ms: float = 0.0  # from the first read to the last, overlapping with the tail
    bytes_read: int = 0
    skipped_tokens: int = 0  # on disk, but not read: computing them is quicker
    load: str | None = None  # what was decided about reading the pages found on disk, and why
    miss_reason: str | None = None
    diverged_at: int | None = None  # position at which the nearest stored page holds another token
    pulled_tokens: int = 0  # of published pages that were fetched for this prompt
    pulled_bytes: int = 0
    pull_ms: float = 0.0  # waited for them, before anything was computed
    pull_problem: str | None = None  # why not all published pages came
    foreign: str | None = (
        None  # whose numerics the restored rows have, if not this CPU's (cache.accept=portable)
    )
    seconds: StepSeconds = field(default_factory=StepSeconds)  # of the steps that computed the tail


class CachedSequence:
    """The KV of one request: its tokens, its pages, and how far they are computed. Always `close` it.

    Steps go through `PrefixCache.step`; `prefill` and `append` are steps of this sequence alone.
    """

    def __init__(
        self,
        cache: "PrefixCache",
        tokens: Tokens,
        scope: Scope | None,
        keeping: Keeping,
        scored: bool = False,
        fetch: Fetch | None = None,
    ):
        if not len(tokens):
            raise RequestError("a prompt needs at least one token")
        cache.engine.activity.expect()  # nobody moves memory while it is matched
        self._cache = cache
        self._pool = cache.engine.pool
        self.tokens: list[int] = tokens.tolist()
        self.stats = PrefillStats(len(tokens))
        self.saves = SaveReport()
        self._prompt = tokens
        self._course = cache.course(tokens, scope)
        self._keeping = keeping
        self._scored = scored
        self.last_key: bytes | None = None  # of the page that the prefix ends with; known when closed
        self._table: list[int] = []
        self._computed = 0  # tokens whose K and V are in the pages
        self._draft: list[int] = []  # guesses that the next step computes behind the pending tokens
        self._keys: list[bytes] = []  # of the full pages, in order
        self._hash = hashlib.sha256()  # of the tokens in full pages
        self._stored: set[bytes] = set()  # keys known to be in the store already
        self.restore: Restore | None = None  # under way
        self._restored: list[PageRef] = []
        self._used: list[bytes] = []  # keys of the stored pages that matched
        self._guards = ExitStack()
        self._closed = False
        self._naming = threading.Lock()  # held while what is computed gets a name, in memory or for the store
        self._has_shared_rest = False  # looked at what the shared prefix has behind its last full page
        self._is_forgotten = False  # nothing it computes gets a name any more
        self._taken: list[bytes] = []  # keys of the pages that were in memory
        self._started = time.perf_counter()
        cache.running.add(self)
        try:
            if scored:
                self.stats.miss_reason = "the logits of every prompt token are wanted, so all are computed"
            else:
                self._fetch(fetch or cache.fetch(tokens, scope))
                self._match()
        except BaseException:
            self.close()
            raise

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are present or being read."""
        return self._computed

    @property
    def num_pages(self) -> int:
        """Pool pages it holds."""
        return len(self._table)

    @property
    def scope(self) -> Scope:
        """Whose pages it finds and adds."""
        return self._course.own

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed yet."""
        return len(self.tokens) - self._computed

    @property
    def is_scoring(self) -> bool:
        """Whether the next step is to return the logits after each token it computes."""
        return self._scored and self._computed < len(self._prompt)

    @property
    def num_guessed(self) -> int:
        """Guessed tokens that the next step computes behind the pending ones."""
        return len(self._draft)

    @property
    def is_reading(self) -> bool:
        """Whether a step of this sequence might have to wait for the disk."""
        return self.restore is not None and not self.restore.is_done

    def prefill(self) -> Floats:
        """Compute all pending tokens; the logits after the last one, float32 [vocab_size]."""
        logits: Floats | None = None
        while logits is None:
            (logits,) = self._cache.step([(self, self._cache.engine.chunk_tokens)])
        last: Floats = logits[0]
        return last

    def append(self, token: int) -> Floats:
        """Add one token (the last sampled one) and compute it; the logits after it, float32 [vocab_size]."""
        self.extend(token)
        return self.prefill()

    def extend(self, token: int) -> None:
        """Add one token, to be computed by the next step."""
        self.tokens.append(token)

    def guess(self, draft: list[int]) -> None:
        """Let the next step compute these tokens too, behind the pending ones, in case they turn out to be right."""
        self._draft = draft

    def take_guess(self) -> list[int]:
        """The guesses of the last step, or of the next one that then does without."""
        draft, self._draft = self._draft, []
        return draft

    def confirm(self, token: int) -> None:
        """Add the next drafted token, which the last step has computed already: it was guessed right."""
        self.tokens.append(token)
        self._computed += 1
        self._end_pages()

    def span(self, rows: int) -> Span:
        """The next `rows` pending tokens (fewer if fewer are pending) for a step, with pages to put them in.

        With the last pending token goes the draft, and the logits of it and of each guess are wanted; of a scored
        prompt, those of every token.
        """
        rows = min(rows, self.num_pending)
        end = self._computed + rows
        complete = end == len(self.tokens)
        draft = self._draft if complete else []
        while len(self._table) * self._pool.page_tokens < end + len(draft):
            self._table.append(self._cache.allocate())
        tokens = as_tokens([*self.tokens[self._computed : end], *draft])
        num_logits = len(tokens) if self.is_scoring else 1 + len(draft) if complete else 0
        return Span(tokens, self._computed, self._table, num_logits)

    def advance(self, rows: int, spent: StepSeconds, computing: float) -> None:
        """Note that a step has computed the next `rows` tokens; what it spent, and the seconds it computed."""
        self.settle()  # the step has waited for every layer, so this does not
        prompt_was_pending = self._computed < len(self._prompt)
        self._computed += rows
        self._end_pages()
        if prompt_was_pending:
            if self._computed >= len(self._prompt):
                self._remember_rest()  # for those who wait with the same prompt
            for name, seconds in vars(spent).items():
                setattr(self.stats.seconds, name, getattr(self.stats.seconds, name) + seconds)
            self.stats.prefill_ms += computing * 1e3
            self.stats.total_ms = (time.perf_counter() - self._started) * 1e3
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
            self._note_uses()
        finally:
            for page in reversed(self._table):  # leaves become the oldest in the RAM cache
                self._pool.release(page)
            self._table = []
            with self._naming:
                self._guards.close()
            self._cache.running.discard(self)

    @property
    def keys(self) -> list[bytes]:
        """Of the full pages it has computed or taken, in order."""
        return list(self._keys)

    def find_page(self, key: bytes) -> tuple[bytes, list[bytes]] | None:
        """Where its tokens pass through the page of this key; None if they do not. May be called from any thread.

        Returns what the page names as its parent, and the keys of the page and of all longer ones in its place.
        """
        size, tokens = self._pool.page_tokens, as_tokens(list(self.tokens))
        keys: list[bytes] = []
        for first in range(0, len(tokens), size):
            page = tokens[first : first + size]
            parent = self._course.parent_of(len(keys), keys)
            found = [page_key(parent, page[:rows]) for rows in range(1, len(page) + 1)]
            if key in found:
                return parent, found[found.index(key) :]
            keys.append(found[-1])
        return None

    def forget(self) -> None:
        """From now on nobody finds what it computes, in memory or on disk. May be called from any thread.

        What got a name before keeps it; the store may remove the pages it has found there.
        """
        with self._naming:
            self._is_forgotten = True
            self._guards.close()

    def disown(self, reason: str) -> None:
        """Give up all that is computed: it is not what this model computes. Nobody finds it, in memory or on disk.

        Its pages in the store are quarantined, whoever wrote them, so that the next such prompt is computed anew.
        Nothing more of this sequence is saved.
        """
        self.settle()
        self.forget()
        cache = self._cache
        parent, rest = self._rest()
        partial = [page_key(parent, rest[:rows]) for rows in range(1, len(rest) + 1)]
        self._pool.forget([*self._keys, *partial, *self._taken])
        if cache.store is None:
            return
        if cache.writer is not None:
            cache.writer.drain()  # what is still to be written would come after the clean-up
        paths = {ref.path for ref in self._restored}
        for index, key in enumerate(self._keys):
            paths.add(cache.store.page_path(self._course.scope_of(index).namespace.digest, key))
        try:
            for path in sorted(paths):
                cache.store.quarantine(path, reason)
        except StoreError as problem:
            cache.log(f"[KV-DISK] pages of {self._computed} tokens stay where they are, {reason}: {problem}")

    # -- matching -----------------------------------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        """Wait until the published pages of the prompt are here, or late."""
        fetch.wait()
        self.stats.pulled_tokens = fetch.num_tokens
        self.stats.pulled_bytes = fetch.nbytes
        self.stats.pull_ms = fetch.seconds * 1e3
        self.stats.pull_problem = fetch.problem

    def _match(self) -> None:
        """Take pages from memory and start reading further ones from the store."""
        started = time.perf_counter()
        cache, size = self._cache, self._pool.page_tokens
        match = cache.find(self._prompt, self._course.own)
        in_ram = cache.find_in_ram(self._prompt, self._course)
        num_in_ram = sum(rows for _, rows in in_ram)
        self.stats.find_ms = (time.perf_counter() - started) * 1e3
        match = self._look_abroad(match, num_in_ram)
        if self.stats.foreign is not None:
            num_in_ram, in_ram = 0, []
        self._stored = {ref.key for ref in match.pages if ref.num_used == ref.num_tokens}
        if num_in_ram >= match.num_tokens:
            self._take_from_ram(in_ram)
        else:
            # Full pages that both have are taken from memory; everything after them is read.
            full = [(page, rows) for page, rows in in_ram if rows == size]
            aligned = [page for (page, _), ref in zip(full, match.pages, strict=False) if page.key == ref.key]
            refs = match.pages[len(aligned) :]
            choice = cache.worth.choose(refs, num_in_ram, len(self._prompt))
            self.stats.load = str(choice)
            if choice.num_pages:
                if self._take_from_ram([(page, size) for page in aligned]):
                    self._start_restore(refs[: choice.num_pages], choice)
            else:
                self.stats.foreign = None
                self._take_from_ram(in_ram)
            if choice.num_pages < len(refs):
                self.stats.skipped_tokens = max(0, match.num_tokens - self._computed)
        self.stats.matched_tokens = self._computed
        if not self._computed:
            skipped = f"{match.num_tokens} tokens are stored, {self.stats.load}"
            self.stats.miss_reason = match.reason or (
                skipped if self.stats.skipped_tokens else "the matching pages are damaged"
            )
        self.stats.diverged_at = match.diverged_at
        if cache.store is not None and match.pages:
            self._used = [ref.key for ref in match.pages]
            # A partial page needs no protection: it is open already, and its successor may replace it any time.
            ancestors = [ref.key for ref in match.pages if ref.num_tokens >= self._pool.page_tokens]
            with self._naming:
                if not self._is_forgotten:
                    self._guards.enter_context(cache.store.protect(ancestors))
        self.stats.open_ms = (time.perf_counter() - started) * 1e3 - self.stats.find_ms

    def _note_uses(self) -> None:
        """Record that the matched pages were of use: at the end, where no first token waits for the catalog."""
        cache, used = self._cache, self._used
        self._used = []
        if cache.store is None or not used:
            return
        try:
            cache.store.touch(used)
            cache.uses_are_lost = False
        except StoreError as error:
            if not cache.uses_are_lost:
                cache.log(f"[KV-DISK] uses are not recorded until the store works again: {error}")
            cache.uses_are_lost = True

    def _look_abroad(self, match: Match, num_in_ram: int) -> Match:
        """A longer match among pages of the same model with other numerics, or `match` with a word about it.

        Rows that follow such pages are never named or saved as this CPU's own.
        """
        cache, known = self._cache, max(match.num_tokens, num_in_ram)
        accepts = cache.policy.accepts_foreign
        if self._course.own is not cache.common or (known and not accepts):
            return match
        best, most, origin = match, known + cache.policy.min_match - 1, None
        for related in cache.find_related():
            found = cache.find_abroad(self._prompt, related)
            num_tokens = found.num_tokens
            if not accepts and cache.published is not None:
                num_tokens = max(num_tokens, cache.published.num_covered(related.namespace, self._prompt))
            if num_tokens > most:
                best, most, origin = found, num_tokens, f"{related.origin} ({related.namespace.name})"
        if origin is None:
            return match
        if accepts:
            self.stats.foreign = origin
            return best
        reason = f"{match.reason}; {most} tokens are stored with other numerics: {origin}"
        return replace(match, reason=f"{reason}; cache.accept=portable reads them")

    def _take_from_ram(self, found: list[tuple[CachedPage, int]]) -> bool:
        """Take pages found in memory; False if some of them are not to be had (the first ones are taken)."""
        for cached, rows in found:
            page = cached.page
            if not self._pool.take(cached):  # a purge was quicker
                return False
            self._taken.append(cached.key)
            if rows < self._pool.page_tokens and (
                rows < len(cached.tokens)
                or self._pool.references(page) > 1
                or cached.parent != self._course.parent_of(len(self._keys), self._keys)
            ):
                # Others may still need the rows that this sequence is going to overwrite, or the page's name.
                try:
                    copied = self._pool.copy(page)
                except CapacityError:  # no room for both: these rows are computed anew
                    return False
                finally:
                    self._pool.release(page)
                page = copied
            self._table.append(page)
            self._computed += rows
            self.stats.ram_tokens += rows
            if rows == self._pool.page_tokens:
                self._end_page(save=cached.key not in self._stored)
        return True

    def _start_restore(self, refs: Sequence[PageRef], choice: Choice) -> None:
        opened: list[tuple[PageRef, OpenPage]] = []
        store = self._cache.store
        assert store is not None
        began, waited = time.perf_counter(), waited_for_a_core()
        store.read_ahead(refs)
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
        num_bytes = sum(ref.nbytes for ref, _ in opened)
        worth = self._cache.worth
        self.restore = Restore(
            self._pool,
            opened,
            self._table,
            None
            if self._cache.policy.loads_always
            else lambda elapsed, nbytes: worth.is_too_slow(choice, elapsed, nbytes, num_bytes),
            began + waited_for_a_core() - waited,
        )

    def _reject(self, ref: PageRef, error: Exception) -> None:
        """Put a file that cannot be used out of the way, so that it is met once only and can be saved anew."""
        self._stored.discard(ref.key)
        if isinstance(error, ArtifactError) and self._cache.store is not None:
            try:
                self._cache.store.quarantine(ref.path, str(error))
            except StoreError as problem:
                self._cache.log(f"[KV-DISK] {ref.path} is damaged but stays where it is: {problem}")

    def settle(self) -> None:
        """Wait for a restore to end and account for it; keep only the pages before a damaged one, none if given up."""
        restore = self.restore
        if restore is None:
            return
        restore.join()
        self.restore = None
        self.stats.restore_ms = restore.seconds * 1e3
        self.stats.bytes_read = restore.nbytes
        self._cache.worth.note_read(restore.nbytes, restore.seconds)
        if restore.is_given_up:
            self._give_up(restore)
        elif restore.damage is not None:
            self._reject(restore.damage.ref, restore.damage.error)
            self._drop_from(restore.damage.ref.first)
            self.stats.miss_reason = f"a matching page is damaged: {restore.damage.error}"
        if self._restored:
            self._pool.expect(restore.nbytes)  # the next session that comes back may be as long
            self._cache.log(
                f"[KV-DISK] loaded {self._computed}-token KV prefix from {self._restored[-1].path}"
            )
        self._end_pages()

    def _give_up(self, restore: Restore) -> None:
        """Compute what was being read: the disk turned out too slow. The artifacts are sound and stay."""
        stored, num_matched = set(self._stored), self._computed
        self._drop_from(self._restored[0].first)
        self._stored = stored
        self.stats.skipped_tokens += num_matched - self._computed
        spent = f"{restore.seconds * 1e3:.0f} ms and {restore.nbytes / 1e6:.1f} MB"
        self.stats.load = f"given up after {spent}: computing is quicker"
        if not self._computed:
            self.stats.miss_reason = f"{num_matched} tokens are stored, reading them was {self.stats.load}"

    def _drop_from(self, position: int) -> None:
        """Forget restored rows from `position` on."""
        keep = -(-position // self._pool.page_tokens)
        for page in self._table[keep:]:
            self._pool.release(page)
        del self._table[keep:]
        self._stored -= {ref.key for ref in self._restored if ref.first >= position}
        self._restored = [ref for ref in self._restored if ref.first < position]
        self._computed = position
        if not position:
            self.stats.foreign = None
        self.stats.matched_tokens = position
        self.stats.restored_tokens = max(0, position - self.stats.ram_tokens)

    # -- remembering and saving -----------------------------------------------------------------------

    def _end_pages(self) -> None:
        """Name all full pages that have no name yet."""
        while (len(self._keys) + 1) * self._pool.page_tokens <= self._computed:
            self._end_page(save=True)
        self._share_rest()

    def _end_page(self, save: bool) -> None:
        """Name the next full page: remember it in the pool and queue it for the store."""
        size = self._pool.page_tokens
        index = len(self._keys)
        tokens = as_tokens(self.tokens[index * size : (index + 1) * size])
        parent = self._course.parent_of(index, self._keys)
        key = page_key(parent, tokens)
        self._keys.append(key)
        self._hash.update(tokens.tobytes())
        with self._naming:
            if self._is_nameless:
                return
            self._pool.remember(self._table[index], parent, tokens)
            if save and key not in self._stored:
                scope, digest = self._course.scope_of(index), self._hash.hexdigest()
                self._save(self._table[index], scope, key, parent, index * size, tokens, digest)

    def _share_rest(self) -> None:
        """Save what a shared prefix has behind its last full page for all scopes, if that had to be computed."""
        course, size = self._course, self._pool.page_tokens
        index, end = course.num_common_pages, course.num_shared
        if self._has_shared_rest or not index * size < end <= self._computed:
            return
        self._has_shared_rest = True
        if self.stats.matched_tokens >= end or end < self._cache.policy.min_match:
            return
        rest = self._prompt[index * size : end]
        parent = self._keys[index - 1] if index else course.common.namespace.digest
        digest = prefix_sha256(self._prompt[:end])
        with self._naming:
            if not self._is_nameless:
                key = page_key(parent, rest)
                self._save(self._table[index], course.common, key, parent, index * size, rest, digest)

    @property
    def _is_nameless(self) -> bool:
        """Whether what it computes is not to be found by others."""
        return self._is_forgotten or self.stats.foreign is not None

    def _rest(self) -> tuple[bytes, Tokens]:
        """The tokens of the last, partial page, and what it names as its parent."""
        tokens = as_tokens(self.tokens[len(self._keys) * self._pool.page_tokens : self._computed])
        return self._course.parent_of(len(self._keys), self._keys), tokens

    def _remember_rest(self) -> None:
        """Let others find the rows of the last, partial page; this sequence goes on writing behind them."""
        parent, rest = self._rest()
        with self._naming:
            if len(rest) and not self._is_nameless:
                self._pool.remember(self._table[len(self._keys)], parent, rest)

    def _save(
        self,
        page: int,
        scope: Scope,
        key: bytes,
        parent: bytes,
        first: int,
        tokens: Tokens,
        digest: str,
    ) -> None:
        limit = self._cache.policy.max_prefix_tokens
        writer = self._cache.writer
        if writer is None or not self._keeping.persist or (limit is not None and first + len(tokens) > limit):
            return
        save = PageSave(
            page, scope, key, parent, first, tokens, digest, self.saves, self._keeping.ttl_seconds
        )
        if writer.submit(save):
            self._stored.add(key)
            if save.ttl_seconds is not None and self._cache.store is not None:
                # Until the next page continues it, its time may be over before this request ends.
                self._guards.enter_context(self._cache.store.protect([key]))

    def _save_rest(self) -> None:
        """The last, partial page: remembered and saved under a key of its own."""
        size, index = self._pool.page_tokens, len(self._keys)
        parent, rest = self._rest()
        key = page_key(parent, rest) if len(rest) else self._keys[-1] if self._keys else parent
        with self._naming:
            if self._is_nameless or not self._computed:
                return
            if len(rest):
                self._pool.remember(self._table[index], parent, rest)
            if len(rest) and key not in self._stored:
                self._hash.update(rest.tobytes())
                scope = self._course.scope_of(index)
                self._save(self._table[index], scope, key, parent, index * size, rest, self._hash.hexdigest())
            self.last_key = key
            if self._cache.writer is None or not self._keeping.persist:
                return
            limit, num_saved = self._cache.policy.max_prefix_tokens, self._computed
            if limit is not None and size <= limit < num_saved:
                num_saved = limit // size * size
                key = self._keys[limit // size - 1]
            scope = self._course.scope_of((num_saved - 1) // size)
            self._cache.writer.end_request(RequestEnd(num_saved, scope, key, self.saves, self._keeping.pin))
