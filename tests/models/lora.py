"""Write LoRA adapters as PEFT saves them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kestrel.models.checkpoint import Checkpoint

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def module_of(name: str) -> str:
    """The module that holds a matrix: layers.1.experts.3.up is model.layers.1.mlp.experts.3.up_proj."""
    _, layer, *experts, part = name.split(".")
    module = MODULES[part]
    if experts:
        module = module.replace("mlp.", f"mlp.experts.{experts[1]}.")
    return f"model.layers.{layer}.{module}"


def write_adapter(
    folder: Path,
    source: Checkpoint,
    targets: Iterable[str] = MODULES,
    ranks: dict[str, int] | None = None,
    extra: dict[str, Any] | None = None,
    dtype: Any = np.float32,
    **config: Any,
) -> Path:
    """A folder with random updates of rank 4 (or `ranks`, by target) for these targets in every layer."""
    folder.mkdir()
    random = np.random.default_rng(7)
    tensors: dict[str, Any] = dict(extra or {})
    for name, shape in source.geometry.tensor_shapes().items():
        part = name.rpartition(".")[2]
        if part in targets and len(shape) == 2:
            rank = (ranks or {}).get(part, 4)
            prefix = f"base_model.model.{module_of(name)}"
            tensors[f"{prefix}.lora_A.weight"] = (random.standard_normal((rank, shape[1])) / 8).astype(dtype)
            tensors[f"{prefix}.lora_B.weight"] = (random.standard_normal((shape[0], rank)) / 8).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": [MODULES[part].rpartition(".")[2] for part in targets],
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder
