"""Sampling follows its filters, is reproducible from its seed, and reports true probabilities."""

import numpy as np
import pytest

from kestrel.engine.sampling import Sampler, Sampling
from kestrel.errors import RequestError

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
SEEN = np.array([3], np.int32)


def drawn(sampling: Sampling, count: int = 400) -> np.ndarray:
    sampler = Sampler(sampling)
    tokens = [sampler.pick(LOGITS, np.arange(n + 1, dtype=np.int32) % 4)[0] for n in range(count)]
    return np.bincount(tokens, minlength=4) / count


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    assert Sampler(Sampling()).pick(LOGITS, SEEN)[0] == 0
    assert Sampler(Sampling()).pick(np.array([1, 2, 2], np.float32), SEEN)[0] == 1


def test_frequencies_follow_the_probabilities() -> None:
    assert np.abs(drawn(Sampling(temperature=1, seed=1), 4000) - np.exp(LOGITS)).max() < 0.03


@pytest.mark.parametrize(
    "sampling, allowed",
    [
        (Sampling(temperature=1, seed=2, top_k=2), {0, 1}),
        (Sampling(temperature=1, seed=2, top_p=0.74), {0, 1}),
        (Sampling(temperature=1, seed=2, top_p=0.76), {0, 1, 2}),
        (Sampling(temperature=1, seed=2, min_p=0.29), {0, 1, 2}),
        (Sampling(temperature=1, seed=2, top_p=0.01), {0}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_name(sampling: Sampling, allowed: set[int]) -> None:
    assert set(np.flatnonzero(drawn(sampling))) == allowed


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])  # all equal, nearly flat, peaked as a model's
@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (0, 0.05), (500, 0.9), (500, 1.0), (9_000, 0.5)])
def test_filters_of_a_large_vocabulary_are_those_of_a_full_sort(
    spread: float, top_k: int, top_p: float
) -> None:
    logits = (np.random.default_rng(0).standard_normal(6_000).round(2) * spread).astype(np.float32)
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64))
    kept = order[: np.searchsorted(np.cumsum(weights), top_p * weights.sum()) + 1]
    sampler = Sampler(Sampling(temperature=1, seed=3, top_k=top_k, top_p=top_p))
    found = [sampler.pick(logits, np.zeros(n, np.int32))[0] for n in range(1, 600)]
    assert set(found) <= set(kept.tolist())
    half = kept[: (len(kept) + 1) // 2]
    expected = weights[: len(half)].sum() / weights[: len(kept)].sum()
    assert abs(np.mean(np.isin(found, half)) - expected) < 0.08


def test_a_seed_fixes_every_position_whatever_was_drawn_before() -> None:
    a, b = Sampler(Sampling(temperature=1, seed=-7)), Sampler(Sampling(temperature=1, seed=-7))
    positions = [np.zeros(n, np.int32) for n in range(1, 60)]
    forwards = [a.pick(LOGITS, seen)[0] for seen in positions]
    backwards = [b.pick(LOGITS, seen)[0] for seen in reversed(positions)]
    assert forwards == backwards[::-1]
    other = Sampler(Sampling(temperature=1, seed=8))
    assert forwards != [other.pick(LOGITS, seen)[0] for seen in positions]


def test_repetition_penalty_lowers_what_was_seen() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    assert Sampler(Sampling(repetition_penalty=1.5)).pick(logits, np.array([0], np.int32))[0] == 1


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    logits = np.array([2.0, 1.6, 1.0, 0.0], np.float32)
    prompt_then_answer = np.array([1, 1, 0, 0, 2], np.int32)

    def pick(seen: np.ndarray = prompt_then_answer, **penalties: float) -> int:
        return Sampler(Sampling(**penalties), num_prompt=2).pick(logits, seen)[0]  # type: ignore[arg-type]

    assert pick() == 0
    assert pick(presence_penalty=0.5) == 1  # 1.5, 1.6, 0.5, 0
    assert pick(frequency_penalty=0.3) == 1  # 1.4, 1.6, 0.7, 0
    assert pick(frequency_penalty=0.15) == 0
    assert pick(np.array([0, 0], np.int32), presence_penalty=2) == 0
    assert pick(np.array([1, 1, 3], np.int32), presence_penalty=-2.0, frequency_penalty=-0.1) == 3


def test_logprobs_are_those_of_the_unfiltered_distribution() -> None:
    _, report = Sampler(Sampling(temperature=2, top_k=1, seed=0, logprobs=2)).pick(LOGITS, SEEN)
    assert report is not None and report.token == 0
    assert report.logprob == pytest.approx(np.log(0.5), abs=1e-6)
    assert [token for token, _ in report.top] == [0, 1]


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1),
        ("top_p", 0),
        ("min_p", 2),
        ("logprobs", 99),
        ("top_k", -1),
        ("presence_penalty", 3),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=name):
        Sampling(**{name: value})
