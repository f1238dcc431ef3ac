"""The same weights for Kestrel and llama.cpp: a GGUF file of any checkpoint, in Q8_0 or Q4_0, for speed alone.

Both take the blocks over as they are: the same scales, the same values. The embedding, which is the LM head too where
that is tied, is Q8_0 in both kinds, as Kestrel's int4 recipe keeps it. The vocabulary is a placeholder, because
prompts are token ids.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.bench.records import BenchError
from kestrel.models.checkpoint import Checkpoint
from kestrel.models.gguf import LAYER_TENSORS, TENSORS

KINDS = {"int8": "Q8_0", "int4": "Q4_0"}  # by recipe of engine.weights

_ROWS = 8192  # quantised at once
_NORMAL, _CONTROL = 1, 3  # token types of GGUF


def write_twin(checkpoint: Checkpoint, recipe: str, folder: Path) -> Path:
    """The GGUF file of a checkpoint for a recipe, written once below `folder` under a name made of its content.

    BenchError for a recipe or a model that llama.cpp has no counterpart for here.
    """
    import gguf

    geometry = checkpoint.geometry
    if recipe not in KINDS:
        raise BenchError(f"engine.weights={recipe} has no counterpart; choose one of {', '.join(KINDS)}")
    if geometry.experts is not None or geometry.rope.scaling is not None:
        raise BenchError("beside llama.cpp only models without experts and RoPE scaling are measured")
    path = folder / f"{checkpoint.digest}-{KINDS[recipe]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    architecture = geometry.architecture
    writer = gguf.GGUFWriter(partial, architecture)
    writer.add_block_count(geometry.num_layers)
    writer.add_context_length(geometry.context_tokens)
    writer.add_embedding_length(geometry.hidden_size)
    writer.add_feed_forward_length(geometry.ffn_size)
    writer.add_head_count(geometry.num_heads)
    writer.add_head_count_kv(geometry.num_kv_heads)
    writer.add_key_length(geometry.head_dim)
    writer.add_value_length(geometry.head_dim)
    writer.add_rope_dimension_count(geometry.head_dim)
    writer.add_layer_norm_rms_eps(geometry.norm_eps)
    writer.add_rope_freq_base(geometry.rope.theta)
    writer.add_vocab_size(geometry.vocab_size)
    _add_vocabulary(writer, geometry.vocab_size)
    coarse = gguf.GGMLQuantizationType[KINDS[recipe]]
    fine = gguf.GGMLQuantizationType.Q8_0
    for name, shape in geometry.tensor_shapes().items():
        part = name.rpartition(".")[2]
        file_name = TENSORS[part] if part == name else f"blk.{name.split('.')[1]}.{LAYER_TENSORS[part]}"
        if len(shape) == 1:
            writer.add_tensor(file_name, checkpoint.tensor(name))
            continue
        kind = fine if part in ("embed", "head") else coarse
        blocks = np.concatenate(
            [
                gguf.quants.quantize(checkpoint.rows(name, first, min(first + _ROWS, shape[0])), kind)
                for first in range(0, shape[0], _ROWS)
            ]
        )
        if architecture == "llama" and part in ("q", "k"):
            blocks = interleaved(blocks, geometry.num_kv_heads if part == "k" else geometry.num_heads)
        writer.add_tensor(file_name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)
    return path


def interleaved(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k as llama's GGUF files order them: pairs (i, i + head_dim / 2) become neighbours."""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def _add_vocabulary(writer: Any, vocab_size: int) -> None:
    """One token a byte, one merge (a vocabulary needs one), then placeholders; the last one ends a text."""
    from kestrel.models.tokenizer import byte_characters

    characters = list(byte_characters().values())
    tokens = [*characters, characters[0] + characters[1]]
    if vocab_size <= len(tokens):
        raise BenchError(f"a vocabulary of {vocab_size} has no room for the bytes")
    tokens += [f"<{number}>" for number in range(len(tokens), vocab_size)]
    kinds = [_NORMAL] * (vocab_size - 1) + [_CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_bos_token_id(vocab_size - 1)
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_add_bos_token(False)
