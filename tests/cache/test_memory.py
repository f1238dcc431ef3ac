"""Memory is a cache too: the next turn continues in it, prefixes are shared, and the longer match wins."""

from kestrel.runtime import Request
from tests.cache.conftest import Boot, logits_bits, tokens_of

PROMPT = tokens_of(420)


def test_the_next_turn_continues_in_memory_without_reading(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, PROMPT)
    _, stats = logits_bits(runtime, PROMPT + [7, 8, 9] + tokens_of(20, seed=1))
    assert stats.ram_tokens == 423 and stats.restored_tokens == 0 and stats.bytes_read == 0


def test_two_continuations_of_one_prefix_do_not_disturb_each_other(boot: Boot) -> None:
    alone = boot("cache=off", "engine.kv_ram_bytes=64MiB")
    expected = [logits_bits(alone, PROMPT + tokens_of(40, seed))[0] for seed in (1, 2, 1)]
    runtime = boot()
    logits_bits(runtime, PROMPT)
    first = runtime.cache.open(PROMPT + tokens_of(40, 1))
    second = runtime.cache.open(PROMPT + tokens_of(40, 2))
    logits = {1: [first.prefill()], 2: [second.prefill()]}
    for n in range(3):
        logits[1].append(first.append(7 + n))
        logits[2].append(second.append(7 + n))
    assert first.stats.ram_tokens == second.stats.ram_tokens == 420
    first.close()
    second.close()
    assert b"".join(row.tobytes() for row in logits[1]) == expected[0]
    assert b"".join(row.tobytes() for row in logits[2]) == expected[1]
    assert logits_bits(runtime, PROMPT + tokens_of(40, 1))[0] == expected[2]


def test_a_longer_match_on_disk_beats_a_shorter_one_in_memory(boot: Boot) -> None:
    logits_bits(boot(), PROMPT)
    runtime = boot()
    logits_bits(runtime, PROMPT[:140] + tokens_of(10, seed=6))
    _, stats = logits_bits(runtime, PROMPT)
    assert stats.ram_tokens == 128 and stats.restored_tokens == 419 - 128


def test_memory_is_reused_when_the_budget_is_full_and_answers_stay_right(boot: Boot) -> None:
    page = 128 * boot().engine.geometry.kv_bytes_per_token
    runtime = boot(f"engine.kv_ram_bytes={6 * page}", "cache=off")
    bits = [logits_bits(runtime, tokens_of(400, seed))[0] for seed in range(4)]
    assert [logits_bits(runtime, tokens_of(400, seed))[0] for seed in range(4)] == bits


def test_generation_is_refused_when_memory_runs_out_and_the_runtime_lives_on(boot: Boot) -> None:
    import pytest

    from kestrel.errors import PromptTooLong

    page = 128 * boot().engine.geometry.kv_bytes_per_token
    runtime = boot(f"engine.kv_ram_bytes={2 * page}")
    with pytest.raises(PromptTooLong, match="kv_ram_bytes"):
        list(runtime.generate(Request(tokens_of(300), 3)))
    with pytest.raises(PromptTooLong, match="max_tokens"):  # rather than a stop half-way
        list(runtime.generate(Request(tokens_of(250), 50, ignore_eos=True)))
    assert len(list(runtime.generate(Request(tokens_of(100), 3, ignore_eos=True)))) == 4
