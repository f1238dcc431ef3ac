"""Where engine and store meet: finding the longest prefix in memory and on disk, and steps of many sequences."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kestrel.cache.restore import DamagedRestore
from kestrel.cache.save import Keeping, Writer
from kestrel.cache.scope import Course, Scope
from kestrel.cache.sequence import CachedSequence
from kestrel.cache.worth import Worth
from kestrel.engine.engine import Engine
from kestrel.engine.layers import Floats
from kestrel.engine.pool import CachedPage
from kestrel.errors import CapacityError, StoreError
from kestrel.identity import Tokens, as_tokens
from kestrel.sharing.ondemand import Fetch, OnDemand, Pulling
from kestrel.sharing.related import RelatedNamespace, RelatedNamespaces
from kestrel.store.match import Match, Start
from kestrel.store.store import Store


@dataclass(frozen=True)
class CachePolicy:
    """The part of the configuration that decides what is looked up and saved."""

    min_match: int = 16
    max_prefix_tokens: int | None = None
    accepts_foreign: bool = False  # pages of the same model that other numerics computed
    loads_always: bool = False  # also what would be computed sooner than read


class PrefixCache:
    """Engine, store and writer put together: opens sequences in the common scope or in another one.

    shared: the prefixes whose pages all scopes have in common. published: what can be pulled when a prompt asks for
    it. related: where pages of the same model with other numerics are. Both concern the common scope only.
    """

    def __init__(
        self,
        engine: Engine,
        common: Scope,
        store: Store | None,
        writer: Writer | None,
        policy: CachePolicy,
        log: Callable[[str], None],
    ):
        self.engine = engine
        self.common = common
        self.shared: Sequence[Tokens] = ()
        self.published: OnDemand | None = None
        self.related: RelatedNamespaces | None = None
        self.store = store
        self.writer = writer
        self.policy = policy
        self.log = log
        geometry = engine.geometry
        self.worth = Worth(
            flops_per_token=2 * geometry.num_parameters,
            flops_per_key=4 * geometry.num_layers * geometry.num_heads * geometry.head_dim,
            flops=engine.numerics.flops,
            chunk_tokens=engine.chunk_tokens,
            always=policy.loads_always,
        )
        self.running = RunningSequences()
        self._store_failing = False
        self.uses_are_lost = False  # which was said

    def course(self, tokens: Tokens, scope: Scope | None = None) -> Course:
        """Which scopes the pages of a prompt belong to; `scope` None is the common one."""
        return Course.of(self.common, scope or self.common, self.shared, tokens, self.engine.pool.page_tokens)

    def find(self, tokens: Tokens, scope: Scope | None = None) -> Match:
        """Longest stored prefix of a prompt; the last token is left out, because its logits must be computed."""
        if self.store is None:
            return Match((), 0, "the store is switched off (cache.enabled=false)", None)
        try:
            match = self._find_stored(self.store, tokens[:-1], self.course(tokens, scope))
            self._store_failing = False
            return match
        except StoreError as error:
            if not self._store_failing:
                self.log(f"[KV-DISK] not searched, prompts are computed until the store works again: {error}")
                self._store_failing = True
            return Match((), 0, f"the store cannot be read: {error}", None)

    def _find_stored(self, store: Store, wanted: Tokens, course: Course) -> Match:
        """The longest way through the store: the common pages of a shared prefix, then the scope's own."""
        size, least = self.engine.pool.page_tokens, self.policy.min_match
        branch = course.num_common_pages * size
        shared = Match((), 0, None, None)
        if course.num_shared:
            shared = store.find_prefix(course.common.namespace, wanted[: course.num_shared], size, least)
        if shared.num_tokens < branch:
            return shared
        start = Start(course.parent_of(course.num_common_pages, course.keys(wanted, size)), branch)
        own = store.find_prefix(course.own.namespace, wanted, size, least, start)
        if own.num_tokens < shared.num_tokens or (shared.pages and not own.pages):
            return shared
        before = [
            replace(ref, num_used=min(ref.num_used, branch - ref.first))
            for ref in shared.pages
            if ref.first < branch
        ]
        return replace(own, pages=(*before, *own.pages))

    def find_related(self) -> list[RelatedNamespace]:
        """Where pages of the same model with other numerics are; none if nobody asked for them."""
        if self.related is None:
            return []
        try:
            return self.related.find()
        except StoreError as error:
            if not self._store_failing:
                self.log(f"[KV-DISK] pages of other numerics not looked for: {error}")
            return []

    def find_abroad(self, tokens: Tokens, related: RelatedNamespace) -> Match:
        """Longest prefix of a prompt, without its last token, among pages with other numerics."""
        if self.store is None:
            return Match((), 0, "the store is switched off (cache.enabled=false)", None)
        size, least = self.engine.pool.page_tokens, self.policy.min_match
        try:
            return self.store.find_prefix(related.namespace, tokens[:-1], size, least)
        except StoreError as error:
            return Match((), 0, f"the store cannot be read: {error}", None)

    def fetch(self, tokens: Tokens, scope: Scope | None = None) -> Fetch:
        """Begin to pull the published pages that a prompt goes on along, as far as they are not here."""
        return Fetch(self._pullings(tokens, self.course(tokens, scope)))

    def _pullings(self, tokens: Tokens, course: Course) -> Iterator[Pulling]:
        """The pulls for a prompt: common pages, then, where they are accepted, longer ones with other numerics."""
        published = self.published
        if published is None:
            return
        is_common = course.own is self.common

        def num_known() -> int:
            in_ram = sum(rows for _, rows in self.find_in_ram(tokens, course))
            return max(in_ram, self.find(tokens, course.own).num_tokens)

        shared = tokens if is_common else tokens[: course.num_shared]
        if (pulling := published.begin(self.common.namespace, shared, num_known)) is not None:
            yield pulling
        if not is_common or not self.policy.accepts_foreign:
            return
        most = num_known() + self.policy.min_match - 1
        for related in self.find_related():
            most = max(most, self.find_abroad(tokens, related).num_tokens)
            if (pulling := published.begin(related.namespace, tokens, partial(int, most))) is not None:
                yield pulling
                most = max(most, self.find_abroad(tokens, related).num_tokens)

    def find_in_ram(self, tokens: Tokens, course: Course) -> list[tuple[CachedPage, int]]:
        """Longest prefix of a prompt that is in memory, as `PagePool.find` has it; without its last token."""
        pool, wanted = self.engine.pool, tokens[:-1]
        size = pool.page_tokens
        branch = course.num_common_pages * size
        shared: list[tuple[CachedPage, int]] = []
        if course.num_shared:
            shared = pool.find(course.common.namespace.digest, wanted[: course.num_shared])
        found = shared
        if sum(rows for _, rows in shared) >= branch:
            root = course.parent_of(course.num_common_pages, course.keys(wanted, size))
            own = shared[: course.num_common_pages] + pool.find(root, wanted[branch:])
            found = max(shared, own, key=lambda pages: sum(rows for _, rows in pages))
        return found if sum(rows for _, rows in found) >= self.policy.min_match else []

    def allocate(self) -> int:
        """A pool page; waits for the writer when pages are held only because they are still to be written."""
        try:
            return self.engine.pool.allocate()
        except CapacityError:
            if self.writer is None or not self.writer.num_pending:
                raise
            self.writer.drain()
            return self.engine.pool.allocate()

    def open(
        self,
        tokens: Sequence[int],
        scope: Scope | None = None,
        persist: bool = True,
        pin: bool = False,
        ttl_seconds: float | None = None,
        scored: bool = False,
        fetch: Fetch | None = None,
    ) -> CachedSequence:
        """Begin a request on a prompt of at least one token: match it and start reading what is on disk.

        scope: whose pages it finds and adds, None for the common ones. persist: whether what it computes is
        saved; if not, it stays in memory only. pin: keep what is saved from being evicted. ttl_seconds: what it
        saves leaves when it is unused for so long. scored: the logits after every token of the prompt are wanted, so
        all of it is computed, whatever is stored. fetch: of this prompt; without it one is made and waited for.
        """
        keeping = Keeping(persist, pin, ttl_seconds)
        return CachedSequence(self, as_tokens(tokens), scope, keeping, scored, fetch)

    def step(self, work: Sequence[tuple[CachedSequence, int]]) -> list[Floats | None]:
        """Compute up to so many pending tokens of each sequence, and its draft, in one engine step.

        Returns for each the logits after its last pending token and after each drafted one, float32
        [1 + drafted, vocab_size], or None while tokens are still pending; while a scored prompt is computed, those
        after each of the tokens computed, [tokens, vocab_size]. The numbers must be positive and,
        drafts included, sum to at most `engine.chunk_tokens`. CapacityError when the pool has no room;
        nothing is lost then.
        """
        for sequence, _ in work:
            if not sequence.is_reading:
                sequence.settle()  # damage is known by now: no need to begin a step to meet it
        while True:
            before = replace(self.engine.seconds)
            started = time.perf_counter()  # a step that ended early has only waited
            spans = [sequence.span(rows) for sequence, rows in work]
            try:
                logits = self.engine.forward(spans, self._waiter([sequence for sequence, _ in work]))
                break
            except DamagedRestore:  # a shorter hit: more tokens are pending than before
                for sequence, _ in work:
                    sequence.settle()
        spent = self.engine.seconds - before
        computing = time.perf_counter() - started - spent.waiting
        rows = [(len(span.tokens), span.start) for span in spans]
        num_keys = sum(count * start + count * (count + 1) // 2 for count, start in rows)
        num_rows = sum(count for count, _ in rows)
        # So many logits as a scored prompt takes are not what prompts usually cost.
        if not any(sequence.is_scoring for sequence, _ in work):
            self.worth.note_step(num_rows, num_keys, computing - spent.attention, spent.attention)
        results: list[Floats | None] = []
        row = 0
        for (sequence, _), span in zip(work, spans, strict=True):
            num_drafted = max(0, span.start + len(span.tokens) - len(sequence.tokens))
            sequence.advance(len(span.tokens) - num_drafted, spent, computing)
            results.append(logits[row : row + span.num_logits] if span.num_logits else None)
            row += span.num_logits
        return results

    def _waiter(self, sequences: Sequence[CachedSequence]) -> Callable[[int], None] | None:
        """What a step calls before it reads a layer: waits for every restore that is under way."""
        restores = [sequence.restore for sequence in sequences if sequence.restore is not None]
        if not restores:
            return None

        def wait(layer: int) -> None:
            for restore in restores:
                restore.wait(layer)

        return wait


class RunningSequences:
    """The sequences that are open now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequences: list[CachedSequence] = []

    def add(self, sequence: CachedSequence) -> None:
        """A sequence begins."""
        with self._lock:
            self._sequences.append(sequence)

    def discard(self, sequence: CachedSequence) -> None:
        """A sequence has ended."""
        with self._lock:
            self._sequences = [other for other in self._sequences if other is not sequence]

    def all(self) -> list[CachedSequence]:
        """Those open at this moment."""
        with self._lock:
            return list(self._sequences)
