"""LoRA adapters (PEFT folders), merged into a checkpoint's matrices as they are read.

A target's matrix becomes W + scaling * B @ A in float32 before anything is quantised: the engine runs the merged
model at full speed and never knows of the adapter. Products are summed in a fixed order with elementwise operations,
so the same adapter gives the same bits on every processor.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kestrel.errors import ModelError
from kestrel.identity import canonical_json
from kestrel.models.chat import ChatTemplate
from kestrel.models.checkpoint import Bytes, Checkpoint, Floats
from kestrel.models.geometry import Geometry
from kestrel.models.huggingface import StoredTensor, canonical_name, read_header, view_tensor
from kestrel.models.tokenizer import Tokenizer

_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Settings of training that leave no trace in what the tensors mean. Any other setting that is on is refused by name.
_WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
)
_READ = (
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
)
# Other ways to begin (pissa, olora, …) change the weights under the adapter too.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


class _Update:
    """scaling * B @ A, the change of one matrix."""

    def __init__(self, a: StoredTensor, b: StoredTensor, scaling: float) -> None:
        self._a, self._b = a, b
        self._scaling = np.float32(scaling)

    def rows(self, first: int, end: int) -> Floats:
        """Rows [first, end) of the change, float32 [end - first, in]."""
        a, b = self._a.floats(slice(None)), self._b.floats(slice(first, end))
        total: Floats = b[:, :1] * a[0]
        product = np.empty_like(total)
        for rank in range(1, len(a)):
            np.multiply(b[:, rank : rank + 1], a[rank], out=product)
            total += product
        total *= self._scaling
        return total


class AdaptedCheckpoint:
    """A `Checkpoint` with a LoRA adapter merged in; tokenizer and chat template are those of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        """ModelError if the folder is no LoRA adapter for this checkpoint, naming what does not fit."""
        self._checkpoint = checkpoint
        self._folder = folder
        self.geometry: Geometry = checkpoint.geometry
        self.name = f"{checkpoint.name}+{folder.resolve().name}"
        config = _read_config(folder)
        file = folder / "adapter_model.safetensors"
        if not file.is_file():
            raise ModelError(
                f"{folder} has no adapter_model.safetensors; save the adapter with PEFT's save_pretrained"
            )
        self._updates, digest = self._open_updates(file, config)
        self.adapter_digest = digest

    @property
    def digest(self) -> str:
        """xxh3_128 of the checkpoint's digest and the adapter's."""
        parts = {"checkpoint": self._checkpoint.digest, "adapter": self.adapter_digest}
        return xxhash.xxh3_128_hexdigest(canonical_json(parts))

    @property
    def embed_digest(self) -> str:
        """The checkpoint's: no adapter changes the embedding."""
        return self._checkpoint.embed_digest

    def tensor(self, name: str) -> Floats:
        """A whole tensor, merged."""
        whole = self._checkpoint.tensor(name)
        update = self._updates.get(name)
        return whole if update is None else whole + update.rows(0, len(whole))

    def rows(self, name: str, first: int, end: int) -> Floats:
        """Rows [first, end) of a matrix, merged."""
        rows = self._checkpoint.rows(name, first, end)
        update = self._updates.get(name)
        return rows if update is None else rows + update.rows(first, end)

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        """The checkpoint's own blocks of a matrix that the adapter leaves alone; None for the others."""
        return None if name in self._updates else self._checkpoint.blocks(name, bits, first, end)

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Rows of the checkpoint's embedding matrix."""
        return self._checkpoint.embed(ids)

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._checkpoint.tokenizer()

    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template."""
        return self._checkpoint.chat_template()

    def _open_updates(self, file: Path, config: dict[str, Any]) -> tuple[dict[str, _Update], str]:
        """Updates by the matrix they change, and xxh3_128 (hex) of all that they are made from."""
        data: Bytes = np.memmap(file, np.uint8, "r").view(np.ndarray)
        sides: dict[str, dict[str, StoredTensor]] = {}
        for full_name, entry in read_header(file).items():
            match = _TENSOR.fullmatch(full_name)
            name = canonical_name(f"{match['module']}.weight") if match else None
            if match is None or name is None or name.rpartition(".")[2] not in _TARGETS:
                raise ModelError(
                    f"{file}: {full_name} is not supported; supported targets: {', '.join(_TARGETS)}"
                )
            sides.setdefault(match["module"], {})[match["side"]] = view_tensor(
                data, entry, f"{file}: {full_name}"
            )
        if not sides:
            raise ModelError(f"{file} holds no tensors")
        shapes = self.geometry.tensor_shapes()
        updates: dict[str, _Update] = {}
        scalings: dict[str, float] = {}
        for module, pair in sides.items():
            name = str(canonical_name(f"{module}.weight"))
            if name not in shapes:
                raise ModelError(
                    f"{file}: {module} has no place in {self._checkpoint.name}; was it made for another model?"
                )
            rank, scaling = _rank_and_scaling(config, module)
            out_features, in_features = shapes[name]
            for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                found = pair[side].shape if side in pair else "nothing"
                if found != shape:
                    raise ModelError(f"{file}: lora_{side} of {module} must be {shape}, found {found}")
            updates[name] = _Update(pair["A"], pair["B"], scaling)
            scalings[name] = scaling
        made_of = {"tensors": xxhash.xxh3_128_hexdigest(data.data), "scalings": scalings}
        return updates, xxhash.xxh3_128_hexdigest(canonical_json(made_of))


def _read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, checked: ModelError naming each setting that cannot be honoured."""
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} has no adapter_config.json: expected a PEFT folder; check model.adapter"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ModelError(f"{file}: peft_type {kind!r} is not supported; expected 'LORA'")
    refused = {name: config[name] for name in config if name not in _WITHOUT_EFFECT + _READ and config[name]}
    if config.get("bias", "none") != "none":
        refused["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _BEGINNINGS:
        refused["init_lora_weights"] = config["init_lora_weights"]
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        raise ModelError(
            f"{file}: {named} is not supported; merge the adapter with PEFT's merge_and_unload instead"
        )
    return config


def _rank_and_scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank of a module's update and the factor before it: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
    rank = _of_pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    for name, value, kinds in (("r", rank, (int,)), ("lora_alpha", alpha, (int, float))):
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ModelError(
                f"adapter_config.json: {name} of {module} must be a positive number, found {value!r}"
            )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the module's name or its end, as PEFT decides it."""
    if not isinstance(patterns, dict | None):
        raise ModelError(f"adapter_config.json: patterns must be an object, found {patterns!r}")
    for pattern, value in (patterns or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise ModelError(f"adapter_config.json: {pattern!r} is no pattern: {error}") from error
        if matches:
            return value
    return default
