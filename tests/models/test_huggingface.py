"""A Hugging Face folder gives its tensors and settings, or a ModelError that says what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kestrel.errors import ModelError
from kestrel.models.checkpoint import Checkpoint, open_checkpoint
from kestrel.models.geometry import Experts
from kestrel.models.huggingface import _LAYER_TENSORS, _TENSORS
from kestrel.models.tokenizer import VISION_TOKENS
from tests.models.tiny import TINY, TINY_NAMES, random_checkpoint

Edit = Callable[[dict[str, Any]], None]


def copied(name: str, folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a committed folder with keys of one JSON file changed; a value of None removes the key."""
    shutil.copytree(TINY / name, folder, ignore=shutil.ignore_patterns("reference.npz"))
    path = folder / file
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))
    return folder


def saved(source: Checkpoint, folder: Path, prefix: str = "model.", **config: Any) -> Path:
    """A folder with the tensors of another checkpoint in one float32 file."""
    geometry = source.geometry
    folder.mkdir()
    tensors = {}
    for name in geometry.tensor_shapes():
        layer, _, part = name.rpartition(".")
        file_name = f"{prefix}{layer}.{_LAYER_TENSORS[part]}" if layer else prefix + _TENSORS.get(part, "")
        tensors["lm_head.weight" if name == "head" else file_name] = source.tensor(name)
    save_file(tensors, folder / "model.safetensors")
    settings: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "intermediate_size": geometry.ffn_size,
        "vocab_size": geometry.vocab_size,
        "max_position_embeddings": geometry.context_tokens,
        "rms_norm_eps": geometry.norm_eps,
        "rope_theta": geometry.rope.theta,
        "tie_word_embeddings": geometry.tied_head,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


@pytest.mark.parametrize(
    "name, head_dim, bias, norm, tied",
    [("llama", 16, 0, 0, 0), ("qwen2", 16, 1, 0, 1), ("qwen3", 32, 0, 1, 1)],
)
def test_geometry_is_read_from_config_and_tensors(
    name: str, head_dim: int, bias: bool, norm: bool, tied: bool
) -> None:
    geometry = open_checkpoint(TINY / name).geometry
    assert geometry.architecture == name
    assert (geometry.head_dim, geometry.qkv_bias, geometry.qk_norm, geometry.tied_head) == (
        head_dim,
        bias,
        norm,
        tied,
    )
    assert (geometry.vocab_size, geometry.context_tokens, geometry.norm_eps) == (320, 512, 1e-5)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_rows_and_embeddings_are_those_of_the_whole_tensor(name: str) -> None:
    checkpoint = open_checkpoint(TINY / name)
    for tensor, shape in checkpoint.geometry.tensor_shapes().items():
        whole = checkpoint.tensor(tensor)
        assert whole.dtype == np.float32 and whole.shape == shape
        if whole.ndim == 2:
            assert np.array_equal(checkpoint.rows(tensor, 3, 17), whole[3:17])
    assert np.array_equal(checkpoint.embed([319, 0, 7, 7]), checkpoint.tensor("embed")[[319, 0, 7, 7]])


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    checkpoint = open_checkpoint(TINY / "llama")
    bits = checkpoint.tensor("layers.0.q").view(np.uint32)
    assert not (bits & 0xFFFF).any() and bits.any()


def test_float32_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    source = random_checkpoint(tied_head=False)
    checkpoint = open_checkpoint(saved(source, tmp_path / "model"))
    assert checkpoint.geometry == source.geometry
    for name in source.geometry.tensor_shapes():
        assert np.array_equal(checkpoint.tensor(name).view(np.int32), source.tensor(name).view(np.int32))


def test_the_text_decoder_of_qwen3_vl_is_read(tmp_path: Path) -> None:
    source = random_checkpoint()
    folder = saved(source, tmp_path / "model", prefix="model.language_model.")
    text = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text |= {"rope_scaling": rope, "architectures": None}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).geometry == source.geometry


def test_the_mixture_of_experts_of_qwen3_is_read(tmp_path: Path) -> None:
    geometry = open_checkpoint(TINY / "qwen3moe").geometry
    assert geometry.architecture == "qwen3moe" and geometry.ffn_size == 32
    assert geometry.experts == Experts(5, 2, True)
    # As older folders write it; weights are not normalised unless the folder says so.
    changes = {"num_local_experts": None, "num_experts": 5, "norm_topk_prob": None}
    folder = copied("qwen3moe", tmp_path / "model", **changes)
    assert open_checkpoint(folder).geometry.experts == Experts(5, 2, False)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2, mlp_only_layers \\[\\]"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers \\[0\\]"),
        ({"num_experts_per_tok": 6}, "must use 1 to 5 experts, found 6"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be int, found None"),
        ({"num_local_experts": 6}, r"layers.0.router has shape \[5, 48\], expected \[6, 48\]"),
        ({"num_local_experts": 4}, r"layers.0.router has shape \[5, 48\], expected \[4, 48\]"),
        ({"moe_intermediate_size": 64}, r"experts.0.gate has shape \[32, 48\], expected \[64, 48\]"),
        ({"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 32}, "layers.0.gate is missing"),
        ({"num_hidden_layers": 1}, "tensor layers.1.* has no place in qwen3moe"),
    ],
)
def test_experts_that_kestrel_does_not_run_are_named(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(copied("qwen3moe", tmp_path / "model", **changes))


def test_places_for_images_are_refused_in_prompts_of_qwen3_vl_alone() -> None:
    tokenizer = open_checkpoint(TINY / "qwen3vl").tokenizer()
    assert set(tokenizer.refused.values()) == set(VISION_TOKENS)
    assert tokenizer.encode("a<|image_pad|>")[-1] in tokenizer.refused
    assert open_checkpoint(TINY / "qwen3").tokenizer().refused == {}


def test_all_ids_that_end_generation_are_collected(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path / "model", "generation_config.json", eos_token_id=[2, 7])
    assert open_checkpoint(folder).tokenizer().eos_ids == {0, 2, 7}  # 0 is <|endoftext|>


def test_bos_is_added_where_the_tokenizer_says_so_and_only_once() -> None:
    llama, qwen = open_checkpoint(TINY / "llama").tokenizer(), open_checkpoint(TINY / "qwen3").tokenizer()
    bare = llama.encode("Hi", add_special=False)
    assert llama.encode("Hi") == [0, *bare] == llama.encode("<|endoftext|>Hi")
    assert qwen.encode("Hi") == qwen.encode("Hi", add_special=False)


def test_the_template_file_wins_over_the_one_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = copied(
        "qwen3", tmp_path / "model", "tokenizer_config.json", chat_template="old {{ messages[0].content }}"
    )
    template = open_checkpoint(folder).chat_template()
    assert template is not None and template.render([{"role": "user", "content": "x"}]).startswith(
        "<|im_start|>"
    )
    (folder / "chat_template.jinja").unlink()
    template = open_checkpoint(folder).chat_template()
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == "old x"


def test_named_templates_are_chosen_by_what_is_asked(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain{{ eos_token }}"},
        {"name": "tool_use", "template": "tools"},
    ]
    folder = copied("qwen3", tmp_path / "model", "tokenizer_config.json", chat_template=named)
    (folder / "chat_template.jinja").unlink()
    template = open_checkpoint(folder).chat_template()
    assert template is not None
    assert template.render([]) == "plain<|im_end|>"
    assert template.render([], tools=[{"type": "function"}]) == "tools"


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert open_checkpoint(folder).chat_template() is None


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "'MixtralForCausalLM' is not supported; supported: LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture 'none' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised Hugging Face checkpoints"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}},
            "'dynamic' is not supported",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
        ({"hidden_size": None}, "hidden_size must be int, found None"),
        ({"hidden_size": "64"}, "hidden_size must be int, found '64'"),
        ({"vocab_size": 321}, r"embed has shape \[320, 64\], expected \[321, 64\]"),
        ({"num_hidden_layers": 4}, "layers.3.input_norm is missing"),
        ({"tie_word_embeddings": False}, "tensor head is missing"),
    ],
)
def test_what_kestrel_does_not_run_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(folder)


def test_a_declared_sliding_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}
    assert open_checkpoint(copied("qwen3", tmp_path / "model", **changes)).geometry.num_layers == 3


def test_tensors_of_another_architecture_are_named(tmp_path: Path) -> None:
    folder = saved(random_checkpoint(), tmp_path / "model")
    tensors = {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    save_file(tensors, folder / "extra.safetensors")
    weight_map = {"a": "model.safetensors", "b": "extra.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="o_proj.bias belongs to no architecture"):
        open_checkpoint(folder)


def test_a_tensor_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = saved(random_checkpoint(), tmp_path / "model")
    save_file({"model.norm.weight": np.zeros(64, np.int8)}, folder / "extra.safetensors")
    weight_map = {"a": "model.safetensors", "b": "extra.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="model.norm.weight is I8; supported: F32, F16, BF16"):
        open_checkpoint(folder)


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path / "model")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(folder / "kept")
    with pytest.raises(ModelError, match="has no model-00002-of-00003.safetensors"):
        open_checkpoint(folder)
    (folder / "kept").rename(shard)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer.json"):
        open_checkpoint(folder).tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        open_checkpoint(folder).tokenizer()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(ModelError, match="has no passwd"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"config.json is not JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(
        ModelError, match="has no config.json, so it is no Hugging Face folder; check model.path"
    ):
        open_checkpoint(folder)
    (folder / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"set model.path=.*some.gguf to open that file"):
        open_checkpoint(folder)


def test_every_truncation_of_a_safetensors_file_is_noticed(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [0, 4, 8, 100, 3000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="damaged or truncated"):
            open_checkpoint(folder)


def test_the_digest_depends_on_config_and_tensors_alone(tmp_path: Path) -> None:
    digest = open_checkpoint(TINY / "qwen3").digest
    folder = copied("qwen3", tmp_path / "model", "generation_config.json", eos_token_id=[2, 7])
    assert open_checkpoint(folder).digest == digest
    shard = folder / "model-00003-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert open_checkpoint(folder).digest != digest
