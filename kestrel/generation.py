"""One answer in the making: from a request to text, one engine step at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kestrel.cache.prefix import PrefixCache
from kestrel.cache.scope import Scope
from kestrel.cache.sequence import CachedSequence
from kestrel.engine.layers import Floats
from kestrel.engine.sampling import Sampler, Sampling, TokenLogprob, logprob_of
from kestrel.engine.speculation import Drafter
from kestrel.errors import ModelError, RequestError
from kestrel.models.tokenizer import Tokenizer
from kestrel.sharing.ondemand import Fetch


@dataclass(frozen=True)
class Request:
    """What to generate. `stop`: texts that end the answer and are not part of it. max_tokens 0: nothing.

    prompt_logprobs: report the log probability of each token of the prompt but the first, with `sampling.logprobs`
    alternatives; all of the prompt is computed then, whatever is stored.
    scope: whose stored prefixes it finds and adds to, None for the common ones. persist: whether its own pages
    are saved; pin: whether they are kept from being evicted; ttl_seconds: they leave when unused for so long.
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    scope: Scope | None = None
    persist: bool = True
    pin: bool = False
    ttl_seconds: float | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: text that is final, and the tokens sampled since the last piece.

    Text may lag behind tokens: a half character or what may become a stop text is held back. prompt_logprobs: of the
    prompt's next tokens, the first time from its second token on; they come before any text.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Stats:
    """What happened to one request. Times in milliseconds from the moment the engine took it.

    prompt = restored (read from disk) + ram (already in memory) + computed; cached = restored + ram.
    prefill: computing alone, without lookup and without waiting for the disk; matmul, attention and head are its
    parts, but for a little bookkeeping. wait: for the disk, in the steps of the prompt. ttft: until the first token
    was chosen. bytes_written: pages of this request on disk so far; the writer may still be busy.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    matched_tokens: int = 0
    restored_tokens: int = 0
    ram_tokens: int = 0
    computed_tokens: int = 0
    prefill_ms: float = 0.0
    find_ms: float = 0.0
    open_ms: float = 0.0
    wait_ms: float = 0.0
    matmul_ms: float = 0.0
    attention_ms: float = 0.0
    head_ms: float = 0.0
    restore_ms: float = 0.0
    ttft_ms: float = 0.0
    wall_ms: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    skipped_tokens: int = 0  # on disk, but not read: computing them is quicker
    load: str | None = None  # what was decided about reading the pages found on disk, and why
    miss_reason: str | None = None
    diverged_at: int | None = None
    pulled_tokens: int = 0  # fetched for this prompt from DVC's cache or a remote
    pulled_bytes: int = 0
    pull_ms: float = 0.0
    pull_problem: str | None = None
    foreign: str | None = None  # whose numerics the restored rows have, if not this CPU's
    key: str | None = None  # of the page that prompt and answer end with, in hex; known when finished

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.restored_tokens + self.ram_tokens


@dataclass(frozen=True)
class Finished:
    """The end of an answer: "stop" (end token or stop text), "length" or "cancelled"."""

    finish_reason: str
    stats: Stats


class Generation:
    """A request being answered. Feed it with steps until it is `finished`, and always `close` it.

    Each round: let `PrefixCache.step` compute some of `sequence`'s pending tokens, then hand the logits to
    `accept`; what became final is taken with `take`.
    """

    def __init__(
        self,
        request: Request,
        cache: PrefixCache,
        tokenizer: Tokenizer,
        room: int,
        log: Callable[[str], None],
        speculate: int = 0,
        fetch: Fetch | None = None,
    ):
        """room: most tokens that can be generated. speculate: longest draft. fetch: of the prompt, if it is begun.

        RequestError, CapacityError.
        """
        if request.max_tokens < 0:
            raise RequestError(f"max_tokens must be at least 0, found {request.max_tokens}")
        self.request = request
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._log = log
        self._sampler = Sampler(request.sampling, len(request.tokens))
        self._answer = _Answer(request, tokenizer)
        self._drafter = Drafter(speculate)
        self.accepted_drafts = 0  # tokens of the answer that were guessed right
        self._room = min(request.max_tokens, room)
        self._page_tokens = cache.engine.pool.page_tokens
        self._completion_tokens = 0
        self._num_scored = 0  # tokens of the prompt behind which the next one's log probability was taken
        self._finish_reason: str | None = None
        self._failure: Exception | None = None
        self.sequence: CachedSequence = cache.open(
            request.tokens,
            request.scope,
            request.persist,
            request.pin,
            request.ttl_seconds,
            request.prompt_logprobs,
            fetch,
        )
        self._events: list[Delta | Finished] = []

    @property
    def finished(self) -> bool:
        """Whether no more steps are needed."""
        return self._finish_reason is not None or self._failure is not None

    @property
    def num_pages_to_come(self) -> int:
        """Pool pages it will take on top of those it holds, if its answer gets as long as it may."""
        longest = len(self.request.tokens) + max(0, self._room - 1)  # the last token is never computed
        return max(0, -(-longest // self._page_tokens) - self.sequence.num_pages)

    @property
    def is_prefilling(self) -> bool:
        """Whether the prompt is not wholly computed yet."""
        return self.sequence.num_computed < len(self.request.tokens)

    def accept(self, logits: Floats | None) -> None:
        """Take what a step returned (None while the prompt is still pending) and choose the next tokens.

        One token is chosen from the first row; each drafted token that equals the one just chosen makes the next
        row count too. So the answer is the same with and without drafts, to the bit.
        """
        if logits is not None and self.request.prompt_logprobs:
            logits = self._score(logits)
        if logits is None or not len(logits):
            return
        if self._first_token is None:
            self._log(_prefill_line(self.sequence))
        if not self._room:
            self._finish_reason = "length"
            return
        draft = self.sequence.take_guess()
        confirmed = 0
        for row in logits:
            self._check_scores(row)
            token, logprob = self._sampler.pick(row, self.sequence.tokens)
            self._first_token = self._first_token or time.perf_counter()
            self._completion_tokens += 1
            self._finish_reason = self._answer.push(token, logprob, self._completion_tokens == self._room)
            if self._finish_reason is not None or confirmed == len(draft) or token != draft[confirmed]:
                break
            self.sequence.confirm(token)
            confirmed += 1
        if self._answer.pending:
            self._events.append(self._answer.take())
        self._drafter.learn(len(draft), confirmed)
        self.accepted_drafts += confirmed
        if self._finish_reason is None:
            self.sequence.extend(token)
            room = self._room - self._completion_tokens - 1  # a draft never reaches past the last token
            self.sequence.guess(self._drafter.propose(self.sequence.tokens, room))

    def _score(self, logits: Floats) -> Floats:
        """Report the prompt's log probabilities as far as these logits tell them; returns those that are left."""
        prompt, count = self.request.tokens, self.request.sampling.logprobs or 0
        rows = logits[: len(prompt) - 1 - self._num_scored]
        scored = []
        for row in rows:
            self._check_scores(row)
            self._num_scored += 1
            scored.append(logprob_of(row, prompt[self._num_scored], count))
        if scored:
            self._events.append(Delta("", [], prompt_logprobs=scored))
        return logits[len(rows) :]

    def _check_scores(self, row: Floats) -> None:
        if np.isfinite(row.max()):  # NaN wins every comparison
            return
        reason = "the scores of the next token are not numbers"
        self.sequence.disown(reason)
        raise ModelError(
            f"{reason}: memory or weights are damaged, or a stored page was forged; the pages of this prompt were "
            "put aside, send it again"
        )

    def fail(self, error: Exception) -> None:
        """Finish here: `take` raises the error. What is computed stays in the cache."""
        self._failure = self._failure or error

    def cancel(self) -> None:
        """Finish here; what is computed stays in the cache."""
        self._finish_reason = self._finish_reason or "cancelled"

    def take(self) -> list[Delta | Finished]:
        """What has become final since the last call; Finished comes last, after the pages are saved or queued.

        Raises what the generation failed with.
        """
        events, self._events = self._events, []
        if self._failure is not None:
            self.close()
            raise self._failure
        if self._finish_reason is not None:
            self.close()
            events.append(Finished(self._finish_reason, self.stats()))
        return events

    def stats(self) -> Stats:
        """What happened so far."""
        now = time.perf_counter()
        prefill = {
            name: value
            for name, value in vars(self.sequence.stats).items()
            if name not in ("seconds", "total_ms")
        }
        spent = self.sequence.stats.seconds
        return Stats(
            **prefill,
            wait_ms=spent.waiting * 1e3,
            matmul_ms=spent.graphs * 1e3,
            attention_ms=spent.attention * 1e3,
            head_ms=spent.head * 1e3,
            completion_tokens=self._completion_tokens,
            ttft_ms=((self._first_token or now) - self._started) * 1e3,
            wall_ms=(now - self._started) * 1e3,
            bytes_written=self.sequence.saves.bytes_written,
            key=None if self.sequence.last_key is None else self.sequence.last_key.hex(),
        )

    def close(self) -> None:
        """Let go of the pages; those that are complete stay in memory and in the store."""
        self.sequence.close()


def _prefill_line(sequence: CachedSequence) -> str:
    stats = sequence.stats
    parts = " ".join(f"{name}={seconds * 1e3:.1f}ms" for name, seconds in vars(stats.seconds).items())
    return (
        f"[PREFILL-TIMING] n={stats.computed_tokens} total={stats.total_ms:.1f}ms | "
        f"cached={stats.restored_tokens + stats.ram_tokens} find={stats.find_ms:.1f}ms "
        f"restore={stats.restore_ms:.1f}ms read={stats.bytes_read / 1e6:.1f}MB {parts}"
    )


class _Answer:
    """Turns sampled tokens into final text: whole characters only, nothing that may belong to a stop text."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        self._request = request
        self._eos = frozenset() if request.ignore_eos else tokenizer.eos_ids
        self._stream = tokenizer.stream()
        self._held = ""  # decoded, but perhaps the beginning of a stop text
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, token: int, logprob: TokenLogprob | None, last: bool) -> str | None:
        """Take the next token; return the finish reason if it is the end. last: there is no room for another."""
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token in self._eos:
            self._held += self._stream.flush()
            self._release(final=True)
            return "stop"
        self._held += self._stream.push(token)
        if last:
            self._held += self._stream.flush()
        ends = [at for at in (self._held.find(stop) for stop in self._request.stop) if at >= 0]
        if ends:
            self._held = self._held[: min(ends)]
            self._release(final=True)
            return "stop"
        self._release(final=last)
        return "length" if last else None

    @property
    def pending(self) -> bool:
        """Whether there is anything to hand out."""
        return bool(self._text or self._tokens)

    def take(self) -> Delta:
        """Everything final since the last call."""
        delta = Delta(
            self._text, self._tokens, self._logprobs if self._request.sampling.logprobs is not None else None
        )
        self._text, self._tokens, self._logprobs = "", [], []
        return delta

    def _release(self, final: bool) -> None:
        keep = 0
        if not final:
            for stop in self._request.stop:
                for length in range(min(len(stop) - 1, len(self._held)), keep, -1):
                    if self._held.endswith(stop[:length]):
                        keep = length
                        break
        cut = len(self._held) - keep
        self._text += self._held[:cut]
        self._held = self._held[cut:]
