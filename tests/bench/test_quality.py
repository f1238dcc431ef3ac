"""The measures of quality are right where the answer is known, and int8 KV is close to float32 KV on a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest

from kestrel.bench import quality
from kestrel.config import Config, load_config
from kestrel.engine.engine import Engine
from kestrel.models.checkpoint import open_checkpoint
from tests.engine.conftest import TINY

CHECKPOINT = TINY / "llama"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(
        [f"model.path={CHECKPOINT}", f"model.root={tmp_path / 'models'}", "cache.page_tokens=128"]
    )


def test_a_variant_beside_itself_loses_nothing(config: Config) -> None:
    checkpoint = open_checkpoint(CHECKPOINT)
    tokens = quality.text_tokens(checkpoint, 300)
    one = quality.compare(config, checkpoint, ("int8", "float32"), ("int8", "float32"), tokens)
    assert (one.perplexity_change, one.kl, one.top1, one.num_tokens) == (0.0, 0.0, 1.0, 299)


def test_perplexity_is_that_of_the_next_token_in_contexts_of_one_window(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = open_checkpoint(CHECKPOINT).geometry.vocab_size

    def uniform(self: Engine, spans: list, *_: object) -> np.ndarray:
        return np.full((sum(span.num_logits for span in spans), vocab), 3.0, np.float32)

    monkeypatch.setattr(Engine, "forward", uniform)
    monkeypatch.setattr(quality, "WINDOW_TOKENS", 100)
    checkpoint = open_checkpoint(CHECKPOINT)
    tokens = quality.text_tokens(checkpoint, 250)
    one = quality.compare(config, checkpoint, ("int8", "float32"), ("int8", "int8"), tokens)
    assert one.num_tokens == 99 + 99 + 49
    assert one.perplexity == pytest.approx(vocab, rel=1e-5)


def test_the_whole_report_is_written_and_int8_kv_stays_close(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "NUM_TOKENS", 400)
    monkeypatch.setattr(quality, "SPEED_CONTEXT_TOKENS", 256)
    report = quality.run(config, tmp_path / "out", lambda line: None)
    written = json.loads((tmp_path / "out" / "llama" / "quality.json").read_text())
    assert [(one["weights"], one["kv"]) for one in written["qualities"]] == [
        ("int8", "int8"),
        ("int8", "float32"),
        ("int4", "float32"),
    ]
    int8_kv = report.qualities[0]
    assert int8_kv.perplexity_change < 0.005 and 0 < int8_kv.kl < 0.01 and int8_kv.top1 > 0.9
    head = report.kv_bytes_per_token
    assert head["int8"] * 4 > head["float32"] > head["int8"] * 3
    shown = capsys.readouterr().out
    assert "| int8 weights, int8 KV | int8 weights, float32 KV |" in shown
    assert set(report.speed.decode_ms) == {"float32", "int8"}
