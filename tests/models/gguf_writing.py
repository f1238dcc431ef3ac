"""Write GGUF files from other checkpoints, with the official `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from kestrel.models.checkpoint import Checkpoint

NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "input_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "post_norm": "ffn_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def interleaved(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k as llama's GGUF files order them (the permutation of llama.cpp's convert_hf_to_gguf.py)."""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    source: Checkpoint,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[Any]] | None = None,
    architecture: str | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """A GGUF file of the source's tensors, matrices quantised as `kind`.

    `metadata` overrides or adds keys (without the architecture; None leaves one out), `extra` adds float32
    tensors, `drop` leaves out tensors by their name in the file.
    """
    geometry = source.geometry
    architecture = architecture or geometry.architecture
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "block_count": geometry.num_layers,
        "context_length": geometry.context_tokens,
        "embedding_length": geometry.hidden_size,
        "feed_forward_length": geometry.ffn_size,
        "attention.head_count": geometry.num_heads,
        "attention.head_count_kv": geometry.num_kv_heads,
        "attention.key_length": geometry.head_dim,
        "attention.value_length": geometry.head_dim,
        "attention.layer_norm_rms_epsilon": geometry.norm_eps,
        "rope.freq_base": geometry.rope.theta,
    }
    experts = geometry.experts
    if experts is not None:
        keys |= {
            "expert_count": experts.num_experts,
            "expert_used_count": experts.num_used,
            "expert_feed_forward_length": geometry.ffn_size,
            "feed_forward_length": 999,  # of layers without experts: there are none
        }
    for key, value in (keys | (metadata or {})).items():
        full = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_array(full, value)
    if experts is not None:
        for layer in range(geometry.num_layers):
            for part in ("gate", "up", "down"):
                names = [f"layers.{layer}.{mlp}{part}" for mlp in geometry.mlp_names]
                stacked = gguf.quants.quantize(np.stack([source.tensor(name) for name in names]), kind)
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", stacked, raw_dtype=kind)
    for name in geometry.tensor_shapes():
        if ".experts." in name:
            continue
        part = name.rpartition(".")[2]
        file_name = NAMES[part] if part == name else f"blk.{name.split('.')[1]}.{NAMES[part]}"
        if file_name in drop:
            continue
        tensor = source.tensor(name)
        if architecture == "llama" and part in ("q", "k", "q_bias", "k_bias"):
            tensor = interleaved(tensor, geometry.num_kv_heads if part[0] == "k" else geometry.num_heads)
        if tensor.ndim == 1 or part == "router":
            writer.add_tensor(file_name, tensor)
        else:
            writer.add_tensor(file_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    for file_name, tensor in (extra or {}).items():
        writer.add_tensor(file_name, np.asarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
