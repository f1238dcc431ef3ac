"""Choosing the next token: greedy or sampled, reproducible from a seed whatever else is being served."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.engine.layers import Floats
from kestrel.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Filters apply in the order top_k, min_p, top_p, on temperature-scaled probabilities.

    temperature 0 is greedy (ties: lowest id). top_k 0, top_p 1 and min_p 0 switch those filters off.
    repetition_penalty divides positive and multiplies negative logits of every token seen so far (Keskar
    et al. 2019). presence_penalty is subtracted from the logits of every token of the answer so far, and
    frequency_penalty once for each time it occurs there (OpenAI's definitions; the prompt does not count).
    seed None draws a fresh one. logprobs: how many alternatives to report, None for none.
    RequestError when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, ok, range_ in (
            ("temperature", 0 <= self.temperature <= 100, "0 to 100"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 up to 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "0 to 20"),
        ):
            if not ok:
                raise RequestError(f"{name} must be {range_}, found {getattr(self, name)}")


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the likeliest ones (best first), before any filter."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Picks the tokens of one sequence.

    The random number of a position depends on seed and position alone, so a restart, a batch or a
    cancelled neighbour cannot shift it.
    """

    def __init__(self, sampling: Sampling, num_prompt: int = 0):
        """num_prompt: how many of the tokens seen are not the answer's."""
        self.sampling = sampling
        self._num_prompt = num_prompt
        seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed % 2**64
        self._seed = seed

    def pick(self, logits: Floats, seen: Sequence[int]) -> tuple[int, TokenLogprob | None]:
        """Choose the token that follows `seen` (prompt and answer so far) from float32 logits [vocab_size]."""
        sampling = self.sampling
        scores: npt.NDArray[np.floating[Any]] = logits
        if sampling.repetition_penalty != 1.0:
            scores = scores.astype(np.float64)
            used = np.unique(np.asarray(seen, np.int64))
            values = scores[used]
            scores[used] = np.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        if sampling.presence_penalty or sampling.frequency_penalty:
            scores = scores.astype(np.float64)
            answered, counts = np.unique(np.asarray(seen[self._num_prompt :], np.int64), return_counts=True)
            scores[answered] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        token = int(np.argmax(scores)) if sampling.temperature == 0 else self._draw(scores, len(seen))
        if sampling.logprobs is None:
            return token, None
        return token, logprob_of(logits, token, sampling.logprobs)

    def _draw(self, scores: npt.NDArray[np.floating[Any]], position: int) -> int:
        sampling = self.sampling
        weights = np.divide(scores, sampling.temperature, dtype=np.float64)
        weights -= weights.max()
        np.exp(weights, out=weights)
        ids = _largest(weights, sampling.top_k) if sampling.top_k else np.arange(len(weights))
        ids = ids[weights[ids] >= sampling.min_p]
        if sampling.top_p < 1:
            ids = ids[_nucleus(weights[ids], sampling.top_p)]
        cumulative = np.cumsum(weights[ids])
        random = np.random.Generator(np.random.Philox(key=self._seed, counter=position)).random()
        return int(ids[min(np.searchsorted(cumulative, random * cumulative[-1], side="right"), len(ids) - 1)])


def _largest(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Places of the `count` largest values (all if there are fewer), largest first, equals in order of place."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    places = np.flatnonzero(values >= np.partition(values, -count)[-count])  # more where there are ties
    return places[np.argsort(-values[places], kind="stable")][:count]


def _nucleus(weights: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.int64]:
    """Places of the fewest weights that make up `share` of their sum, largest first, equals in order of place.

    Most often a few hundred do: sorting all of a vocabulary takes as long as a small model's step.
    """
    wanted = share * weights.sum()
    count = 256
    while True:
        places = _largest(weights, count)
        sums = np.cumsum(weights[places])
        if sums[-1] >= wanted or count >= len(weights):
            return places[: np.searchsorted(sums, wanted) + 1]
        count *= 16


def logprob_of(logits: Floats, token: int, count: int) -> TokenLogprob:
    """The log probability of a token where float32 logits [vocab_size] were computed, and the `count` likeliest."""
    scores = logits.astype(np.float64)
    top = scores.max()
    scores -= top + np.log(np.exp(scores - top).sum())
    best = _largest(scores, count) if count else ()
    return TokenLogprob(token, float(scores[token]), tuple((int(i), float(scores[i])) for i in best))
