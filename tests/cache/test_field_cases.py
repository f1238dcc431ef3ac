"""Cases that went wrong in the field elsewhere: a restore that does nothing, or that brings another prefix's KV."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kestrel.models.chat import ChatTemplate
from kestrel.runtime import Runtime
from kestrel.store.artifact import encode_header, read_header
from tests.cache.conftest import Boot, logits_bits, tokens_of

PROMPT = tokens_of(420)
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence, and never without a bird in it."},
    {"role": "user", "content": "Which birds hover over open fields, waiting for the moment to dive?"},
    {"role": "assistant", "content": "The kestrel does, facing into the wind, with its tail spread wide."},
    {"role": "user", "content": "And which of them sleep on the wing?"},
]


@pytest.fixture
def boot(boot: Boot) -> Boot:
    """As everywhere, but what is stored is read even where computing it is quicker."""
    return partial(boot, "cache.load=always")


def page_file(runtime: Runtime, tokens: list[int], number: int) -> Path:
    """The artifact of one page of a stored prompt."""
    return runtime.find([*tokens, 1]).pages[number].path


def test_a_prompt_comes_back_after_other_conversations_were_served_in_between(boot: Boot) -> None:
    others = [PROMPT[:60] + tokens_of(300, seed=n) for n in (4, 5)] + [tokens_of(420, seed=6)]
    cold = {n: logits_bits(boot("cache=off"), tokens)[0] for n, tokens in enumerate([PROMPT, *others])}
    runtime = boot()
    logits_bits(runtime, PROMPT)
    for n, tokens in enumerate(others, 1):
        assert logits_bits(runtime, tokens)[0] == cold[n]
        bits, stats = logits_bits(runtime, PROMPT)
        assert bits == cold[0] and stats.computed_tokens == 1
    runtime = boot()
    for n, tokens in enumerate([*reversed(others), PROMPT]):
        bits, stats = logits_bits(runtime, tokens)
        assert bits == cold[len(others) - n if n < len(others) else 0]
        assert stats.computed_tokens == 1, "a restore after other restores did nothing"


def test_conversations_computed_in_the_same_steps_come_back_each_as_its_own(boot: Boot) -> None:
    prompts = [PROMPT[:100] + tokens_of(200, seed=n) for n in (1, 2, 3)]
    cold = [logits_bits(boot("cache=off"), tokens)[0] for tokens in prompts]
    runtime = boot()
    sequences = [runtime.cache.open(tokens) for tokens in prompts]
    while any(sequence.num_pending for sequence in sequences):
        runtime.cache.step([(one, min(37, one.num_pending)) for one in sequences if one.num_pending])
    for sequence in sequences:
        sequence.close()
    assert runtime.writer is not None
    runtime.writer.drain()
    runtime = boot()
    for tokens, bits in zip(prompts, cold, strict=True):
        found, stats = logits_bits(runtime, tokens)
        assert found == bits and stats.computed_tokens == 1


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_rejected_restore_spoils_neither_its_own_request_nor_the_next_one(boot: Boot, number: int) -> None:
    cold, _ = logits_bits(boot(), PROMPT)
    victim = page_file(boot(), PROMPT, number)
    content = bytearray(victim.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    victim.write_bytes(content)
    runtime = boot()
    bits, stats = logits_bits(runtime, PROMPT)
    assert bits == cold and stats.restored_tokens == number * 128
    bits, stats = logits_bits(runtime, PROMPT)  # from memory
    assert bits == cold and stats.computed_tokens == 1
    runtime = boot()
    bits, stats = logits_bits(
        runtime, PROMPT[:300] + tokens_of(40, seed=8)
    )  # another prompt from the same pages
    assert stats.restored_tokens == 300
    bits, stats = logits_bits(runtime, PROMPT)
    assert bits == cold and stats.computed_tokens == 1


@pytest.mark.parametrize("lie", ["none", "key and parent", "all but the digest of the prefix", "everything"])
def test_a_page_whose_chain_is_that_of_another_prefix_of_equal_length_is_refused(
    boot: Boot, lie: str
) -> None:
    shared = tokens_of(128, seed=3)
    mine, other = ([*tokens_of(128, seed=n), *shared, *tokens_of(20, seed=7)] for n in (1, 2))
    cold, _ = logits_bits(boot("cache=off"), mine)
    runtime = boot()
    for prompt in (mine, other):
        logits_bits(runtime, prompt, further=0)
    target, source = (page_file(runtime, prompt, 1) for prompt in (mine, other))
    with source.open("rb") as file:
        found = read_header(file.fileno(), None)
    with target.open("rb") as file:
        wanted = read_header(file.fileno(), None).header
    payload = source.read_bytes()[found.payload_start :]
    header = found.header
    if lie != "none":
        header = replace(header, key=wanted.key, parent=wanted.parent)
    if lie == "everything":
        header = replace(header, prefix_sha256=wanted.prefix_sha256)
    assert (
        header.layer_digests != wanted.layer_digests
    )  # the same tokens behind another prefix: other K and V
    target.write_bytes(encode_header(found.layout, header) + payload)
    runtime = boot()
    if lie == "everything":
        # Such a file is a forgery from end to end: no reader can tell it from a page. It shows what the test compares.
        assert logits_bits(runtime, mine)[0] != cold
        return
    bits, stats = logits_bits(runtime, mine)
    assert bits == cold and stats.restored_tokens == 128


def test_equal_pages_at_equal_places_behind_different_prefixes_are_never_mixed_up(boot: Boot) -> None:
    shared, end = tokens_of(256, seed=3), tokens_of(20, seed=7)
    prompts = [[*tokens_of(128, seed=n), *shared, *end] for n in (1, 2, 3)]
    cold = [logits_bits(boot("cache=off"), tokens)[0] for tokens in prompts]
    assert len(set(cold)) == 3
    runtime = boot()
    for tokens, bits in zip(prompts, cold, strict=True):
        found, stats = logits_bits(runtime, tokens)
        assert found == bits and stats.matched_tokens == 0
    runtime = boot()
    for tokens, bits in zip(prompts, cold, strict=True):
        found, stats = logits_bits(runtime, tokens)
        assert found == bits and stats.computed_tokens == 1


def test_another_chat_template_shares_what_its_text_shares_and_says_where_it_goes_another_way(
    boot: Boot,
) -> None:
    runtime = boot("cache.min_match=4")
    assert runtime.chat is not None
    old = runtime.tokenizer.encode(runtime.chat.render(MESSAGES))
    changed = ChatTemplate(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content | upper if loop.index == 2 else message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        {},
    )
    new = runtime.tokenizer.encode(changed.render(MESSAGES))
    common = next(at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert 4 < common < len(new) - 50
    cold, _ = logits_bits(boot("cache=off"), new)
    logits_bits(boot("cache.min_match=4"), old)
    missed = boot("cache.min_match=200").find(new)
    assert (missed.num_tokens, missed.diverged_at) == (0, common)
    assert f"shares {common} tokens" in (missed.reason or "")
    bits, stats = logits_bits(boot("cache.min_match=4"), new)
    assert bits == cold
    assert (stats.restored_tokens, stats.diverged_at) == (common, common)


def test_a_history_that_is_encoded_differently_from_what_was_generated_matches_up_to_the_difference(
    boot: Boot,
) -> None:
    runtime = boot()
    tokenizer = runtime.tokenizer
    before = tokenizer.encode(" ".join(message["content"] for message in MESSAGES))
    pairs = ((a, b) for a in range(5, 300) for b in range(5, 300))
    generated = next(
        [a, b]
        for a, b in pairs
        if (text := tokenizer.decode([a, b])).isascii()
        and text.isalpha()
        and len(tokenizer.encode(text, add_special=False)) == 1
    )
    sequence = runtime.cache.open(before)
    sequence.prefill()
    for token in (
        *generated,
        *tokens_of(5, seed=1),
    ):  # a model may choose two tokens where the tokenizer has one
        sequence.append(token)
    sequence.close()
    assert runtime.writer is not None
    runtime.writer.drain()
    again = tokenizer.encode(tokenizer.decode([*before, *generated]) + " What comes next is new.")
    common = next(at for at, (a, b) in enumerate(zip([*before, *generated], again, strict=False)) if a != b)
    assert common >= len(before) - 1
    cold, _ = logits_bits(boot("cache=off"), again)
    runtime = boot()
    match = runtime.find(again)
    assert (match.num_tokens, match.diverged_at) == (common, common)
    bits, stats = logits_bits(runtime, again)
    assert bits == cold
    assert (stats.restored_tokens, stats.diverged_at) == (common, common)
