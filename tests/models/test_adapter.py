"""A LoRA adapter is merged into exactly the matrices it was made for, or refused by the name of what does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from kestrel.config import load_config
from kestrel.errors import ModelError
from kestrel.models.adapter import AdaptedCheckpoint
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.quantisation import quantise
from kestrel.models.weights import load_weights
from kestrel.runtime import Runtime
from tests.models.gguf_writing import write_gguf
from tests.models.lora import MODULES, module_of, write_adapter
from tests.models.tiny import TINY, TINY_NAMES, random_checkpoint


def independently_merged(source: Any, folder: Path, name: str, scaling: float) -> np.ndarray:
    """W + scaling * B A in float64."""
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (
        tensors[f"base_model.model.{module_of(name)}.lora_{side}.weight"].astype(np.float64) for side in "AB"
    )
    merged: np.ndarray = source.tensor(name).astype(np.float64) + scaling * (b @ a)
    return merged


@pytest.mark.parametrize("model", TINY_NAMES)
def test_every_target_of_every_architecture_is_merged(model: str, tmp_path: Path) -> None:
    source = open_checkpoint(TINY / model)
    folder = write_adapter(tmp_path / "adapter", source)
    adapted = AdaptedCheckpoint(source, folder)
    for name in source.geometry.tensor_shapes():
        if name.rpartition(".")[2] in MODULES:
            merged = independently_merged(source, folder, name, 16 / 4)
            assert np.abs(adapted.tensor(name) - merged).max() < 1e-6
            assert np.array_equal(adapted.rows(name, 5, 21), adapted.tensor(name)[5:21])
            assert np.abs(merged - source.tensor(name)).max() > 0.05
        else:
            assert np.array_equal(adapted.tensor(name), source.tensor(name))


def test_ranks_alphas_and_rank_stabilised_scaling_are_honoured(tmp_path: Path) -> None:
    source = random_checkpoint()
    folder = write_adapter(
        tmp_path / "adapter",
        source,
        ranks={"q": 8, "down": 2},
        rank_pattern={"q_proj": 8, "model.layers.[01].mlp.down_proj": 2},
        alpha_pattern={r"layers.1.self_attn.(q|v)_proj": 3, "o_proj": 32.0},
        use_rslora=True,
    )
    adapted = AdaptedCheckpoint(source, folder)
    for name, scaling in {
        "layers.0.q": 16 / 8**0.5,
        "layers.1.q": 3 / 8**0.5,
        "layers.1.v": 3 / 4**0.5,
        "layers.0.v": 16 / 4**0.5,
        "layers.1.o": 32 / 4**0.5,
        "layers.1.down": 16 / 2**0.5,
    }.items():
        merged = independently_merged(source, folder, name, scaling)
        assert np.abs(adapted.tensor(name) - merged).max() < 1e-5, name


@pytest.mark.parametrize("recipe", ["float32", "int8", "int4"])
def test_matrices_are_merged_before_they_are_quantised(recipe: str, tmp_path: Path) -> None:
    source = random_checkpoint()
    adapted = AdaptedCheckpoint(source, write_adapter(tmp_path / "adapter", source, ["o", "up"]))
    weights = load_weights(adapted, recipe, tmp_path, log=lambda line: None)
    merged, values = adapted.tensor("layers.1.o"), weights.layers[1].o.values
    assert np.array_equal(values, merged.T if recipe == "float32" else quantise(merged, int(recipe[3:]))[0])
    plain = load_weights(source, recipe, tmp_path, log=lambda line: None)
    assert weights.digest != plain.digest
    assert np.array_equal(weights.layers[1].qkv.values, plain.layers[1].qkv.values)
    assert plain.adapter is None and weights.adapter == adapted.adapter_digest


def test_rows_of_a_gguf_file_meet_the_rows_the_adapter_was_trained_for(tmp_path: Path) -> None:
    source = open_checkpoint(TINY / "llama")
    folder = write_adapter(tmp_path / "adapter", source)
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", source))
    for name in ("layers.0.q", "layers.1.k", "layers.1.v"):
        ours, theirs = (AdaptedCheckpoint(base, folder).rows(name, 3, 30) for base in (file, source))
        assert np.array_equal(ours, theirs)


def test_matrices_left_alone_keep_the_blocks_of_their_file(tmp_path: Path) -> None:
    source = random_checkpoint()
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", source, GGMLQuantizationType.Q8_0))
    adapted = AdaptedCheckpoint(file, write_adapter(tmp_path / "adapter", source, ["q"]))
    assert adapted.blocks("layers.0.k", 8, 0, 9) is not None
    assert adapted.blocks("layers.0.q", 8, 0, 9) is None


def test_the_digest_covers_tensors_and_scaling_and_no_setting_without_effect(tmp_path: Path) -> None:
    source = random_checkpoint()
    digests = [
        AdaptedCheckpoint(source, write_adapter(tmp_path / str(number), source, **changes)).digest
        for number, changes in enumerate(
            (
                {},
                {"lora_dropout": 0.5, "base_model_name_or_path": "elsewhere"},
                {"lora_alpha": 17},
                {"dtype": np.float16},
            )
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert source.digest not in digests


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"some_future_option": {"x": 1}}, "some_future_option={'x': 1}"),
        ({"r": 8}, "_proj must be (8, 96), found (4, 96)"),
        ({"r": "4"}, "_proj must be a positive number, found '4'"),
        ({"rank_pattern": {"(": 4}}, "'(' is no pattern"),
        ({"rank_pattern": [4]}, "patterns must be an object"),
        ({"ranks": {"v": 5}}, "lora_A of model.layers.0.self_attn.v_proj must be (4, 64), found (5, 64)"),
        (
            {"extra": {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 64), np.float32)}},
            "lm_head.lora_A.weight is not supported; supported targets: q, k, v, o, gate, up, down",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 300), np.float32)
                }
            },
            "lora_embedding_A is not supported",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": np.zeros((4, 64), np.float32)
                }
            },
            "model.layers.7.mlp.up_proj has no place in random",
        ),
        ({"targets": []}, "holds no tensors"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source = random_checkpoint()
    folder = write_adapter(tmp_path / "adapter", source, **changes)
    with pytest.raises(ModelError, match=re.escape(complaint)):
        AdaptedCheckpoint(source, folder)


def test_a_folder_that_is_no_adapter_says_so(tmp_path: Path) -> None:
    source = random_checkpoint()
    with pytest.raises(ModelError, match="expected a PEFT folder; check model.adapter"):
        AdaptedCheckpoint(source, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        AdaptedCheckpoint(source, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(ModelError, match="no adapter_model.safetensors"):
        AdaptedCheckpoint(source, tmp_path)


def test_a_runtime_with_an_adapter_is_another_model(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pirate", open_checkpoint(TINY / "qwen3"))
    runtimes = {}
    for adapter in ("null", str(folder)):
        overrides = [f"model.path={TINY / 'qwen3'}", f"model.root={tmp_path}", f"model.adapter={adapter}"]
        overrides += ["cache=off", "engine.kv_ram_bytes=64MiB"]
        with Runtime.open(load_config(overrides), lambda line: None) as runtime:
            runtimes[adapter] = runtime
    plain, adapted = runtimes.values()
    assert (plain.name, adapted.name) == ("qwen3", "qwen3+pirate")
    assert plain.namespace != adapted.namespace
    assert adapted.identity["weights"]["adapter"] == adapted.engine.weights.adapter
    assert "adapter" not in plain.identity["weights"]
