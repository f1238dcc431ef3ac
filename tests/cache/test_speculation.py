"""Speculation changes how many steps an answer takes, never the answer."""

import pytest

from kestrel.engine.sampling import Sampling
from kestrel.runtime import Delta, Finished, Request, Runtime
from tests.cache.conftest import Boot, tokens_of

REPEATING = tokens_of(60) * 3  # every last token has occurred before


def answer(runtime: Runtime, request: Request) -> tuple[list[int], list[object], str, int]:
    """Tokens, log probabilities, text of an answer, and the engine steps it took."""
    forward, steps = runtime.engine.forward, []
    runtime.engine.forward = lambda *args: steps.append(1) or forward(*args)  # type: ignore[method-assign]
    events = list(runtime.generate(request))
    runtime.engine.forward = forward  # type: ignore[method-assign]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert isinstance(events[-1], Finished)
    return (
        [token for delta in deltas for token in delta.tokens],
        [logprob for delta in deltas for logprob in delta.logprobs or []],
        "".join(delta.text for delta in deltas) + events[-1].finish_reason,
        len(steps),
    )


@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logprobs=3),
        Sampling(temperature=0.7, seed=5, top_p=0.9, logprobs=1),
        Sampling(temperature=1, seed=2, repetition_penalty=1.2, presence_penalty=0.3),
    ],
)
def test_answers_are_the_same_with_and_without(boot: Boot, sampling: Sampling, kv: str) -> None:
    requests = [
        Request(REPEATING, 60, sampling, ignore_eos=True),
        Request(tokens_of(90), 60, sampling, ("e",)),
    ]
    without = [answer(boot("cache=off", f"engine.kv={kv}"), request)[:3] for request in requests]
    runtime = boot("cache=off", f"engine.kv={kv}", "engine.speculate=6")
    assert [answer(runtime, request)[:3] for request in requests] == without


def test_right_guesses_save_steps_and_their_pages_are_restored_as_if_computed_one_by_one(boot: Boot) -> None:
    request = Request(REPEATING, 200, ignore_eos=True)  # a greedy answer of a random model runs in circles
    tokens, _, text, steps = answer(boot("cache=off"), request)
    runtime = boot("engine.speculate=8")
    again = answer(runtime, request)
    assert again[:1] == (tokens,) and again[2] == text
    assert again[3] < 0.9 * steps
    follow_up = Request(REPEATING + tokens + tokens_of(20, seed=4), 30, ignore_eos=True)
    expected = answer(boot("cache=off"), follow_up)[0]
    runtime = boot("engine.speculate=8")
    assert answer(runtime, follow_up)[0] == expected
    assert any(f"loaded {len(REPEATING) + 199}-token" in line for line in runtime.lines)
