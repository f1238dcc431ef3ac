"""A client of the completions route that measures as a user would: with a clock outside the server."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.bench.records import BenchError

ANSWER_SECONDS = (
    3600.0  # longest silence of the server: a 2B model on a board needs minutes to prefill 8K tokens
)


@dataclass(frozen=True)
class Completion:
    """A streamed answer: its text, what the server said about it, and when things arrived at the client."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    kestrel: dict[str, Any]
    ttft_ms: float
    wall_ms: float


def get_json(host: str, port: int, path: str, timeout: float = 5.0) -> dict[str, Any]:
    """A GET request's JSON. Raises OSError while nothing listens, BenchError for an answer that is not a success."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return _json_of(connection.getresponse(), path)
    finally:
        connection.close()


def complete(host: str, port: int, prompt: Sequence[int] | str, max_tokens: int) -> Completion:
    """Send a greedy streamed completion and read it to the end.

    prompt: token ids, or text. The time to the first token ends with the first event that carries text.
    """
    body = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    encoded = json.dumps(body).encode()
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", encoded, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            _json_of(response, "/v1/completions")
        return _read_stream(_events(response), sent)
    finally:
        connection.close()


@dataclass(frozen=True)
class Arrivals:
    """When the tokens of a streamed answer arrived, seconds of time.perf_counter; `sent`: when it was asked for.

    Tokens that were drafted arrive together and have one time.
    """

    sent: float
    times: list[float]


def arrivals(
    host: str,
    port: int,
    prompt: Sequence[int],
    max_tokens: int,
    over: threading.Event | None = None,
    begun: threading.Event | None = None,
) -> Arrivals:
    """Read a greedy streamed completion of exactly `max_tokens` tokens, and only note when each came.

    over: leave when it is set, after the next token. begun: is set when the first token is there. BenchError.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,  # so that every token is told of, whether it completes a character or not
    }
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        sent, times = time.perf_counter(), list[float]()
        connection.request(
            "POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            _json_of(response, "/v1/completions")
        for line in response:
            if line.startswith(b'data: {"error"'):
                raise BenchError(f"the server failed while answering: {line.decode(errors='replace')}")
            if b'"token_logprobs":[' in line:  # reading the JSON would take the server's processors
                times.append(time.perf_counter())
                if begun is not None:
                    begun.set()
            if over is not None and over.is_set():
                break
        return Arrivals(sent, times)
    finally:
        connection.close()


def _read_stream(events: Iterator[dict[str, Any]], sent: float) -> Completion:
    """Put an answer together from its events; `sent` is the time of the request, seconds of time.perf_counter."""
    text, finish_reason = "", None
    usage: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
    first: float | None = None
    for event in events:
        if "error" in event:
            raise BenchError(f"the server failed while answering: {event['error']['message']}")
        for choice in event["choices"]:
            if choice["text"] and first is None:
                first = time.perf_counter()
            text += choice["text"]
            finish_reason = choice["finish_reason"] or finish_reason
        usage = event.get("usage") or usage
        stats = event.get("kestrel") or stats
    ended = time.perf_counter()
    if finish_reason is None or usage is None or stats is None:
        raise BenchError(
            "the stream ended early: expected a finish reason, `usage` and `kestrel`; see the server's log"
        )
    return Completion(
        text,
        finish_reason,
        usage,
        stats,
        ttft_ms=((first or ended) - sent) * 1000,
        wall_ms=(ended - sent) * 1000,
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, as it arrives, up to `[DONE]`."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _json_of(response: http.client.HTTPResponse, path: str) -> dict[str, Any]:
    body = response.read()
    if response.status != 200:
        raise BenchError(f"{path} answered {response.status}: {body[:500].decode(errors='replace')}")
    decoded: dict[str, Any] = json.loads(body)
    return decoded
