"""From what the engine produces to the JSON of an answer, whole or streamed."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from kestrel.engine.sampling import TokenLogprob
from kestrel.models.tokenizer import Tokenizer
from kestrel.runtime import Delta, Runtime, Stats
from kestrel.server import wire
from kestrel.server.toolcalls import ToolCall, ToolCallReader, split_answer

FinishReason = Literal["stop", "length"]
Chunk = wire.Completion | wire.ChatCompletionChunk


def usage(stats: Sequence[Stats]) -> wire.Usage:
    """Token counts of a finished request; the prompt of several choices counts once."""
    first = stats[0]
    completion_tokens = sum(each.completion_tokens for each in stats)
    return wire.Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=first.prompt_tokens + completion_tokens,
        prompt_tokens_details=wire.PromptTokensDetails(cached_tokens=first.cached_tokens),
    )


def kestrel_stats(choices: Sequence[tuple[Stats, float]]) -> wire.KestrelStats:
    """What happened to a finished request: of each choice its stats, and the seconds it waited for the engine.

    Of several choices the first one's prompt is described; the others find it computed.
    """
    stats, queue_seconds = choices[0]
    queue_ms = queue_seconds * 1000
    return wire.KestrelStats(
        matched_tokens=stats.matched_tokens,
        restored_tokens=stats.restored_tokens,
        ram_tokens=stats.ram_tokens,
        computed_tokens=stats.computed_tokens,
        prefill_ms=round(stats.prefill_ms, 3),
        restore_ms=round(stats.restore_ms, 3),
        bytes_read=stats.bytes_read,
        bytes_written=sum(each.bytes_written for each, _ in choices),
        queue_ms=round(queue_ms, 3),
        ttft_ms=round(queue_ms + stats.ttft_ms, 3),
        wall_ms=round(max(each.wall_ms + waited * 1000 for each, waited in choices), 3),
        timings=_timings(stats, queue_ms),
        skipped_tokens=stats.skipped_tokens,
        load=stats.load,
        miss_reason=stats.miss_reason,
        diverged_at=stats.diverged_at,
        pulled_tokens=stats.pulled_tokens,
        pulled_bytes=stats.pulled_bytes,
        pull_ms=round(stats.pull_ms, 3),
        pull_problem=stats.pull_problem,
        foreign=stats.foreign,
        key=stats.key if len(choices) == 1 else None,
    )


def _timings(stats: Stats, queue_ms: float) -> wire.Timings:
    """The parts of the time to the first token, to microseconds; `rest` is what the others leave of it."""
    parts = {
        "queue_ms": queue_ms,
        "find_ms": stats.find_ms,
        "open_ms": stats.open_ms,
        "wait_ms": stats.wait_ms,
        "matmul_ms": stats.matmul_ms,
        "attention_ms": stats.attention_ms,
        "head_ms": stats.head_ms,
    }
    rest = queue_ms + stats.ttft_ms - sum(parts.values())
    return wire.Timings(**{name: round(value, 3) for name, value in parts.items()}, rest_ms=round(rest, 3))


class Answer(ABC):
    """An answer under construction. Each choice of a streamed one is `opening`, `piece` by delta, `closing`."""

    id_prefix: str
    chunk_type: type[Chunk]

    def __init__(self, runtime: Runtime) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = runtime.name
        self.fingerprint = runtime.namespace.name
        self.tokenizer: Tokenizer = runtime.tokenizer

    @abstractmethod
    def opening(self, index: int) -> list[Chunk]:
        """What a choice's stream begins with, before any text."""

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> list[Chunk]:
        """The chunks for a delta; none when it holds nothing a reader could use yet."""

    @abstractmethod
    def closing(self, index: int, finish_reason: FinishReason) -> list[Chunk]:
        """What is left of a choice; the last chunk says why it ended."""

    def numbers(self) -> Chunk:
        """A chunk without choices, which OpenAI's include_usage puts last to carry the usage."""
        chunk: Chunk = self._chunk()
        return chunk

    def _chunk(self, *choices: Any) -> Any:
        return self.chunk_type(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=list(choices),
        )

    @abstractmethod
    def whole(
        self,
        choices: Sequence[tuple[Sequence[Delta], FinishReason]],
        counts: wire.Usage,
        stats: wire.KestrelStats,
    ) -> wire.Completion | wire.ChatCompletion:
        """The answer in one piece."""

    def _token_text(self, token: int) -> str:
        """How a token reads; a part of a character is written as OpenAI does: `bytes:\\xe2\\x80`."""
        piece = self.tokenizer.token_bytes(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class CompletionAnswer(Answer):
    """The answer to a prompt. `echoed` is the prompt's text if the answer shall repeat it, else empty.

    scored: the prompt's tokens if their log probabilities are part of the answer, else empty. Streamed, the prompt's
    text comes first and whole, its log probabilities as they are computed.
    """

    id_prefix = "cmpl"
    chunk_type = wire.Completion

    def __init__(
        self, runtime: Runtime, num_choices: int, echoed: str, with_logprobs: bool, scored: Sequence[int]
    ) -> None:
        super().__init__(runtime)
        self._echoed = echoed
        self._with_logprobs = with_logprobs
        self._scored = scored
        self._prompt_places = _Places(self.tokenizer, echoed, 0)
        self._places = [_Places(self.tokenizer, "", len(echoed)) for _ in range(num_choices)]

    def opening(self, index: int) -> list[Chunk]:
        if not self._echoed and not self._scored:
            return []
        logprobs = self._first_logprobs() if self._scored else None
        return [self._chunk(wire.CompletionChoice(index=index, text=self._echoed, logprobs=logprobs))]

    def piece(self, index: int, delta: Delta) -> list[Chunk]:
        logprobs = self._logprobs(index, [delta], _no_logprobs())
        if not delta.text and logprobs is None:
            return []
        return [self._chunk(wire.CompletionChoice(index=index, text=delta.text, logprobs=logprobs))]

    def closing(self, index: int, finish_reason: FinishReason) -> list[Chunk]:
        return [self._chunk(wire.CompletionChoice(index=index, text="", finish_reason=finish_reason))]

    def whole(
        self,
        choices: Sequence[tuple[Sequence[Delta], FinishReason]],
        counts: wire.Usage,
        stats: wire.KestrelStats,
    ) -> wire.Completion:
        built = [
            wire.CompletionChoice(
                index=index,
                text=self._echoed + "".join(delta.text for delta in deltas),
                logprobs=self._logprobs(index, deltas, self._first_logprobs()),
                finish_reason=finish_reason,
            )
            for index, (deltas, finish_reason) in enumerate(choices)
        ]
        whole: wire.Completion = self._chunk(*built)
        return whole.model_copy(update={"usage": counts, "kestrel": stats})

    def _first_logprobs(self) -> wire.CompletionLogprobs:
        """What the log probabilities begin with: of a prompt's first token there are none."""
        logprobs = _no_logprobs()
        for token in self._scored[:1]:
            logprobs.tokens.append(self._token_text(token))
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            logprobs.text_offset.append(self._prompt_places.next(token))
        return logprobs

    def _logprobs(
        self, index: int, deltas: Sequence[Delta], logprobs: wire.CompletionLogprobs
    ) -> wire.CompletionLogprobs | None:
        """`logprobs` with those of the deltas behind them."""
        if not self._with_logprobs:
            return None
        entries = [(entry, self._prompt_places) for delta in deltas for entry in delta.prompt_logprobs or ()]
        entries += [(entry, self._places[index]) for entry in _entries(deltas)]
        for entry, places in entries:
            logprobs.tokens.append(self._token_text(entry.token))
            logprobs.token_logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            for token, logprob in entry.top:  # two may read alike: the likelier one, which comes first, stays
                top.setdefault(self._token_text(token), logprob)
            logprobs.top_logprobs.append(top)
            logprobs.text_offset.append(places.next(entry.token))
        return logprobs


class _Places:
    """Where in a choice's text each of its tokens begins."""

    def __init__(self, tokenizer: Tokenizer, written: str, first: int) -> None:
        """written: the text, as far as control tokens are spelled out in it; first: where the first token begins."""
        self._tokenizer = tokenizer
        self._written = written
        self._offset = first
        self._stream = tokenizer.stream()

    def next(self, token: int) -> int:
        """Where this token begins; call it for one token after the other."""
        offset, piece = self._offset, self._stream.push(token)
        if self._tokenizer.is_special(token):
            spelled = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
            piece = spelled if self._written.startswith(spelled, offset) else ""
        self._offset += len(piece)
        return offset


def _no_logprobs() -> wire.CompletionLogprobs:
    return wire.CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


class ChatAnswer(Answer):
    """The assistant's next message in a conversation. with_tools: calls of tools are told apart from text."""

    id_prefix = "chatcmpl"
    chunk_type = wire.ChatCompletionChunk

    def __init__(self, runtime: Runtime, num_choices: int, with_logprobs: bool, with_tools: bool) -> None:
        super().__init__(runtime)
        self._with_logprobs = with_logprobs
        self._with_tools = with_tools
        self._readers = [ToolCallReader() for _ in range(num_choices)]

    def opening(self, index: int) -> list[Chunk]:
        return [self._delta_chunk(index, wire.ChatDelta(role="assistant", content=""))]

    def piece(self, index: int, delta: Delta) -> list[Chunk]:
        logprobs = self._logprobs([delta])
        if not self._with_tools:
            if not delta.text and logprobs is None:
                return []
            return [self._delta_chunk(index, wire.ChatDelta(content=delta.text), logprobs)]
        chunks = self._told_apart(index, self._readers[index].push(delta.text))
        if logprobs is not None:
            chunks.append(self._delta_chunk(index, wire.ChatDelta(content=""), logprobs))
        return chunks

    def closing(self, index: int, finish_reason: FinishReason) -> list[Chunk]:
        chunks: list[Chunk] = []
        reason: Literal["stop", "length", "tool_calls"] = finish_reason
        if self._with_tools:
            chunks += self._told_apart(index, self._readers[index].flush())
            reason = _reason(finish_reason, self._readers[index].num_calls)
        choice = wire.ChatChunkChoice(index=index, delta=wire.ChatDelta(), finish_reason=reason)
        return [*chunks, self._chunk(choice)]

    def whole(
        self,
        choices: Sequence[tuple[Sequence[Delta], FinishReason]],
        counts: wire.Usage,
        stats: wire.KestrelStats,
    ) -> wire.ChatCompletion:
        built = []
        for index, (deltas, finish_reason) in enumerate(choices):
            texts = [delta.text for delta in deltas]
            content, calls = split_answer(texts) if self._with_tools else ("".join(texts), [])
            message = wire.AssistantMessage(content=content)
            if calls:
                built_calls = [_wire_call(self.id, index, n, call) for n, call in enumerate(calls)]
                message = wire.AssistantMessage(content=content.strip() or None, tool_calls=built_calls)
            built.append(
                wire.ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(deltas),
                    finish_reason=_reason(finish_reason, len(calls)),
                )
            )
        return wire.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=built,
            usage=counts,
            kestrel=stats,
        )

    def _told_apart(self, index: int, items: Sequence[str | ToolCall]) -> list[Chunk]:
        """A chunk for each piece of text and each tool call."""
        chunks: list[Chunk] = []
        number = self._readers[index].num_calls - sum(isinstance(item, ToolCall) for item in items)
        for item in items:
            if isinstance(item, str):
                chunks.append(self._delta_chunk(index, wire.ChatDelta(content=item)))
                continue
            call = _wire_call(self.id, index, number, item)
            delta = wire.ToolCallDelta(index=number, id=call.id, function=call.function)
            chunks.append(self._delta_chunk(index, wire.ChatDelta(tool_calls=[delta])))
            number += 1
        return chunks

    def _delta_chunk(
        self, index: int, delta: wire.ChatDelta, logprobs: wire.ChatLogprobs | None = None
    ) -> wire.ChatCompletionChunk:
        chunk: wire.ChatCompletionChunk = self._chunk(
            wire.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs)
        )
        return chunk

    def _logprobs(self, deltas: Sequence[Delta]) -> wire.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        content = []
        for entry in _entries(deltas):
            chosen = self._top(entry.token, entry.logprob)
            top = [self._top(token, logprob) for token, logprob in entry.top]
            content.append(wire.ChatTokenLogprob(**chosen.model_dump(), top_logprobs=top))
        return wire.ChatLogprobs(content=content)

    def _top(self, token: int, logprob: float) -> wire.TopLogprob:
        return wire.TopLogprob(
            token=self._token_text(token), logprob=logprob, bytes=list(self.tokenizer.token_bytes(token))
        )


def _reason(finish_reason: FinishReason, num_calls: int) -> Literal["stop", "length", "tool_calls"]:
    return "tool_calls" if num_calls and finish_reason == "stop" else finish_reason


def _wire_call(answer_id: str, index: int, number: int, call: ToolCall) -> wire.ToolCall:
    return wire.ToolCall(
        id=f"call_{answer_id.rpartition('-')[2][:20]}_{index}_{number}",
        function=wire.CalledFunction(name=call.name, arguments=call.arguments),
    )


def _entries(deltas: Sequence[Delta]) -> Iterator[TokenLogprob]:
    for delta in deltas:
        yield from delta.logprobs or ()
