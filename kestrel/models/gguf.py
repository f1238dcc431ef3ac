"""Checkpoints in GGUF files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kestrel.errors import ModelError
from kestrel.models.chat import ChatTemplate, compile_templates
from kestrel.models.checkpoint import Bytes, Floats, check_shapes
from kestrel.models.digests import DigestMemo, file_xxh3
from kestrel.models.geometry import Experts, Geometry, Rope
from kestrel.models.gguf_container import GGUFContainer, GGUFTensor, split_tensor
from kestrel.models.quantisation import pack4
from kestrel.models.tokenizer import (
    VISION_TOKENS,
    Tokenizer,
    add_tokens,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

# qwen3vl is the text decoder of Qwen3-VL: for text its three-part positions coincide with plain RoPE.
_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
    "qwen3vl": "qwen3",
}
# Names in the file, by part of the model; those of a layer stand behind "blk.NUMBER."
TENSORS = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER_TENSORS = {
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
_EXPERT_TENSORS = {  # the matrices of all experts one after another
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SOFTMAX = 1  # expert_gating_func
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


class GGUFCheckpoint:
    """A `Checkpoint` read from one GGUF file."""

    def __init__(self, path: Path, memo_root: Path | None = None) -> None:
        """Reads the header only; ModelError if the file is damaged or the model is not one Kestrel runs."""
        self.path = path
        self.name = path.stem
        self._memo = DigestMemo(memo_root)
        self._file = GGUFContainer(path)
        self._metadata = self._file.metadata
        self._found = self._metadata.get("general.architecture")
        if self._found not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self._found!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        if self._metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge"
            )
        self._tensors = self._canonical_tensors()
        self.geometry = self._read_geometry()
        check_shapes(self.geometry, {name: tensor.shape for name, tensor in self._tensors.items()}, path)

    @property
    def digest(self) -> str:
        """xxh3_128 of the file's bytes."""
        return self._memo.remember(self.path, "xxh3_128", file_xxh3)

    @property
    def embed_digest(self) -> str:
        """xxh3_128 of the embedding matrix's type and bytes."""
        tensor = self._tensors["embed"]
        digest = xxhash.xxh3_128(f"{tensor.kind.name} {tensor.shape}".encode())
        digest.update(self._file.raw(tensor).data)
        return digest.hexdigest()

    def tensor(self, name: str) -> Floats:
        """A whole tensor as float32."""
        shape = self._tensors[name].shape
        rows = shape[0] if len(shape) > 1 else 1
        numbers = self.rows(name, 0, rows).reshape(shape)
        order = self._rotate_half_order(name) if len(shape) == 1 else None
        return numbers if order is None else numbers[order]

    def rows(self, name: str, first: int, end: int) -> Floats:
        """Rows [first, end) of a matrix as float32."""
        return self._dequantised(self._tensors[name], self._raw_rows(name, first, end))

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        """Q8_0 and Q4_0 blocks have a float16 scale and signed codes: the same numbers in another order."""
        kind = self._tensors[name].kind
        if kind not in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
            return None
        if kind == GGMLQuantizationType.Q8_0 and bits != 8:
            return None
        raw = self._raw_rows(name, first, end)
        blocks = raw.reshape(end - first, -1, 34 if kind == GGMLQuantizationType.Q8_0 else 18)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        codes = blocks[..., 2:]
        if kind == GGMLQuantizationType.Q8_0:
            codes = codes ^ np.uint8(0x80)  # two's complement to offset 128
        else:
            # The low nibbles of a block are its first 16 numbers, the high nibbles its last 16; zero point 8.
            codes = np.concatenate((codes & np.uint8(15), codes >> np.uint8(4)), -1)
            if bits == 4:
                return pack4(codes), scales
            codes += np.uint8(128 - 8)
        return codes, scales

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Rows of the embedding matrix, dequantised one by one."""
        tensor = self._tensors["embed"]
        return self._dequantised(tensor, self._file.raw(tensor)[np.asarray(ids, np.intp)])

    def tokenizer(self) -> Tokenizer:
        """Rebuild the tokenizer from the metadata."""
        tokens = self._strings("tokenizer.ggml.tokens")
        kinds = self._metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        model = self._metadata.get("tokenizer.ggml.model")
        pre = str(self._metadata.get("tokenizer.ggml.pre", "default"))
        if len(kinds) != len(tokens):
            raise ModelError(f"{self.path} is damaged: {len(tokens)} tokens but {len(kinds)} token types")
        if model == "gpt2":
            merges = [self._merge(line) for line in self._strings("tokenizer.ggml.merges")]
            backend = self._built(byte_level_tokenizer, tokens, merges, pre)
        elif model == "llama":
            scores = self._metadata.get("tokenizer.ggml.scores")
            if not isinstance(scores, list) or len(scores) != len(tokens):
                raise ModelError(f"{self.path} is damaged: tokenizer.ggml.scores does not match its tokens")
            unknown = self._token_id("unknown") or 0
            spaced = bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))
            backend = self._built(sentencepiece_tokenizer, tokens, scores, unknown, spaced)
        else:
            raise ModelError(
                f"{self.path}: tokenizer {model!r} is not supported; supported: gpt2 (BPE), llama (SPM)"
            )
        typed = list(zip(tokens, kinds, strict=True))
        add_tokens(
            backend,
            special=[token for token, kind in typed if kind in (_CONTROL, _UNKNOWN)],
            plain=[token for token, kind in typed if kind == _USER_DEFINED],
        )
        bos = self._token_id("bos")
        wants_bos = self._metadata.get(
            "tokenizer.ggml.add_bos_token", model == "llama" or pre in ("llama-bpe", "llama3", "llama-v3")
        )
        ends = [self._token_id(name) for name in ("eos", "eot", "eom")]
        eos = [end for end in ends if end is not None]
        return Tokenizer(
            backend,
            eos,
            prefix=[bos] if wants_bos and bos is not None else [],
            suffix=eos[:1] if self._metadata.get("tokenizer.ggml.add_eos_token") else [],
            refused=VISION_TOKENS if self._found == "qwen3vl" else (),
        )

    def chat_template(self) -> ChatTemplate | None:
        """The template of the metadata; a tool_use variant is used for requests with tools."""
        templates = {"default": self._metadata.get("tokenizer.chat_template")}
        templates["tool_use"] = self._metadata.get("tokenizer.chat_template.tool_use")
        named = {name: text for name, text in templates.items() if isinstance(text, str)}
        if not named:
            return None
        tokens = self._strings("tokenizer.ggml.tokens")
        ids = {f"{name}_token": self._token_id(name) for name in ("bos", "eos")}
        return compile_templates(
            named, {name: tokens[token] for name, token in ids.items() if token is not None}
        )

    def _canonical_tensors(self) -> dict[str, GGUFTensor]:
        """Tensors by canonical name; ModelError for one that no supported architecture has."""
        canonical = {file_name: name for name, file_name in TENSORS.items()}
        layer_names = {file_name: name for name, file_name in LAYER_TENSORS.items()}
        expert_names = {file_name: name for name, file_name in _EXPERT_TENSORS.items()}
        tensors: dict[str, GGUFTensor] = {}
        for file_name, tensor in self._file.tensors.items():
            name = canonical.get(file_name)
            if file_name.startswith("blk."):
                _, layer, rest = file_name.split(".", 2) if file_name.count(".") >= 2 else ("", "", "")
                if rest in expert_names and layer.isdecimal() and len(tensor.shape) == 3:
                    for number, expert in enumerate(split_tensor(tensor)):
                        tensors[f"layers.{layer}.experts.{number}.{expert_names[rest]}"] = expert
                    continue
                name = (
                    f"layers.{layer}.{layer_names[rest]}"
                    if rest in layer_names and layer.isdecimal()
                    else None
                )
            if file_name == _ROPE_FACTORS:
                continue
            if name is None:
                raise ModelError(
                    f"{self.path}: tensor {file_name} belongs to no architecture Kestrel runs"
                    f" ({', '.join(_ARCHITECTURES)} without biases outside q, k, v)"
                )
            tensors[name] = tensor
        return tensors

    def _read_geometry(self) -> Geometry:
        if "embed" not in self._tensors:
            raise ModelError(f"{self.path}: tensor {TENSORS['embed']} is missing; is this a language model?")
        experts = self._read_experts()
        if self._count("attention.sliding_window", 0):
            raise ModelError(f"{self.path}: sliding-window attention is not supported")
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length", hidden // max(heads, 1))
        if self._count("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{self.path}: keys and values of different length are not supported")
        rope = self._read_rope(head_dim)
        if self._found == "llama" and rope.dim != head_dim:
            raise ModelError(
                f"{self.path}: llama with RoPE on {rope.dim} of {head_dim} dimensions is not supported; expected all"
            )
        return Geometry(
            architecture=_ARCHITECTURES[str(self._found)],
            num_layers=self._count("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._count("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=self._count("feed_forward_length" if experts is None else "expert_feed_forward_length"),
            vocab_size=self._tensors["embed"].shape[0],
            context_tokens=self._count("context_length"),
            norm_eps=_shortest(self._number("attention.layer_norm_rms_epsilon")),
            rope=rope,
            qkv_bias="layers.0.q_bias" in self._tensors,
            qk_norm="layers.0.q_norm" in self._tensors,
            tied_head="head" not in self._tensors,
            experts=experts,
        )

    def _read_experts(self) -> Experts | None:
        """The mixture of experts; ModelError for one that works otherwise than Qwen3's."""
        count = self._count("expert_count", 0)
        if _ARCHITECTURES[str(self._found)] != "qwen3moe":
            if count:
                raise ModelError(f"{self.path}: {self._found} with a mixture of experts is not supported")
            return None
        for key, usual in (
            ("expert_shared_count", (0,)),
            ("expert_gating_func", (_SOFTMAX,)),
            ("expert_weights_scale", (0.0, 1.0)),
            ("expert_group_count", (0, 1)),
        ):
            if (found := self._number(key, usual[0])) not in usual:
                raise ModelError(f"{self.path}: {self._found}.{key} {found} is not supported")
        # Qwen3's files say nothing of it, and every reader normalises.
        normalised = self._metadata.get(f"{self._found}.expert_weights_norm", True)
        return Experts(count, self._count("expert_used_count"), normalised is True)

    def _read_rope(self, head_dim: int) -> Rope:
        dim = self._count("rope.dimension_count", head_dim)
        theta = _shortest(self._number("rope.freq_base", 10000.0))
        factor = _shortest(self._number("rope.scaling.factor", self._number("rope.scale_linear", 0.0)))
        kind = self._metadata.get(f"{self._found}.rope.scaling.type", "linear" if factor else "none")
        scaling: dict[str, Any] | None = None
        if _ROPE_FACTORS in self._file.tensors:
            if kind != "none" and factor not in (0.0, 1.0):
                raise ModelError(
                    f"{self.path}: RoPE scaling {kind!r} together with {_ROPE_FACTORS} is not supported"
                )
            tensor = self._file.tensors[_ROPE_FACTORS]
            factors = self._dequantised(tensor, self._file.raw(tensor)).reshape(-1).tolist()
            scaling = {"type": "factors", "factors": factors}
        elif kind == "linear" and factor not in (0.0, 1.0):
            scaling = {"type": "linear", "factor": factor}
        elif kind == "yarn":
            original = self._count("rope.scaling.original_context_length", self._count("context_length"))
            scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if self._number(f"rope.scaling.yarn_{name}", 0.0):
                    scaling[name] = self._number(f"rope.scaling.yarn_{name}", 0.0)
            for name, neutral in (("ext_factor", 1.0), ("attn_factor", 1.0), ("log_multiplier", 0.0)):
                if (found := self._number(f"rope.scaling.yarn_{name}", neutral)) != neutral:
                    raise ModelError(f"{self.path}: YaRN with {name}={found:g} is not supported")
            if attention := self._number("rope.scaling.attn_factor", 0.0):
                # The file's factor multiplies YaRN's own, which is 0.1 ln(factor) + 1.
                scaling["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        elif kind not in ("none", "linear"):
            raise ModelError(
                f"{self.path}: RoPE scaling {kind!r} is not supported; supported: none, linear, yarn"
            )
        return Rope(theta, dim, scaling)

    def _raw_rows(self, name: str, first: int, end: int) -> Bytes:
        raw = self._file.raw(self._tensors[name])
        order = self._rotate_half_order(name) if raw.shape[0] > 1 else None
        return raw[first:end] if order is None else raw[order[first:end]]

    def _rotate_half_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Rows of the file in rotate-half order, or None if they are.

        Llama files interleave the rows of q and k so that RoPE turns neighbours (2i, 2i + 1); rotate-half turns
        (i, i + head_dim / 2).
        """
        kind = name.rpartition(".")[2].removesuffix("_bias")
        if self._found != "llama" or kind not in ("q", "k"):
            return None
        rows = np.arange(self._tensors[name].shape[0])
        return rows.reshape(-1, self.geometry.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _dequantised(self, tensor: GGUFTensor, raw: Bytes) -> Floats:
        try:
            numbers: Floats = dequantize(raw, tensor.kind)
        except (NotImplementedError, KeyError):
            raise ModelError(
                f"{self.path}: tensor {tensor.name} is {tensor.kind.name}, which cannot be read"
            ) from None
        return numbers

    def _number(self, key: str, default: float | None = None) -> float:
        """A number of the metadata, key without the architecture; ModelError if it is missing without a default."""
        value = self._metadata.get(f"{self._found}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # given per layer
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {self._found}.{key} must be one number, found {str(value)[:80]}")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: {self._found}.{key} must be a whole number, found {value}")
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: {key} is missing; the file has no tokenizer Kestrel can use")
        return value

    def _token_id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self._strings("tokenizer.ggml.tokens")):
            raise ModelError(f"{self.path} is damaged: tokenizer.ggml.{name}_token_id is {value!r}")
        return value

    def _merge(self, line: str) -> tuple[str, str]:
        left, space, right = line.partition(" ")
        if not space:
            raise ModelError(f"{self.path} is damaged: {line!r} is not a merge of two tokens")
        return left, right

    def _built(self, build: Any, *arguments: Any) -> Any:
        """Call a tokenizer builder; `tokenizers` reports inconsistent vocabularies with plain exceptions."""
        try:
            return build(*arguments)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from error
        except Exception as error:
            raise ModelError(f"{self.path}: its tokenizer is not consistent: {error}") from error


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
