"""Requests that share steps get the answers they would have got alone."""

import numpy as np

from kestrel.engine.sampling import Sampling
from kestrel.runtime import Delta, Finished, Generation, Request, Runtime
from tests.cache.conftest import Boot, tokens_of


def tokens_out(events: list[Delta | Finished]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def requests() -> list[Request]:
    random = np.random.default_rng(3)
    lengths = [400, 17, 128, 1, 300, 256]
    return [
        Request(
            tokens_of(length, seed=n % 4),  # some share a prefix
            int(random.integers(5, 40)),
            Sampling(temperature=n % 2, seed=n, top_p=0.9),
            ignore_eos=True,
        )
        for n, length in enumerate(lengths)
    ]


def run_together(runtime: Runtime, wanted: list[Request]) -> list[list[int]]:
    """Let requests join one by one, every few steps, and step all that run."""
    running: list[tuple[int, Generation]] = []
    answers: list[list[int]] = [[] for _ in wanted]
    waiting = list(enumerate(wanted))
    steps = 0
    while waiting or running:
        if waiting and steps % 3 == 0:
            number, request = waiting.pop(0)
            running.append((number, runtime.start(request)))
        runtime.step([generation for _, generation in running])
        for number, generation in running:
            answers[number] += tokens_out(generation.take())
        running = [(number, generation) for number, generation in running if not generation.finished]
        steps += 1
    return answers


def test_answers_in_a_batch_are_those_of_a_lone_run_cold_and_restored(boot: Boot) -> None:
    alone = [tokens_out(list(boot("cache=off").generate(request))) for request in requests()]
    runtime = boot("engine.chunk_tokens=150")
    assert run_together(runtime, requests()) == alone
    assert run_together(boot("engine.chunk_tokens=90"), requests()) == alone


def test_a_long_prompt_leaves_every_step_room_for_those_that_decode(boot: Boot) -> None:
    runtime = boot("engine.chunk_tokens=64", "cache=off")
    talking = runtime.start(Request(tokens_of(20), 30, ignore_eos=True))
    runtime.step([talking])
    long = runtime.start(Request(tokens_of(400, seed=5), 1))
    for _ in range(6):
        before = talking.stats().completion_tokens
        runtime.step([long, talking])
        assert talking.stats().completion_tokens == before + 1
        assert long.is_prefilling
    long.close()
    talking.close()
