"""On real text int8 KV costs SmolLM2-135M at most 0.5 % of perplexity, and prefers the same token nearly always."""

from pathlib import Path

from kestrel.bench.quality import compare, text_tokens
from kestrel.config import load_config
from kestrel.models.checkpoint import open_checkpoint


def test_int8_kv_is_nearly_as_good_as_float32_kv(smollm2: Path) -> None:
    config = load_config([f"model.path={smollm2}", f"model.root={smollm2.parent}"])
    checkpoint = open_checkpoint(smollm2)
    tokens = text_tokens(checkpoint, 2049)
    found = compare(config, checkpoint, ("int8", "float32"), ("int8", "int8"), tokens)
    assert found.num_tokens == 2047
    assert found.perplexity_change < 0.005 and found.kl < 0.005 and found.top1 > 0.95
