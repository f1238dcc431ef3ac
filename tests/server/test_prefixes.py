"""Promise: a configured prefix is what prompts that begin with it begin with, and a server can prepare it."""

import signal
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import PrefixConfig
from kestrel.errors import ConfigError
from kestrel.models.checkpoint import Checkpoint, open_checkpoint
from kestrel.prefixes import common_prefix, prefix_tokens

TINY = Path(__file__).parent.parent / "oracle"
TEXT = "You are Kestrel, a small falcon. Answer briefly, and in 2 sentences at most"
NEXT = ["Hello", " and", "\n\nNew", "...", "!", "99", "日本", "'s", "\t"]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(TINY / request.param, tmp_path_factory.mktemp("models"))


def test_a_system_prefix_begins_every_chat_with_it(tiny: Checkpoint) -> None:
    tokenizer, chat = tiny.tokenizer(), tiny.chat_template()
    assert chat is not None
    prefix = prefix_tokens("p", PrefixConfig(text=TEXT, file=None, role="system"), tokenizer, chat)
    assert TEXT in tokenizer.decode(prefix)
    for word in NEXT:
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": word}]
        assert tokenizer.encode(chat.render(messages))[: len(prefix)] == prefix


def test_a_raw_prefix_begins_every_text_with_it(tiny: Checkpoint, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    file = tmp_path / "prefix.txt"
    file.write_text(TEXT, encoding="utf-8")
    prefix = prefix_tokens("p", PrefixConfig(text=None, file=str(file), role=None), tokenizer, None)
    assert TEXT.startswith(tokenizer.decode(prefix)) and len(prefix) > len(tokenizer.encode(TEXT)) - 4
    for word in NEXT:
        assert tokenizer.encode(TEXT + word)[: len(prefix)] == prefix


def test_the_common_prefix_of_token_lists() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1], [2]]) == []


def test_unusable_prefixes_are_named(tiny: Checkpoint, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    missing = PrefixConfig(text=None, file=str(tmp_path / "none.txt"), role=None)
    with pytest.raises(ConfigError, match="prefixes.manual.file: cannot read .*none.txt"):
        prefix_tokens("manual", missing, tokenizer, None)
    with pytest.raises(ConfigError, match="prefixes.chat.role: the model has no chat template"):
        prefix_tokens("chat", PrefixConfig(text=TEXT, file=None, role="system"), tokenizer, None)


def test_a_server_prepares_its_prefixes(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    words = [*tiny_words, f"prefixes.kestrel.text={TEXT}", "prefixes.kestrel.role=system"]
    warming = start_server(*words, "server.warm=true", "engine.chunk_tokens=128", "cache.page_tokens=128")
    assert "prefix kestrel: absent" in warming.log
    warming.wait_for("prefix kestrel: ready")
    warming.wait_for("[KV-DISK] saved")
    [state] = warming.http.get("/v1/kv/prefixes").json()["data"]
    assert (state["name"], state["state"]) == ("kestrel", "ready")
    assert state["stored_tokens"] == state["num_tokens"] > 16
    warming.send(signal.SIGTERM)
    assert warming.exit_code() == 0

    server = start_server(*words)
    assert f"prefix kestrel: ready ({state['num_tokens']} tokens)" in server.log
    messages: list[Any] = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert answer.kestrel["restored_tokens"] == state["num_tokens"]
