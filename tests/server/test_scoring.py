"""Promise: the log probabilities of a prompt are those of a lone run, whatever is computed beside it, however the
prompt is cut into steps and whatever is stored of it, and never take the logits of a whole prompt at once."""

import asyncio
from typing import Any

import pytest

import kestrel.runtime
from kestrel.engine.sampling import Sampling, TokenLogprob, logprob_of
from kestrel.runtime import Delta, Request, Runtime
from kestrel.server.journal import Journal
from kestrel.server.worker import EngineWorker, QueueLimits, Ticket
from tests.server.conftest import OpenRuntime, tokens_of
from tests.server.tickets import next_event


def token_by_token(runtime: Runtime, tokens: list[int], count: int) -> list[TokenLogprob]:
    """Log probabilities of a prompt computed one token a step, the slowest and plainest way."""
    sequence = runtime.cache.open(tokens[:1], persist=False)
    try:
        logits, found = sequence.prefill(), []
        for token in tokens[1:]:
            found.append(logprob_of(logits, token, count))
            logits = sequence.append(token)
    finally:
        sequence.close()
    return found


def scored(events: list[Any]) -> list[TokenLogprob]:
    return [entry for event in events if isinstance(event, Delta) for entry in event.prompt_logprobs or ()]


async def collect(ticket: Ticket) -> list[Any]:
    events: list[Any] = [await next_event(ticket)]
    while isinstance(events[-1], Delta):
        events.append(await next_event(ticket))
    return events


def test_scores_do_not_depend_on_company_steps_or_what_is_stored(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens_of(count, count) for count in (1, 2, 90, 128, 129, 300, 450)]
    reference = open_runtime("cache=off")
    expected = [token_by_token(reference, prompt, 3) for prompt in prompts]
    runtime = open_runtime("engine.chunk_tokens=100", "engine.speculate=4")
    vocab = runtime.engine.geometry.vocab_size
    monkeypatch.setattr(kestrel.runtime, "SCORED_NBYTES", 37 * 4 * vocab)
    most, forward = 0, runtime.engine.forward

    def measured(spans: Any, *rest: Any) -> Any:
        nonlocal most
        logits = forward(spans, *rest)
        most = max(most, len(logits))
        return logits

    monkeypatch.setattr(runtime.engine, "forward", measured)
    worker = EngineWorker(
        runtime, QueueLimits(max_running=8, prompt_rows=64, max_waiting=64), Journal(print), iter(())
    )

    async def check() -> None:
        for _ in range(2):  # the second time all of it is in memory and in the store
            talking = worker.submit([Request(tokens_of(60, 9), 40, ignore_eos=True)], 0.0)
            tickets = [
                worker.submit([Request(prompt, n % 3, Sampling(logprobs=3), prompt_logprobs=True)], 0.0)[0]
                for n, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*map(collect, [*talking, *tickets]))
            for n, events in enumerate(answers[1:]):
                assert scored(events) == expected[n]
                stats = events[-1].stats
                assert (stats.computed_tokens, stats.cached_tokens) == (len(prompts[n]), 0)
                assert stats.completion_tokens <= n % 3
        again = (await collect(worker.submit([Request(prompts[-1], 1)], 0.0)[0]))[-1].stats
        assert again.ram_tokens == len(prompts[-1]) - 1  # what a scored prompt computes, others find

    worker.start()
    try:
        asyncio.run(check())
    finally:
        worker.close()
        worker.join()
    assert 30 < most <= 37 + 8  # and a row of each answer
    assert runtime.writer is not None
    runtime.writer.drain()  # which holds pages until they are written
    assert runtime.engine.pool.num_available == runtime.engine.pool.num_pages


def test_a_pool_that_holds_the_prompt_once_scores_it_again(open_runtime: OpenRuntime) -> None:
    prompt = tokens_of(256, 1)
    page = 128 * open_runtime("cache=off").engine.geometry.kv_bytes_per_token
    runtime = open_runtime("cache=off", f"engine.kv_ram_bytes={2 * page}")
    request = Request(prompt, 0, Sampling(logprobs=0), prompt_logprobs=True)
    first, second = (scored(list(runtime.generate(request))) for _ in range(2))
    assert first == second and len(first) == 255
    generation = runtime.admit(request, [])
    assert generation is not None
    assert runtime.admit(request, [generation]) is None
    generation.close()
