"""The routes that generate: OpenAI's completions and chat completions, and its lists of models."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

from kestrel.engine.sampling import Sampling
from kestrel.errors import RequestError
from kestrel.runtime import Delta, Finished, Request
from kestrel.server import wire
from kestrel.server.answers import Answer, ChatAnswer, Chunk, CompletionAnswer, kestrel_stats, usage
from kestrel.server.refusals import Forbidden, UnknownModel, describe
from kestrel.server.site import Site, caller_of
from kestrel.server.worker import Event, ShuttingDown, Ticket, events_of

T = TypeVar("T")
CLIENT_GONE = 499  # nginx's status for it; nobody reads it


class _ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def generating_routes(site: Site) -> APIRouter:
    """The routes over one server."""
    routes = APIRouter(tags=["OpenAI"])
    runtime, limits = site.runtime, site.config.server
    model = wire.Model(id=runtime.name, created=int(site.started_at), context_tokens=runtime.context_tokens)

    def check(body: wire.GenerationRequest, http: HttpRequest) -> None:
        """Refuse, before anything is computed, what this server does not do."""
        if body.model is not None and body.model != runtime.name:
            raise UnknownModel(
                f"the model {body.model!r} is not served here; this server has {runtime.name!r}"
            )
        if (body.n or 1) > limits.max_choices:
            raise RequestError(
                f"n is {body.n}, at most {limits.max_choices} are allowed (server.max_choices)"
            )
        if len(body.stop) > limits.max_stops:
            raise RequestError(
                f"stop holds {len(body.stop)} strings, at most {limits.max_stops} are allowed (server.max_stops)"
            )
        if body.kestrel.pin and not caller_of(http).is_admin:
            raise Forbidden("kestrel.pin needs an admin's API key")

    async def respond(
        http: HttpRequest, body: wire.GenerationRequest, requests: Sequence[Request], answer: Answer
    ) -> Any:
        """Queue the choices and wait for the answer, or for its first piece when it is to be streamed.

        Until that piece exists errors have a status of their own; later ones end the stream as an event.
        """
        worker = site.worker
        name, label = caller_of(http).name, http.scope["request_id"]
        tickets = worker.submit(requests, http.scope["arrived"], name, label)
        events = events_of(tickets)

        def cancel() -> None:
            for ticket in tickets:
                worker.cancel(ticket)

        try:
            if not body.stream:
                return await _unless_gone(http, _whole(events, tickets, answer))
            first: tuple[int, Event] = await _unless_gone(http, anext(events))
        except BaseException as error:
            cancel()
            if isinstance(error, _ClientGone):
                return Response(status_code=CLIENT_GONE)
            raise
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(
            _stream(first, events, tickets, answer, with_usage),
            media_type="text/event-stream",
            headers={
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            },  # proxies shall not hold it back
            background=BackgroundTask(cancel),  # runs when the client is gone, too
        )

    @routes.post("/v1/completions", response_model=wire.Completion)
    async def complete(body: wire.CompletionRequest, http: HttpRequest) -> Any:
        """Continue a prompt. With `stream: true`: server-sent events, each a chunk of the same type."""
        check(body, http)
        tokens = await site.tokens_of_prompt(body.prompt)
        max_tokens = limits.default_max_tokens if body.max_tokens is None else body.max_tokens
        requests = _requests(site, http, body, tokens, max_tokens, body.logprobs)
        if body.scores_prompt:
            requests = [replace(request, prompt_logprobs=True) for request in requests]
        echoed = ""
        if body.echo:
            echoed = body.prompt if isinstance(body.prompt, str) else runtime.tokenizer.decode(tokens)
        scored = tokens if body.scores_prompt else []
        answer = CompletionAnswer(runtime, len(requests), echoed, body.logprobs is not None, scored)
        return await respond(http, body, requests, answer)

    @routes.post("/v1/chat/completions", response_model=wire.ChatCompletion)
    async def chat(body: wire.ChatRequest, http: HttpRequest) -> Any:
        """Answer a conversation. With `stream: true` the answer is server-sent events."""
        check(body, http)
        tokens = await site.tokens_of_chat(body)
        max_tokens = body.max_completion_tokens or body.max_tokens or limits.default_max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        requests = _requests(site, http, body, tokens, max_tokens, logprobs)
        with_tools = bool(body.tools) and body.tool_choice != "none"
        answer = ChatAnswer(runtime, len(requests), bool(body.logprobs), with_tools)
        return await respond(http, body, requests, answer)

    @routes.post("/v1/tokenize", tags=["Kestrel"])
    async def tokenize(body: wire.TokenizeRequest) -> wire.Tokenized:
        """The token ids of a text, or of a conversation as the chat route would see it."""
        if body.prompt is not None:
            tokens = await run_in_threadpool(
                runtime.tokenizer.encode, body.prompt, add_special=body.add_special_tokens
            )
        else:
            tokens = await site.tokens_of_chat(body)
        return wire.Tokenized(tokens=tokens, count=len(tokens), context_tokens=runtime.context_tokens)

    @routes.get("/v1/models")
    async def list_models() -> wire.ModelList:
        """The served model, as a list."""
        return wire.ModelList(data=[model])

    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> wire.Model:
        """The served model."""
        if name != runtime.name:
            raise UnknownModel(f"the model {name!r} is not served here; this server has {runtime.name!r}")
        return model

    return routes


def _requests(
    site: Site,
    http: HttpRequest,
    body: wire.GenerationRequest,
    tokens: list[int],
    max_tokens: int,
    logprobs: int | None,
) -> list[Request]:
    """One request to the engine for each choice. Refuses at once what can never be answered."""
    site.runtime.check(tokens, max_tokens)
    sampling = _sampling(body, logprobs)
    base = Request(
        tokens=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=tuple(body.stop),
        ignore_eos=bool(body.ignore_eos),
        scope=site.scope_of(http),
        persist=body.kestrel.persist,
        pin=body.kestrel.pin,
        ttl_seconds=body.kestrel.ttl_s,
    )
    seeds = [None if sampling.seed is None else sampling.seed + n for n in range(body.n or 1)]
    return [replace(base, sampling=replace(sampling, seed=seed)) for seed in seeds]


def _sampling(body: wire.GenerationRequest, logprobs: int | None) -> Sampling:
    """The sampling a body asks for; fields left out (or null) have the defaults of `Sampling`: greedy."""
    given = {
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
        "logprobs": logprobs,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _reason(finished: Finished) -> Any:
    """Why an answer ended. Raises ShuttingDown when the engine was told to stop before it did."""
    if finished.finish_reason == "cancelled":
        raise ShuttingDown("the server was told to stop at once; send the request again when it is back")
    return finished.finish_reason


def _numbers(tickets: Sequence[Ticket], ends: dict[int, Finished]) -> tuple[wire.Usage, wire.KestrelStats]:
    """Counts and times of a request whose choices are all finished."""
    stats = [ends[index].stats for index in range(len(tickets))]
    waits = [ticket.queue_seconds for ticket in tickets]
    return usage(stats), kestrel_stats(list(zip(stats, waits, strict=True)))


async def _whole(
    events: AsyncIterator[tuple[int, Event]], tickets: Sequence[Ticket], answer: Answer
) -> wire.Completion | wire.ChatCompletion:
    """The answer in one piece, when all its choices are finished."""
    deltas: list[list[Delta]] = [[] for _ in tickets]
    ends: dict[int, Finished] = {}
    async for index, event in events:
        if isinstance(event, Finished):
            ends[index] = event
        else:
            deltas[index].append(event)
    choices = [(deltas[index], _reason(ends[index])) for index in range(len(tickets))]
    return answer.whole(choices, *_numbers(tickets, ends))


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T] | Any) -> T:
    """The result of `work`, or _ClientGone as soon as the client closes its connection."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientGone
        result: T = working.result()
        return result
    finally:
        working.cancel()
        watching.cancel()


async def _stream(
    first: tuple[int, Event],
    events: AsyncIterator[tuple[int, Event]],
    tickets: Sequence[Ticket],
    answer: Answer,
    with_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of an answer whose first engine event is `first`; the last is [DONE] or an error."""
    try:
        for index in range(len(tickets)):
            for chunk in answer.opening(index):
                yield _event(chunk)
        ends: dict[int, Finished] = {}
        held: Chunk | None = None  # the last chunk also carries the numbers
        pending: tuple[int, Event] | None = first
        while pending is not None:
            index, event = pending
            if isinstance(event, Finished):
                ends[index] = event
                chunks = answer.closing(index, _reason(event))
            else:
                chunks = answer.piece(index, event)
            for chunk in chunks:
                if held is not None:
                    yield _event(held)
                    held = None
                if len(ends) == len(tickets):
                    held = chunk
                else:
                    yield _event(chunk)
            pending = await anext(events, None)
        if with_usage or held is None:
            if held is not None:
                yield _event(held)
            held = answer.numbers()
        counts, stats = _numbers(tickets, ends)
        yield _event(held.model_copy(update={"usage": counts, "kestrel": stats}))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is long sent: the client learns of it in the stream
        _, body = describe(error)
        yield f"data: {body.model_dump_json()}\n\n"


def _event(chunk: Chunk) -> str:
    return f"data: {chunk.model_dump_json()}\n\n"
