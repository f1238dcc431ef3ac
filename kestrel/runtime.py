"""One process's model, engine and store put together: what the server, the command line and the bench use."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from kestrel.cache.save import Writer
from kestrel.cache.sequence import CachePolicy, PrefixCache
from kestrel.config import Config
from kestrel.engine.engine import Engine
from kestrel.engine.sampling import Sampling, TokenLogprob
from kestrel.errors import PromptTooLong, RequestError, StoreError
from kestrel.generation import Delta, Finished, Generation, Request, Stats
from kestrel.identity import FORMAT, Namespace, as_tokens
from kestrel.models.chat import ChatTemplate, load_chat_template
from kestrel.models.fetch import resolve_model
from kestrel.models.tokenizer import Tokenizer
from kestrel.models.weights import Weights, load_weights
from kestrel.store.layout import KvDtype
from kestrel.store.match import Match
from kestrel.store.store import Limits, Store

__all__ = [
    "Delta",
    "Finished",
    "Generation",
    "Request",
    "Runtime",
    "Sampling",
    "Stats",
    "TokenLogprob",
    "log_to_stderr",
]

Log = Callable[[str], None]


def log_to_stderr(line: str) -> None:
    """Print one log line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


class Runtime:
    """A loaded model with its cache. Generate and prefill from one thread at a time; `find` from any."""

    def __init__(
        self,
        config: Config,
        name: str,
        weights: Weights,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        log: Log,
    ):
        """Use `Runtime.open`."""
        self.config = config
        self.name = name
        self.tokenizer = tokenizer
        self.chat = chat
        self.context_tokens = config.model.context_tokens or weights.geometry.context_tokens
        self._log = log
        self.engine = Engine(
            weights,
            kv_dtype=cast(KvDtype, config.engine.kv),
            page_tokens=config.cache.page_tokens,
            chunk_tokens=config.engine.chunk_tokens,
            kv_ram_bytes=config.engine.kv_ram_bytes,
            threads=config.engine.threads,
            context_tokens=self.context_tokens,
        )
        if not self.engine.numerics.exact:
            log(
                "kestrel: NOT EXACT on this CPU: a row's result depends on the rows beside it, so a restored answer "
                "may differ from a computed one; `kestrel doctor` has details"
            )
        self.identity: dict[str, Any] = {
            "format": FORMAT,
            "model": weights.geometry.as_identity(),
            "weights": {"recipe": weights.recipe, "digest": weights.digest},
            "kv": {"dtype": config.engine.kv},
            "numerics": {"probe": self.engine.numerics.digest, "exact": self.engine.numerics.exact},
        }
        self.namespace = Namespace.of(self.identity)
        self.store: Store | None = None
        self.writer: Writer | None = None
        if config.cache.enabled:
            self._open_store()
        policy = CachePolicy(config.cache.min_match, config.cache.max_prefix_tokens)
        self.cache = PrefixCache(self.engine, self.namespace, self.store, self.writer, policy, log)

    @classmethod
    def open(
        cls, config: Config, log: Log = log_to_stderr, progress: Callable[[int, int], None] | None = None
    ) -> "Runtime":
        """Load the model (fetching and converting it the first time), then index the store.

        progress(numbers converted, all) is called while weights are converted. ModelError, ConfigError.
        """
        checkpoint, name = resolve_model(config.model)
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
        return cls(config, name, weights, checkpoint.tokenizer(), chat, log)

    def _open_store(self) -> None:
        cache = self.config.cache
        limits = Limits(
            max_bytes=cache.max_bytes,
            max_files=cache.max_files,
            max_tokens=cache.max_tokens,
            min_free_bytes=cache.min_free_bytes,
            ttl_seconds=cache.ttl_seconds,
        )
        store = Store(Path(cache.root), limits)
        try:
            store.open()
            self._log(f"[KV-DISK] index: {store.usage().files} checkpoint(s) in {cache.root}")
        except StoreError as error:
            self._log(f"[KV-DISK] the store cannot be used now, prompts are computed until it can: {error}")
        self.store = store
        self.writer = Writer(
            store, self.engine.pool, self.namespace, self.identity, cache.save_queue_pages, self._log
        )

    def close(self) -> None:
        """Write what is queued, then let go of the store."""
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, tokens: list[int]) -> Match:
        """The longest stored prefix of a prompt, without using it."""
        return self.cache.find(as_tokens(tokens))

    def prefill(self, tokens: list[int]) -> Stats:
        """Restore or compute a prefix, and save it; nothing is generated."""
        generation = self.start(Request(tokens, 1))
        try:
            generation.sequence.prefill()
        finally:
            generation.close()
        return generation.stats()

    def start(self, request: Request) -> Generation:
        """Begin to answer: match the prompt and start reading what is on disk. Close the generation in any case.

        PromptTooLong, RequestError or CapacityError.
        """
        self._check(request.tokens)
        room = self.context_tokens - len(request.tokens)
        return Generation(request, self.cache, self.tokenizer, room, self._log)

    def step(self, generations: Sequence[Generation]) -> None:
        """One engine step for all these unfinished generations together.

        Each that decodes gets its row; what is left of `engine.chunk_tokens` goes to prompts, first come
        first served. CapacityError when the pool has no room.
        """
        budget = self.engine.chunk_tokens
        work: list[tuple[Generation, int]] = []
        for generation in sorted(generations, key=lambda g: g.is_prefilling):  # decoding ones first, stable
            rows = min(budget, generation.sequence.num_pending)
            if rows:
                work.append((generation, rows))
                budget -= rows
        results = self.cache.step([(generation.sequence, rows) for generation, rows in work])
        for (generation, _), logits in zip(work, results, strict=True):
            generation.accept(logits)

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

    def _check(self, tokens: list[int]) -> None:
        """Refuse a prompt that is empty, holds unknown ids or cannot fit."""
        if not tokens:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(tokens) >= self.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; the context holds {self.context_tokens} with at least one "
                "generated token"
            )
        room = self.engine.pool.num_pages * self.engine.pool.page_tokens
        if len(tokens) >= room:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; engine.kv_ram_bytes={self.config.engine.kv_ram_bytes} "
                f"holds {room}"
            )
        vocab = self.engine.geometry.vocab_size
        if not (0 <= min(tokens) and max(tokens) < vocab):
            raise RequestError(f"token ids must be 0 to {vocab - 1}, found {min(tokens)} to {max(tokens)}")
