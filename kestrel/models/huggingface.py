"""Checkpoints in Hugging Face folders: config.json, safetensors files, tokenizer.json."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash
from safetensors import SafetensorError, safe_open

from kestrel.errors import ModelError
from kestrel.identity import canonical_json
from kestrel.models.chat import ChatTemplate, compile_templates
from kestrel.models.checkpoint import Bytes, Floats, check_shapes
from kestrel.models.digests import DigestMemo, file_xxh3
from kestrel.models.geometry import Experts, Geometry, Rope
from kestrel.models.tokenizer import VISION_TOKENS, Tokenizer

_VISION = "Qwen3VLForConditionalGeneration"
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    _VISION: "qwen3",  # its text decoder: for text, RoPE's three parts coincide
}
_TENSORS = {"embed": "embed_tokens.weight", "norm": "norm.weight"}
_LAYER_TENSORS = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_NAMES = {file_name: name for name, file_name in _TENSORS.items()}
_LAYER_NAMES = {file_name: name for name, file_name in _LAYER_TENSORS.items()}
_EXPERT_TENSOR = re.compile(r"mlp\.experts\.(\d+)\.((?:gate|up|down)_proj\.weight)")
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # computed, not learnt
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a memory-mapped safetensors file: its bytes as [rows, in] of the stored type."""

    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[Any]

    def floats(self, rows: slice | npt.NDArray[np.intp]) -> Floats:
        """Some rows as float32."""
        raw = self.raw[rows]
        if self.dtype == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)


class HuggingFaceCheckpoint:
    """A `Checkpoint` read from a folder."""

    def __init__(self, path: Path, memo_root: Path | None = None) -> None:
        """Reads config.json and the headers; ModelError if the folder is not one Kestrel can run."""
        self.path = path
        self.name = path.resolve().name
        self._memo = DigestMemo(memo_root)
        self._config = self._json("config.json")
        names = self._config.get("architectures") or ["none"]
        if names[0] not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {names[0]!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        self._architecture = _ARCHITECTURES[names[0]]
        self._text_config = self._config.get("text_config") or self._config
        self._tied = bool(
            self._config.get("tie_word_embeddings", self._text_config.get("tie_word_embeddings", False))
        )
        self._shards = self._find_shards()
        self._tensors = self._open_tensors()
        self.geometry = self._read_geometry()
        check_shapes(self.geometry, {name: tensor.shape for name, tensor in self._tensors.items()}, path)

    @property
    def digest(self) -> str:
        """xxh3_128 of config.json's digest and those of the safetensors files."""
        files = [self.path / "config.json", *self._shards]
        digests = {file.name: self._memo.remember(file, "xxh3_128", file_xxh3) for file in files}
        return xxhash.xxh3_128_hexdigest(canonical_json(digests))

    @property
    def embed_digest(self) -> str:
        """xxh3_128 of the embedding matrix's type and bytes."""
        tensor = self._tensors["embed"]
        digest = xxhash.xxh3_128(f"{tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.raw.data)
        return digest.hexdigest()

    def tensor(self, name: str) -> Floats:
        """A whole tensor as float32."""
        return self._tensors[name].floats(slice(None)).reshape(self._tensors[name].shape)

    def rows(self, name: str, first: int, end: int) -> Floats:
        """Rows [first, end) of a matrix as float32."""
        return self._tensors[name].floats(slice(first, end))

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        """None: these files hold plain numbers."""
        return None

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Rows of the embedding matrix, read one by one."""
        return self._tensors["embed"].floats(np.asarray(ids, np.intp))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json; the ids that end generation are those of generation_config.json too."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{self.path} has no tokenizer.json; save the tokenizer with transformers' save_pretrained"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"cannot read {file}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = self._json("tokenizer_config.json", optional=True)
        tokens = self._special_tokens(config)
        bos = backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
        plain, framed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = [at for at in range(len(framed) - len(plain) + 1) if framed[at : at + len(plain)] == plain]
        start = starts[0] if starts else 0
        prefix, suffix = framed[:start], framed[start + len(plain) :]
        if not prefix and config.get("add_bos_token") and bos is not None:
            prefix = [bos]
        ends: set[int] = set()
        for source in (self._config, self._text_config, self._json("generation_config.json", optional=True)):
            end = source.get("eos_token_id")
            ends |= set(end if isinstance(end, list) else [] if end is None else [end])
        if "eos_token" in tokens:
            end = backend.token_to_id(tokens["eos_token"])
            ends |= set() if end is None else {end}
        refused = VISION_TOKENS if self._config["architectures"][0] == _VISION else ()
        return Tokenizer(backend, ends, prefix, suffix, refused)

    def chat_template(self) -> ChatTemplate | None:
        """chat_template.jinja, else chat_template.json, else what tokenizer_config.json holds."""
        config = self._json("tokenizer_config.json", optional=True)
        found: Any = config.get("chat_template")
        if (self.path / "chat_template.json").is_file():
            found = self._json("chat_template.json").get("chat_template")
        if (self.path / "chat_template.jinja").is_file():
            found = self._text("chat_template.jinja")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        if not found:
            return None
        return compile_templates(
            found if isinstance(found, dict) else {"default": found}, self._special_tokens(config)
        )

    def _special_tokens(self, config: dict[str, Any]) -> dict[str, str]:
        """Special tokens by name, as text; the files write a token as text or as an object."""
        tokens: dict[str, str] = {}
        for source in (self._json("special_tokens_map.json", optional=True), config):
            for name in _SPECIAL_TOKENS:
                token = source.get(name)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    tokens[name] = token
        return tokens

    def _find_shards(self) -> list[Path]:
        """The safetensors files, in name order."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = self._json(index.name).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} has no weight_map")
            shards = [self.path / str(name) for name in sorted(set(weight_map.values()))]
        else:
            shards = [self.path / "model.safetensors"]
        for shard in shards:
            if shard.parent != self.path or not shard.is_file():
                raise ModelError(
                    f"{self.path} has no {shard.name}; Kestrel reads safetensors: download the missing file, or convert"
                    " with transformers' save_pretrained"
                )
        return shards

    def _open_tensors(self) -> dict[str, StoredTensor]:
        """Map the files: tensors by canonical name; ModelError for one that no supported architecture has."""
        tensors: dict[str, StoredTensor] = {}
        for shard in self._shards:
            entries = read_header(shard)
            data: Bytes = np.memmap(shard, np.uint8, "r").view(np.ndarray)
            for full_name, entry in entries.items():
                if ".visual." in f".{full_name}" or full_name.endswith(_IGNORED):
                    continue
                name = canonical_name(full_name)
                if name is None:
                    raise ModelError(
                        f"{shard}: tensor {full_name} belongs to no architecture Kestrel runs"
                        f" ({', '.join(_ARCHITECTURES)} without biases outside q, k, v)"
                    )
                if not (name == "head" and self._tied):
                    tensors[name] = view_tensor(data, entry, f"{shard}: tensor {full_name}")
        return tensors

    def _read_geometry(self) -> Geometry:
        if self._config.get("quantization_config"):
            raise ModelError(
                f"{self.path}: quantised Hugging Face checkpoints are not supported; use F32, F16 or BF16"
            )
        if self._setting("hidden_act", str, "silu") != "silu":
            raise ModelError(
                f"{self.path}: activation {self._text_config['hidden_act']!r} is not supported; only silu"
            )
        layers = self._setting("num_hidden_layers", int)
        if "sliding_attention" in (self._text_config.get("layer_types") or ()):
            raise ModelError(f"{self.path}: layer_types uses sliding_attention, which is not supported")
        window = self._text_config.get("sliding_window")
        if self._text_config.get("use_sliding_window", self._architecture == "llama" and window is not None):
            if self._setting("max_window_layers", int, 0) < layers:
                raise ModelError(
                    f"{self.path}: a sliding window ({window} tokens) is in use, which is not supported"
                )
        hidden, heads = self._setting("hidden_size", int), self._setting("num_attention_heads", int)
        head_dim = self._setting(
            "head_dim", int, 128 if self._architecture == "qwen3" else hidden // max(heads, 1)
        )
        experts = self._read_experts() if self._architecture == "qwen3moe" else None
        return Geometry(
            architecture=self._architecture,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._setting("num_key_value_heads", int, heads),
            head_dim=head_dim,
            ffn_size=self._setting("intermediate_size" if experts is None else "moe_intermediate_size", int),
            vocab_size=self._setting("vocab_size", int),
            context_tokens=self._setting("max_position_embeddings", int),
            norm_eps=self._setting("rms_norm_eps", float, 1e-6),
            rope=self._read_rope(head_dim),
            qkv_bias="layers.0.q_bias" in self._tensors,
            qk_norm="layers.0.q_norm" in self._tensors,
            tied_head=self._tied,
            experts=experts,
        )

    def _read_experts(self) -> Experts:
        """The mixture of experts; ModelError unless every layer has one."""
        step, dense = self._setting("decoder_sparse_step", int, 1), self._text_config.get("mlp_only_layers")
        if step != 1 or dense:
            raise ModelError(
                f"{self.path}: layers without experts (decoder_sparse_step {step}, mlp_only_layers {dense}) are"
                " not supported; expected 1 and none"
            )
        name = "num_experts" if "num_experts" in self._text_config else "num_local_experts"
        normalised = self._text_config.get("norm_topk_prob", False)
        return Experts(
            self._setting(name, int), self._setting("num_experts_per_tok", int), normalised is True
        )

    def _read_rope(self, head_dim: int) -> Rope:
        """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        parameters = self._text_config.get("rope_parameters") or self._text_config.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise ModelError(f"{self.path}: rope_scaling must be an object, found {parameters!r}")
        theta = parameters.get("rope_theta", self._text_config.get("rope_theta", 10000.0))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
            raise ModelError(f"{self.path}: rope_theta must be a number above 1, found {theta!r}")
        partial = parameters.get("partial_rotary_factor", self._text_config.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise ModelError(f"{self.path}: partial_rotary_factor {partial} is not supported; only 1.0")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind in ("default", "mrope"):
            return Rope(float(theta), head_dim)
        kept = {
            name: value
            for name, value in parameters.items()
            if name not in ("rope_theta", "rope_type", "type", "mrope_section", "mrope_interleaved")
            and value is not None
        }
        if kind in ("yarn", "llama3"):
            kept.setdefault("original_max_position_embeddings", self._setting("max_position_embeddings", int))
        return Rope(float(theta), head_dim, {"type": kind, **kept})

    def _setting(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of config.json; ModelError if it is missing without a default or of another type."""
        value = self._text_config.get(name)
        if value is None:
            value = default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise ModelError(f"{self.path}/config.json: {name} must be {kind.__name__}, found {value!r}")
        return value

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {self.path / name}: {error}") from error

    def _json(self, name: str, optional: bool = False) -> dict[str, Any]:
        """A JSON object of the folder; an empty one if it is optional and missing."""
        if optional and not (self.path / name).exists():
            return {}
        try:
            value = json.loads(self._text(name))
        except ValueError as error:
            raise ModelError(f"{self.path / name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{self.path / name} must be a JSON object, found {type(value).__name__}")
        return value


def canonical_name(full_name: str) -> str | None:
    """The canonical name of a tensor or None: model.X, of multimodal folders model.language_model.X, is X.

    Older multimodal folders have language_model.model.X.
    """
    if full_name == "lm_head.weight":
        return "head"
    rest = full_name.replace("language_model.", "").removeprefix("model.")
    if not (rest.startswith("layers.") and rest.count(".") >= 2):
        return _NAMES.get(rest)
    _, layer, rest = rest.split(".", 2)
    if match := _EXPERT_TENSOR.fullmatch(rest):
        return f"layers.{layer}.experts.{match[1]}.{_LAYER_NAMES['mlp.' + match[2]]}"
    return f"layers.{layer}.{_LAYER_NAMES[rest]}" if rest in _LAYER_NAMES else None


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file: dtype, shape and absolute `offsets` by name."""
    try:
        with safe_open(str(path), framework="np"):
            pass  # the official reader checks the header and the length of the file
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or truncated: {error}; download it again") from error
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    tensors: dict[str, dict[str, Any]] = header
    return tensors


def view_tensor(data: Bytes, entry: dict[str, Any], where: str) -> StoredTensor:
    """A tensor of a mapped safetensors file, given its entry of `read_header`; ModelError for an unknown type."""
    if entry["dtype"] not in _DTYPES:
        raise ModelError(f"{where} is {entry['dtype']}; supported: {', '.join(_DTYPES)}")
    first, end = entry["offsets"]
    shape = tuple(entry["shape"])
    raw = data[first:end].view(_DTYPES[entry["dtype"]]).reshape(shape if len(shape) > 1 else (1, -1))
    return StoredTensor(entry["dtype"], shape, raw)
