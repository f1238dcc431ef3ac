"""A prompt with a place for an image is refused with a clear error; text goes through."""

from pathlib import Path

import pytest

from kestrel.config import load_config
from kestrel.errors import RequestError
from kestrel.models.tokenizer import VISION_TOKENS
from kestrel.runtime import Runtime
from tests.models.tiny import TINY


def test_prompts_with_vision_tokens_are_refused_by_name(tmp_path: Path) -> None:
    overrides = [f"model.path={TINY / 'qwen3vl'}", f"model.root={tmp_path}", "cache=off"]
    with Runtime.open(load_config([*overrides, "engine.kv_ram_bytes=64MiB"]), lambda line: None) as runtime:
        runtime.check(runtime.tokenizer.encode("Tell me of falcons. <|im_end|>"))
        for text in VISION_TOKENS:
            tokens = runtime.tokenizer.encode(f"<|im_start|>user\nLook: {text}<|im_end|>")
            with pytest.raises(RequestError, match=f"the prompt holds {text.replace('|', '.')}, a place"):
                runtime.prefill(tokens)
