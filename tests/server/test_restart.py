"""Promise: after kill -9 a restarted server continues a conversation from the store, with the bits of a cold run."""

from typing import Any

FACTS = " ".join(f"Person number {n} lives in house {n * 7} and keeps {n % 5} cats." for n in range(12))
TURN: list[Any] = [{"role": "user", "content": f"{FACTS} Who keeps four cats?"}]


def ask(server: Any, messages: list[Any], stream: bool = False) -> Any:
    return server.openai.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=16, logprobs=True, top_logprobs=3, stream=stream
    )


def follow_up(answer: Any) -> list[Any]:
    return [
        *TURN,
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And who lives in house 21?"},
    ]


def test_a_killed_server_goes_on_where_it_was(start_server: Any, smollm2_words: tuple[str, ...]) -> None:
    first = start_server(*smollm2_words, "cache.page_tokens=128")
    assert "[KV-DISK] index: 0 checkpoint(s) in artifacts/kv" in first.log
    answer = ask(first, TURN)
    assert answer.kestrel["restored_tokens"] == 0
    first.wait_for("[KV-DISK] saved")
    first.process.kill()
    first.process.wait()

    second = start_server(*smollm2_words, "cache.page_tokens=128")
    assert "[KV-DISK] index: 0 checkpoint(s)" not in second.log
    continued = ask(second, follow_up(answer))
    known = answer.usage.prompt_tokens
    assert known <= continued.kestrel["restored_tokens"] == continued.kestrel["matched_tokens"]
    assert continued.usage.prompt_tokens_details.cached_tokens == continued.kestrel["restored_tokens"]
    assert continued.kestrel["bytes_read"] > 0 and continued.kestrel["miss_reason"] is None
    assert f"[KV-DISK] loaded {continued.kestrel['matched_tokens']}-token KV prefix from" in second.log

    control = start_server(*smollm2_words, "cache=off")
    cold = ask(control, follow_up(answer))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert "[KV-DISK]" not in control.log
    # JSON numbers carry every bit of a float64, so equal log probabilities are equal bits.
    assert continued.choices == cold.choices
