"""A purged session is gone from memory and disk, and a request that was about to use it computes instead."""

import pytest

from kestrel.cache.prefix import PrefixCache
from kestrel.cache.purge import purge_session
from kestrel.cache.sequence import CachedSequence
from kestrel.runtime import Runtime
from tests.cache.conftest import Boot, logits_bits, tokens_of

PROMPT = tokens_of(420)


@pytest.mark.parametrize("stored_too", [False, True])
def test_a_purge_between_finding_pages_and_taking_them(
    boot: Boot, monkeypatch: pytest.MonkeyPatch, stored_too: bool
) -> None:
    bits, _ = logits_bits(boot("cache=off"), PROMPT)
    runtime = boot() if stored_too else boot("cache=off")
    logits_bits(runtime, PROMPT)
    find = PrefixCache.find_in_ram

    def find_then_lose(self, tokens, course):
        found = find(self, tokens, course)
        self.engine.pool.forget([page.key for page, _ in found])
        return found

    monkeypatch.setattr(PrefixCache, "find_in_ram", find_then_lose)
    again, stats = logits_bits(runtime, PROMPT)
    monkeypatch.undo()
    assert (again, stats.ram_tokens) == (bits, 0)
    pool = runtime.engine.pool
    assert sorted({pool.references(page) for page in range(pool.num_pages)}) == [0]
    held = [pool.allocate() for _ in range(pool.num_pages)]
    assert len(set(held)) == pool.num_pages  # no page is in two places, none is lost


def finished_sequence(runtime: Runtime, tokens: list[int]) -> CachedSequence:
    sequence = runtime.cache.open(tokens)
    sequence.prefill()
    sequence.close()
    runtime.writer.drain()
    return sequence


def test_a_session_longer_than_what_is_saved_leaves_the_disk(boot: Boot) -> None:
    runtime = boot("cache.max_prefix_tokens=256")
    sequence = finished_sequence(runtime, PROMPT)
    assert any("saved 256-token KV" in line for line in runtime.lines)
    assert purge_session(runtime.cache, runtime.cache.common, sequence.last_key).removed == 2
    assert runtime.store.usage().files == 0
    assert logits_bits(runtime, PROMPT)[1].matched_tokens == 0


def test_sessions_that_part_beyond_what_is_saved_are_purged_one_by_one(boot: Boot) -> None:
    runtime = boot("cache.max_prefix_tokens=256")
    one, other = PROMPT, [*PROMPT[:300], *tokens_of(150, seed=7)]
    ends = [finished_sequence(runtime, tokens).last_key for tokens in (one, other)]
    assert ends[0] != ends[1]
    purge_session(runtime.cache, runtime.cache.common, ends[0])
    assert logits_bits(runtime, [*other, 5])[1].ram_tokens == len(other)


def test_a_session_whose_last_page_was_not_saved_leaves_the_disk(boot: Boot) -> None:
    runtime = boot()
    publish = runtime.store.publish
    runtime.store.publish = lambda *args: publish(*args) if args[5] < 256 else 1 / 0  # first
    sequence = finished_sequence(runtime, PROMPT)
    assert runtime.store.usage().files == 2
    assert purge_session(runtime.cache, runtime.cache.common, sequence.last_key).removed == 2
    assert logits_bits(runtime, PROMPT)[1].matched_tokens == 0
