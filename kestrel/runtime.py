"""One process's model, engine and store put together: what the server, the command line and the bench use."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from kestrel.cache.prefix import CachePolicy, PrefixCache
from kestrel.cache.save import Writer
from kestrel.cache.scope import Scope
from kestrel.config import Config
from kestrel.configured import configured_store
from kestrel.engine.engine import Engine
from kestrel.engine.kernels import are_compiled
from kestrel.engine.sampling import Sampling, TokenLogprob
from kestrel.errors import CapacityError, PromptTooLong, RequestError, StoreError
from kestrel.generation import Delta, Finished, Generation, Request, Stats
from kestrel.identity import FORMAT, Namespace, as_tokens
from kestrel.log import Log, log_to_stderr
from kestrel.models.chat import ChatTemplate, load_chat_template
from kestrel.models.fetch import resolve_model
from kestrel.models.tokenizer import Tokenizer
from kestrel.models.weights import Weights, load_weights
from kestrel.sharing.ondemand import Fetch, OnDemand
from kestrel.sharing.related import RelatedNamespaces
from kestrel.sharing.repository import find_repository
from kestrel.store.layout import KvDtype
from kestrel.store.match import Match
from kestrel.store.store import Store

__all__ = [
    "Delta",
    "Finished",
    "Generation",
    "Request",
    "Runtime",
    "Sampling",
    "Stats",
    "TokenLogprob",
]

SCORED_NBYTES = 64 << 20  # largest logits of a step's prompt rows, where those of every row are wanted


class Runtime:
    """A loaded model with its cache. Generate and prefill from one thread at a time; `find` from any."""

    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        log: Log,
    ):
        """Use `Runtime.open`."""
        self.config = config
        self.name = name
        self.tokenizer = tokenizer
        self.chat = chat
        self.context_tokens = engine.context_tokens
        self._log = log
        self.engine = engine
        if not self.engine.numerics.exact:
            log(
                "kestrel: NOT EXACT on this CPU: a row's result depends on the rows beside it, so a restored answer "
                "may differ from a computed one; `kestrel doctor` has details"
            )
        self.identity: dict[str, Any] = {
            "format": FORMAT,
            "model": engine.geometry.as_identity(),
            "weights": engine.weights.as_identity(),
            "kv": {"dtype": config.engine.kv},
            "numerics": {"probe": self.engine.numerics.digest, "exact": self.engine.numerics.exact},
        }
        common = Scope.of(self.identity)
        self.namespace: Namespace = common.namespace
        self.store: Store | None = None
        self.store_problem: str | None = None  # why it could not be used at the start
        self.writer: Writer | None = None
        if config.cache.enabled:
            self._open_store()
        policy = CachePolicy(
            config.cache.min_match,
            config.cache.max_prefix_tokens,
            accepts_foreign=config.cache.accept == "portable",
            loads_always=config.cache.load == "always",
        )
        self.cache = PrefixCache(self.engine, common, self.store, self.writer, policy, log)
        if self.store is not None:
            self._look_around(self.store)

    @classmethod
    def open(
        cls, config: Config, log: Log = log_to_stderr, progress: Callable[[int, int], None] | None = None
    ) -> "Runtime":
        """Load the model (fetching and converting it the first time), then index the store.

        progress(numbers converted, all) is called while weights are converted. ModelError, ConfigError.
        """
        checkpoint, name = resolve_model(config.model, log)
        weights = load_weights(
            checkpoint, config.engine.weights, Path(config.model.root) / "converted", progress, log
        )
        longest = weights.geometry.context_tokens
        wanted = config.model.context_tokens
        if wanted is not None and wanted > longest:
            raise RequestError(
                f"model.context_tokens={wanted}, but {name} was made for at most {longest}; choose a smaller number"
            )
        chat = checkpoint.chat_template()
        if config.model.chat_template is not None:
            chat = load_chat_template(Path(config.model.chat_template), chat)
        with ThreadPoolExecutor(1) as beside:  # packing the weights leaves the interpreter free
            tokenizer = beside.submit(checkpoint.tokenizer)
            engine = _open_engine(config, weights, log)
        return cls(config, name, engine, tokenizer.result(), chat, log)

    def _open_store(self) -> None:
        cache = self.config.cache
        store = configured_store(cache)
        try:
            store.open()
            self._log(f"[KV-DISK] index: {store.usage().files} checkpoint(s) in {cache.root}")
        except StoreError as error:
            self._log(f"[KV-DISK] the store cannot be used now, prompts are computed until it can: {error}")
            self.store_problem = str(error)
        self.store = store
        self.writer = Writer(store, self.engine.pool, cache.save_queue_pages, self.engine.activity, self._log)

    def _look_around(self, store: Store) -> None:
        """Let the cache know of what is published in the repository around the store, and of other numerics."""
        listing, pages = None, []
        if self.config.cache.pull_seconds is not None and find_repository(store.root) is not None:
            published = OnDemand(
                store, self.config.cache.pull_seconds, self.config.cache.min_match, self._log
            )
            listing = published.listing
            try:
                pages = listing.refresh().pages
            except OSError as error:
                self._log(f"[KV-DISK] what is published cannot be listed now: {error}")
                pages = []
            if pages:
                num_away = sum(not page.is_here for page in pages)
                self._log(f"[KV-DISK] published: {len(pages)} page(s), {num_away} of them not here yet")
            self.cache.published = published
        self.cache.related = RelatedNamespaces(store.root, listing, self.identity, self.namespace)
        stored = self._stored_nbytes(store) + sum(page.nbytes for page in pages)
        self.engine.pool.expect(stored)  # a session may come back

    def _stored_nbytes(self, store: Store) -> int:
        """Bytes of the pages that prompts without a tenant might be restored from."""
        try:
            found = store.list_namespaces()
        except StoreError:  # it cannot be used now
            return 0
        return sum(row.bytes for row in found if row.digest == self.namespace.digest)

    def close(self) -> None:
        """Write what is queued, then let go of the store."""
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            self.store.close()
        self.engine.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self, prefixes: Sequence[list[int]]) -> None:
        """Make these prefixes common to all scopes; call it before requests come."""
        self.cache.shared = [as_tokens(prefix) for prefix in prefixes]

    def tenant_scope(self, tenant: str) -> Scope:
        """The scope of a tenant: nobody else finds its pages, in memory or on disk, but for shared prefixes."""
        return Scope.of({**self.identity, "tenant": tenant})

    def find(self, tokens: list[int], scope: Scope | None = None) -> Match:
        """The longest stored prefix of a prompt, without using it."""
        return self.cache.find(as_tokens(tokens), scope)

    def prefill(self, tokens: list[int], fetch: Fetch | None = None) -> Stats:
        """Restore or compute a prefix, and save it; nothing is generated."""
        generation = self.start(Request(tokens, 1), fetch)
        try:
            generation.sequence.prefill()
        finally:
            generation.close()
        return generation.stats()

    def fetch(self, request: Request) -> Fetch:
        """Begin to pull published pages that the prompt goes on along. Raises as `check`."""
        self.check(request.tokens, request.max_tokens)
        if request.prompt_logprobs:
            return Fetch(iter(()))
        return self.cache.fetch(as_tokens(request.tokens), request.scope)

    def start(self, request: Request, fetch: Fetch | None = None) -> Generation:
        """Begin to answer: match the prompt and start reading what is on disk. Close the generation in any case.

        fetch: what `fetch` began for it; waits until that is over, without it for one of its own. PromptTooLong,
        RequestError or CapacityError.
        """
        self.check(request.tokens, request.max_tokens)
        room = self.context_tokens - len(request.tokens)
        speculate = self.config.engine.speculate
        return Generation(request, self.cache, self.tokenizer, room, self._log, speculate, fetch)

    def admit(
        self, request: Request, running: Sequence[Generation], fetch: Fetch | None = None
    ) -> Generation | None:
        """Start a request if the pool can hold it to its end beside those that run; else None, try again later.

        So no generation ever runs out of pages: those it may still need are counted as taken, and pages that
        others hold anyway are not counted again. Raises as `start`, but no CapacityError.
        """
        self.check(request.tokens, request.max_tokens)
        pool = self.engine.pool
        promised = sum(generation.num_pages_to_come for generation in running)
        num_held = 0
        if not request.prompt_logprobs:  # else it shares no page
            tokens = as_tokens(request.tokens)
            in_ram = self.cache.find_in_ram(tokens, self.cache.course(tokens, request.scope))
            full = [page.page for page, rows in in_ram if rows == pool.page_tokens]
            num_held = sum(pool.references(page) > 0 for page in full)
        num_needed = self._num_pages(request.tokens, request.max_tokens)
        if num_needed - num_held > pool.num_available - promised:
            return None
        try:
            generation = self.start(request, fetch)
        except CapacityError:
            return None
        if generation.num_pages_to_come > pool.num_available - promised:
            generation.close()  # the disk had more of it than memory, so it shares less than was counted
            return None
        return generation

    def step(self, generations: Sequence[Generation], prompt_rows: int | None = None) -> None:
        """One engine step for all these unfinished generations together.

        Each that decodes gets its row; what is left of `engine.chunk_tokens` (at most `prompt_rows`) goes to
        prompts, first come first served; of prompts whose log probabilities are wanted fewer rows, so that their
        logits take no more than SCORED_NBYTES. A generation whose own part fails (sampling, decoding) is finished,
        `take` raises its error and the others go on. CapacityError when the pool has no room.
        """
        budget = self.engine.chunk_tokens
        prompt_budget = budget if prompt_rows is None else prompt_rows
        scored_budget = max(1, SCORED_NBYTES // (4 * self.engine.geometry.vocab_size))
        work: list[tuple[Generation, int]] = []
        for generation in sorted(generations, key=lambda g: g.is_prefilling):  # decoding ones first, stable
            limit = min(budget, prompt_budget) if generation.is_prefilling else budget
            is_scoring = generation.sequence.is_scoring
            if is_scoring:
                limit = min(limit, scored_budget)
            rows = min(limit, generation.sequence.num_pending)
            if rows + generation.sequence.num_guessed > budget:
                generation.sequence.take_guess()
            if rows:
                work.append((generation, rows))
                budget -= rows + generation.sequence.num_guessed
                prompt_budget -= rows if generation.is_prefilling else 0
                scored_budget -= rows if is_scoring else 0
        results = self.cache.step([(generation.sequence, rows) for generation, rows in work])
        for (generation, _), logits in zip(work, results, strict=True):
            try:
                generation.accept(logits)
            except Exception as error:  # whatever it is, it is this answer's alone
                generation.fail(error)

    def _num_pages(self, tokens: list[int], max_tokens: int) -> int:
        """Pool pages of a prompt and its answer, if that gets as long as it may."""
        # The last token of an answer is never computed.
        longest = min(len(tokens) + max(1, max_tokens), self.context_tokens) - 1
        return -(-longest // self.engine.pool.page_tokens)

    def generate(
        self, request: Request, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Delta | Finished]:
        """Answer one request alone: some Deltas, then Finished. Between two steps `cancelled` may end it.

        Raises as `start` and `step`. Closing the iterator early keeps what is computed.
        """
        generation = self.start(request)
        try:
            while not generation.finished:
                if cancelled():
                    generation.cancel()
                else:
                    self.step([generation])
                yield from generation.take()
        finally:
            generation.close()

    def check(self, tokens: list[int], max_tokens: int = 1) -> None:
        """Refuse a prompt that is empty, holds unknown ids or can never fit together with its answer.

        RequestError, PromptTooLong.
        """
        if not tokens:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(tokens) >= self.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; the context holds {self.context_tokens} with at least one "
                "generated token"
            )
        pool = self.engine.pool
        if self._num_pages(tokens, max_tokens) > pool.num_pages:
            raise PromptTooLong(
                f"{len(tokens)} prompt tokens and up to {max_tokens} generated ones; "
                f"engine.kv_ram_bytes={self.config.engine.kv_ram_bytes} holds "
                f"{pool.num_pages * pool.page_tokens}; shorten the prompt or lower max_tokens"
            )
        vocab = self.engine.geometry.vocab_size
        if not (0 <= min(tokens) and max(tokens) < vocab):
            raise RequestError(f"token ids must be 0 to {vocab - 1}, found {min(tokens)} to {max(tokens)}")
        refused = self.tokenizer.refused
        if not refused.keys().isdisjoint(tokens):
            text = next(refused[token] for token in tokens if token in refused)
            raise RequestError(
                f"the prompt holds {text}, a place for an image or a video; this model is run for text only, "
                "leave such parts out"
            )


def _open_engine(config: Config, weights: Weights, log: Log) -> Engine:
    """The engine of a runtime; the converted file is out of memory by then."""
    kv_dtype = cast(KvDtype, config.engine.kv)
    if not are_compiled(kv_dtype):
        log(f"[ENGINE] compiling the attention kernels for {kv_dtype} KV, once for this machine: about 10 s")
    engine = Engine(
        weights,
        kv_dtype=kv_dtype,
        page_tokens=config.cache.page_tokens,
        chunk_tokens=config.engine.chunk_tokens,
        kv_ram_bytes=config.engine.kv_ram_bytes,
        kv_touched_bytes=config.engine.kv_touched_bytes,
        threads=config.engine.threads,
        context_tokens=config.model.context_tokens,
    )
    weights.leave_memory()
    return engine
