"""A geometry knows its tensors and its RoPE, and refuses what Kestrel cannot compute."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kestrel.errors import ModelError
from kestrel.identity import canonical_json
from kestrel.models.geometry import Experts, Geometry, Rope
from tests.models.tiny import GEOMETRY


def test_plain_frequencies_fall_from_one_to_nearly_one_over_theta() -> None:
    frequencies, factor = Rope(10000.0, 4).frequencies()
    assert frequencies.tolist() == [1.0, 0.01]
    assert factor == 1.0


def test_linear_scaling_divides_all_frequencies_alike() -> None:
    plain, _ = Rope(10000.0, 64).frequencies()
    slowed, _ = Rope(10000.0, 64, {"type": "linear", "factor": 4}).frequencies()
    assert np.array_equal(slowed, plain / 4)


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain, _ = Rope(500000.0, 128).frequencies()
    scaled, factor = Rope(500000.0, 128, scaling | {"original_max_position_embeddings": 8192}).frequencies()
    wavelengths = 2 * math.pi / plain
    assert factor == 1.0
    assert np.array_equal(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    assert np.array_equal(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_scaling_ramps_from_original_to_interpolated_and_raises_attention() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    plain, _ = Rope(1e6, 128).frequencies()
    scaled, factor = Rope(1e6, 128, scaling).frequencies()
    assert factor == 0.1 * math.log(4) + 1
    assert scaled[0] == plain[0] and scaled[-1] == plain[-1] / 4
    assert (np.diff(plain / scaled) >= 0).all()


def test_factors_divide_each_frequency_by_its_own_number() -> None:
    frequencies, _ = Rope(10000.0, 4, {"type": "factors", "factors": [1.0, 8.0]}).frequencies()
    assert frequencies.tolist() == [1.0, 0.01 / 8]


@pytest.mark.parametrize(
    "scaling, complaint",
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"type": "longrope"}, "'longrope' is not supported"),
        ({"type": "linear"}, "factor, found None"),
        ({"type": "linear", "factor": "2"}, "factor, found '2'"),
        ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"type": "factors", "factors": [1.0]}, "must be 16 positive numbers, found 1"),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused_when_the_geometry_is_made(
    scaling: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        dataclasses.replace(GEOMETRY, rope=Rope(1e6, 32, scaling))


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"architecture": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3"),
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"rope": Rope(1e6, 64)}, "at most 32 dimensions, found 64"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
    ],
)
def test_impossible_geometries_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        dataclasses.replace(GEOMETRY, **change)


def test_the_identity_is_plain_json_without_the_context_length() -> None:
    longer = dataclasses.replace(GEOMETRY, context_tokens=4096)
    assert canonical_json(longer.as_identity()) == canonical_json(GEOMETRY.as_identity())
    fields = {field.name for field in dataclasses.fields(Geometry)}
    assert set(GEOMETRY.as_identity()) == fields - {"context_tokens", "experts"}
    mixture = dataclasses.replace(GEOMETRY, architecture="qwen3moe", experts=Experts(8, 2, True))
    assert set(mixture.as_identity()) == fields - {"context_tokens"}


def test_sizes_follow_from_the_geometry() -> None:
    assert GEOMETRY.kv_bytes_per_token == 2 * 2 * 32 * 2 * 4
    assert GEOMETRY.tensor_shapes()["layers.1.k"] == (64, 64)
    assert "head" not in GEOMETRY.tensor_shapes()
    assert dataclasses.replace(GEOMETRY, tied_head=False).tensor_shapes()["head"] == (300, 64)
    assert GEOMETRY.num_parameters == 300 * 64 + 64 + 2 * (2 * 64 + 2 * 32 + 64 * 384 + 3 * 64 * 96)
