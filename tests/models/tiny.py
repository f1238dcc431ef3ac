"""Small geometries and checkpoints that several tests use."""

import dataclasses
from pathlib import Path
from typing import Any

from kestrel.models.geometry import Geometry, Rope
from kestrel.models.random import RandomCheckpoint

TINY = Path(__file__).parents[1] / "oracle"  # the committed Hugging Face folders
TINY_NAMES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen3vl")

GEOMETRY = Geometry(
    architecture="qwen3",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=96,
    vocab_size=300,
    context_tokens=512,
    norm_eps=1e-6,
    rope=Rope(1e6, 32),
    qkv_bias=False,
    qk_norm=True,
    tied_head=True,
)


def random_checkpoint(seed: int = 0, **changes: Any) -> RandomCheckpoint:
    """Random weights of GEOMETRY with some fields changed."""
    return RandomCheckpoint(dataclasses.replace(GEOMETRY, **changes), seed)
