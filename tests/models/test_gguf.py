"""A GGUF file gives the tensors it was made from, in rotate-half order, or a ModelError that says what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from kestrel.errors import ModelError
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.geometry import Experts
from kestrel.models.quantisation import dequantise
from kestrel.models.tokenizer import VISION_TOKENS, byte_characters
from tests.models.gguf_writing import write_gguf
from tests.models.tiny import GEOMETRY, TINY, TINY_NAMES, random_checkpoint

Kind = GGMLQuantizationType


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_gguf_file_holds_the_tensors_of_the_folder_it_was_made_from(name: str, tmp_path: Path) -> None:
    folder = open_checkpoint(TINY / name)
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", folder))
    for tensor in folder.geometry.tensor_shapes():
        assert np.array_equal(file.tensor(tensor), folder.tensor(tensor)), tensor
    assert np.array_equal(file.embed([5, 0, 5]), folder.embed([5, 0, 5]))
    for field in ("num_layers", "head_dim", "vocab_size", "norm_eps", "qkv_bias", "qk_norm", "tied_head"):
        assert getattr(file.geometry, field) == getattr(folder.geometry, field), field


def test_biases_of_llama_are_put_in_rotate_half_order_too(tmp_path: Path) -> None:
    source = random_checkpoint(architecture="llama", qkv_bias=True, qk_norm=False)
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", source))
    for tensor in ("layers.0.q_bias", "layers.1.k_bias", "layers.1.v_bias", "layers.0.q", "layers.0.k"):
        assert np.array_equal(file.tensor(tensor), source.tensor(tensor)), tensor


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_are_those_of_the_whole_dequantised_tensor(
    kind: Kind, architecture: str, tmp_path: Path
) -> None:
    source = random_checkpoint(architecture=architecture, qk_norm=architecture == "qwen3", tied_head=False)
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", source, kind))
    for name in ("embed", "layers.0.q", "layers.1.k", "layers.1.down", "head"):
        whole = file.tensor(name)
        assert whole.dtype == np.float32 and whole.shape == source.tensor(name).shape
        assert np.array_equal(file.rows(name, 7, 40), whole[7:40])
        assert np.abs(whole - source.tensor(name)).max() < 0.15
    assert np.array_equal(file.embed(np.array([3, 299, 3])), file.tensor("embed")[[3, 299, 3]])


@pytest.mark.parametrize("kind, bits", [(Kind.Q8_0, 8), (Kind.Q4_0, 4), (Kind.Q4_0, 8)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_of_the_file_are_taken_over_without_loss(
    kind: Kind, bits: int, architecture: str, tmp_path: Path
) -> None:
    source = random_checkpoint(architecture=architecture, qk_norm=architecture == "qwen3")
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", source, kind))
    for name in ("embed", "layers.0.q", "layers.1.k", "layers.1.down"):
        blocks = file.blocks(name, bits, 3, 21)
        assert blocks is not None
        restored = dequantise(*blocks, bits, source.tensor(name).shape[1])
        assert np.array_equal(restored, file.tensor(name)[3:21])


def test_only_blocks_that_fit_are_taken_over(tmp_path: Path) -> None:
    assert (
        open_checkpoint(write_gguf(tmp_path / "a.gguf", random_checkpoint(), Kind.Q8_0)).blocks(
            "embed", 4, 0, 9
        )
        is None
    )
    assert (
        open_checkpoint(write_gguf(tmp_path / "b.gguf", random_checkpoint(), Kind.Q4_1)).blocks(
            "embed", 4, 0, 9
        )
        is None
    )


@pytest.mark.parametrize(
    "kind, nbytes, scales", [(Kind.Q4_K, 144, 0), (Kind.Q5_K, 176, 0), (Kind.Q6_K, 210, 208)]
)
def test_k_quants_are_read(
    kind: Kind, nbytes: int, scales: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(tensor: np.ndarray[Any, Any], wanted: Kind) -> np.ndarray[Any, Any]:
        """Arbitrary blocks of 256 with a moderate float16 scale (the package cannot quantise to K-quants)."""
        rows, columns = tensor.shape
        raw = np.random.default_rng(rows).integers(0, 256, (rows, columns // 256, nbytes), dtype=np.uint8)
        raw[..., scales : scales + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        if kind != Kind.Q6_K:
            raw[..., 2:4] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
        return raw.reshape(rows, -1)

    monkeypatch.setattr("tests.models.gguf_writing.gguf.quants.quantize", blocks)
    source = random_checkpoint(hidden_size=256, ffn_size=256, num_heads=8)
    path = write_gguf(tmp_path / "model.gguf", source, kind)
    file = open_checkpoint(path)
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}["token_embd.weight"]
    assert np.array_equal(file.tensor("embed"), dequantize(stored.data, kind))
    assert np.array_equal(file.embed([17]), file.tensor("embed")[[17]])


def test_float32_metadata_is_read_as_the_decimal_it_was_written_as(tmp_path: Path) -> None:
    metadata = {"rope.freq_base": 5000000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    geometry = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", random_checkpoint(), metadata=metadata)
    ).geometry
    assert geometry.norm_eps == 1e-5 and geometry.rope.theta == 5000000.0


def test_the_text_decoder_of_qwen3_vl_is_read(tmp_path: Path) -> None:
    metadata = {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3}
    path = write_gguf(tmp_path / "m.gguf", random_checkpoint(), metadata=metadata, architecture="qwen3vl")
    assert open_checkpoint(path).geometry == GEOMETRY


def test_places_for_images_are_refused_in_prompts_of_qwen3_vl(tmp_path: Path) -> None:
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*VISION_TOKENS, *byte_characters().values(), "ab"],
        "tokenizer.ggml.token_type": [3] * len(VISION_TOKENS) + [1] * 257,
        "tokenizer.ggml.merges": ["a b"],
    }
    for architecture, refused in (("qwen3vl", dict(enumerate(VISION_TOKENS))), ("qwen3", {})):
        path = tmp_path / f"{architecture}.gguf"
        write_gguf(path, random_checkpoint(), metadata=vocabulary, architecture=architecture)
        assert open_checkpoint(path).tokenizer().refused == refused


MIXTURE = {"architecture": "qwen3moe", "experts": Experts(5, 2, True)}


def test_experts_are_cut_out_of_their_fused_tensors(tmp_path: Path) -> None:
    source = random_checkpoint(**MIXTURE)
    for kind in (Kind.F32, Kind.Q8_0):
        file = open_checkpoint(write_gguf(tmp_path / f"{kind}.gguf", source, kind))
        assert file.geometry == source.geometry
        for name in ("layers.0.experts.0.gate", "layers.1.experts.4.up", "layers.1.experts.3.down"):
            whole = file.tensor(name)
            assert np.abs(whole - source.tensor(name)).max() <= (0 if kind == Kind.F32 else 0.01)
            assert np.array_equal(file.rows(name, 3, 30), whole[3:30])
    blocks = file.blocks("layers.1.experts.2.down", 8, 3, 30)
    assert blocks is not None
    assert np.array_equal(dequantise(*blocks, 8, 96), file.tensor("layers.1.experts.2.down")[3:30])


def test_shares_of_experts_are_normalised_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", random_checkpoint(**MIXTURE), metadata={"expert_weights_norm": False}
    )
    assert open_checkpoint(path).geometry.experts == Experts(5, 2, False)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"metadata": {"expert_shared_count": 1}}, "qwen3moe.expert_shared_count 1 is not supported"),
        ({"metadata": {"expert_gating_func": 2}}, "expert_gating_func 2 is not supported"),
        ({"metadata": {"expert_weights_scale": 2.5}}, "expert_weights_scale 2.5 is not supported"),
        ({"metadata": {"expert_count": 6}}, r"router has shape \[5, 64\], expected \[6, 64\]"),
        ({"metadata": {"expert_used_count": None}}, "expert_used_count must be one number"),
        ({"drop": ("blk.1.ffn_gate_inp.weight",)}, "layers.1.router is missing"),
        ({"extra": {"blk.0.ffn_up.weight": np.zeros((4, 4))}}, "layers.0.up has no place in qwen3moe"),
    ],
)
def test_experts_that_kestrel_does_not_run_are_named(
    options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_checkpoint(**MIXTURE), **options)
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(path)


def test_head_dim_is_the_key_length_where_there_is_one(tmp_path: Path) -> None:
    assert open_checkpoint(write_gguf(tmp_path / "a.gguf", random_checkpoint())).geometry.head_dim == 32
    source = random_checkpoint(num_heads=2, num_kv_heads=1)
    metadata = {"attention.key_length": None, "attention.value_length": None}
    assert open_checkpoint(write_gguf(tmp_path / "b.gguf", source, metadata=metadata)).geometry.head_dim == 32


def test_rope_factors_of_the_file_are_honoured(tmp_path: Path) -> None:
    source = random_checkpoint(architecture="llama", qk_norm=False)
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    plain = source.geometry.rope.frequencies()[0]
    path = write_gguf(tmp_path / "model.gguf", source, extra={"rope_freqs.weight": factors})
    assert np.array_equal(open_checkpoint(path).geometry.rope.frequencies()[0], plain / factors)


@pytest.mark.parametrize(
    "metadata, scaling",
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_is_read(
    metadata: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", random_checkpoint(), metadata=metadata))
    assert file.geometry.rope.scaling == scaling


@pytest.mark.parametrize(
    "options, complaint",
    [
        (
            {"architecture": "gemma3"},
            "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3",
        ),
        ({"metadata": {"expert_count": 8}}, "qwen3 with a mixture of experts"),
        ({"metadata": {"attention.sliding_window": 4096}}, "sliding-window"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        (
            {"metadata": {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.2}},
            "YaRN with attn_factor=1.2 is not supported",
        ),
        ({"metadata": {"split.count": 3}}, "llama-gguf-split --merge"),
        ({"metadata": {"attention.value_length": 64}}, "different length"),
        ({"metadata": {"block_count": None}}, "qwen3.block_count must be one number, found None"),
        ({"metadata": {"feed_forward_length": [96, 128]}}, "feed_forward_length must be one number"),
        ({"metadata": {"block_count": 2.5}}, "block_count must be a whole number, found 2.5"),
        ({"metadata": {"rope.freq_base": 1.0}}, "RoPE needs theta > 1"),
        ({"metadata": {"block_count": 3}}, "layers.2.input_norm is missing"),
        ({"metadata": {"feed_forward_length": 128}}, r"gate has shape \[96, 64\], expected \[128, 64\]"),
        (
            {"extra": {"blk.0.attn_output.bias": np.zeros(64)}},
            "blk.0.attn_output.bias belongs to no architecture",
        ),
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros(64)}}, "ffn_gate_exps.weight belongs to no"),
        ({"drop": ("token_embd.weight",)}, "token_embd.weight is missing"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "layers.1.up is missing"),
    ],
)
def test_what_kestrel_does_not_run_is_named(options: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_checkpoint(), **options)
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(path)


def test_llama_with_rope_on_part_of_a_head_is_refused(tmp_path: Path) -> None:
    source = random_checkpoint(architecture="llama", qk_norm=False)
    path = write_gguf(tmp_path / "model.gguf", source, metadata={"rope.dimension_count": 16})
    with pytest.raises(ModelError, match="RoPE on 16 of 32 dimensions"):
        open_checkpoint(path)


def test_a_missing_file_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"expected a \.gguf file or a Hugging Face folder; check model.path"
    ):
        open_checkpoint(tmp_path / "nothing.gguf")


def test_every_truncation_is_noticed_when_the_file_is_opened(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", open_checkpoint(TINY / "qwen3")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 40), len(whole) - 32]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated|not a GGUF|cannot read"):
            open_checkpoint(cut)


def test_any_damaged_byte_of_the_header_gives_a_checkpoint_or_a_model_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_checkpoint(), Kind.Q8_0)
    whole = path.read_bytes()
    header = min(tensor.data_offset for tensor in GGUFReader(path).tensors)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.integers(header)] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ModelError:
            refused += 1
    assert refused > 100


def test_big_endian_and_future_versions_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_checkpoint())
    for version in (1, 4, 3 << 24):
        path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + path.read_bytes()[8:])
        with pytest.raises(ModelError, match=f"version {version}; supported: 2 and 3"):
            open_checkpoint(path)


def test_the_digest_is_that_of_the_bytes_and_is_remembered(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_checkpoint())
    first = open_checkpoint(path, tmp_path).digest
    assert open_checkpoint(path, tmp_path).digest == first == open_checkpoint(path).digest
    embed = open_checkpoint(path).embed_digest
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last tensor, which is not the embedding
    path.write_bytes(data)
    assert open_checkpoint(path, tmp_path).digest != first
    assert open_checkpoint(path).embed_digest == embed
