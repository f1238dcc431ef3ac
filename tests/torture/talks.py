"""Conversations with the answers a lone, cold run gives, and clients that hold every answer against them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kestrel.config import load_config
from kestrel.engine.sampling import Sampling, TokenLogprob
from kestrel.runtime import Delta, Finished, Request, Runtime

LOWEST, HIGHEST = 5, 300  # token ids every tiny checkpoint knows and none of which ends a text
TOP = 3
CONTEXT_TOKENS = 512  # of the tiny checkpoints


class WrongAnswer(AssertionError):
    """A server answered something else than a lone run does."""


class Refused(Exception):
    """A server took no more requests: busy (429) or stopping (503)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status


@dataclass
class Answer:
    """What a client sees of an answer, bit for bit: JSON carries every bit of a float64."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Append one `choices[0]`, of a whole answer or of a chunk."""
        self.text += choice["text"]
        if choice.get("logprobs"):
            self.tokens += choice["logprobs"]["tokens"]
            self.logprobs += choice["logprobs"]["token_logprobs"]
            self.top += choice["logprobs"]["top_logprobs"]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def begins(self, other: "Answer") -> bool:
        """Whether it is a first part of another answer."""
        count = len(self.tokens)
        return (
            other.text.startswith(self.text)
            and other.tokens[:count] == self.tokens
            and other.logprobs[:count] == self.logprobs
            and other.top[:count] == self.top
        )


@dataclass(frozen=True)
class Turn:
    """One request and the answer it must get."""

    body: dict[str, Any]
    expected: Answer


def expected_answer(runtime: Runtime, request: Request) -> tuple[Answer, list[int]]:
    """The answer of a run that shares nothing with any other, as a client sees it, and its token ids."""
    runtime.engine.pool.forget(list(runtime.engine.pool._cached))  # cold: nothing of earlier runs is reused
    answer, tokens = Answer(), []
    for event in runtime.generate(request):
        if isinstance(event, Finished):
            answer.finish_reason = event.finish_reason
            assert event.stats.cached_tokens == 0
            continue
        answer.text += event.text
        tokens += event.tokens
        for entry in _entries(event):
            answer.tokens.append(token_text(runtime, entry.token))
            answer.logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            for token, logprob in entry.top:
                top.setdefault(token_text(runtime, token), logprob)
            answer.top.append(top)
    return answer, tokens


def _entries(delta: Delta) -> list[TokenLogprob]:
    return delta.logprobs or []


def token_text(runtime: Runtime, token: int) -> str:
    """How the API writes a token."""
    piece = runtime.tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def make_turn(
    runtime: Runtime, tokens: list[int], max_tokens: int, seed: int | None
) -> tuple[Turn, list[int]]:
    """One request, greedy or sampled with a seed, and its answer's token ids."""
    sampling = Sampling(logprobs=TOP) if seed is None else Sampling(temperature=0.9, seed=seed, logprobs=TOP)
    answer, answered = expected_answer(runtime, Request(tokens, max_tokens, sampling, ignore_eos=True))
    body: dict[str, Any] = {
        "prompt": tokens,
        "max_tokens": max_tokens,
        "logprobs": TOP,
        "ignore_eos": True,
    }
    if seed is not None:
        body |= {"temperature": 0.9, "seed": seed}
    return Turn(body, answer), answered


def make_talks(words: tuple[str, ...], count: int, num_turns: int, seed: int) -> list[list[Turn]]:
    """Conversations of turns that continue each other; every other conversation has a common beginning."""
    rng = random.Random(seed)
    common = numbers(rng, 150)
    talks = []
    with Runtime.open(load_config([*words, "cache=off"]), lambda line: None) as runtime:
        for index in range(count):
            tokens = (common if index % 2 else []) + numbers(rng, rng.randrange(20, 130))
            turns = []
            for _ in range(num_turns):
                max_tokens = rng.randrange(4, 14)
                turn, answered = make_turn(runtime, tokens, max_tokens, index if index % 3 == 2 else None)
                turns.append(turn)
                tokens = tokens + answered + numbers(rng, rng.randrange(8, 40))
            assert len(tokens) < CONTEXT_TOKENS
            talks.append(turns)
    return talks


def numbers(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(LOWEST, HIGHEST) for _ in range(count)]


def ask(client: httpx.Client, url: str, turn: Turn, stream: bool) -> dict[str, Any] | None:
    """Send one request and check its answer; the `kestrel` statistics, or None if the server died under it.

    What had arrived of a stream by then is checked too. Raises WrongAnswer, Refused.
    """
    answer, stats = Answer(), None
    try:
        if stream:
            for event in events_of(client, url, turn.body):
                if event.get("choices"):
                    answer.add(event["choices"][0])
                stats = event.get("kestrel") or stats
        else:
            reply = client.post(f"{url}/v1/completions", json=turn.body)
            check_status(reply)
            answer.add(reply.json()["choices"][0])
            stats = reply.json()["kestrel"]
    except httpx.TransportError:
        if not answer.begins(turn.expected):
            raise WrongAnswer(f"expected the beginning of {turn.expected}, found {answer}") from None
        return None
    if answer.finish_reason is None and answer.begins(turn.expected):
        return None  # the connection ended between two events
    if answer != turn.expected:
        raise WrongAnswer(f"expected {turn.expected}, found {answer}, {stats}")
    return stats or {}


def events_of(client: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion as they come; a whole one ends with [DONE]."""
    with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        if reply.status_code != 200:
            reply.read()
            check_status(reply)
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event


def check_status(reply: httpx.Response) -> None:
    """Fail unless the answer is 200; Refused if the server may say no."""
    if reply.status_code in (429, 503):
        raise Refused(reply.status_code, reply.text)
    if reply.status_code != 200:
        raise WrongAnswer(f"status {reply.status_code}: {reply.text}")
