"""Kestrel computes, cuts and words prompts as the installed transformers does, over 300 positions."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.models.adapter import AdaptedCheckpoint
from kestrel.models.checkpoint import open_checkpoint
from tests.oracle.comparison import NAMES, TINY, Sequence, reference

torch = pytest.importorskip("torch", reason="run `make oracle`")
transformers = pytest.importorskip("transformers", reason="run `make oracle`")

TEXTS = (
    "Hello world! 123",
    "  multiple   spaces\n\n\ttabs\r\n",
    "Ein schöner Tag: déjà vu, 你好世界, привет 🦅 it's DON'T 3.14159",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "truncate": False,
    },
}


def reference_logits(path: Path, tokens: npt.NDArray[Any], **where: str) -> npt.NDArray[np.float32]:
    """transformers' float32 logits at every position."""
    multimodal = path.name == "qwen3vl"
    kind = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, **where).eval()
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.from_numpy(tokens[None]).long()).logits[0].numpy()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    tokens = reference(name)["tokens"]
    expected = reference_logits(TINY / name, tokens)
    assert np.abs(Sequence(TINY / name, "float32", tmp_path).extend(tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_every_rope_scaling_gives_the_logits_of_transformers(
    rope: str, spelling: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    if spelling == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    else:
        config |= {"rope_theta": 10000.0, "rope_scaling": ROPES[rope]}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = reference("qwen3")["tokens"]
    expected = reference_logits(folder, tokens)
    assert np.abs(Sequence(folder, "float32", tmp_path).extend(tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_gives_the_logits_of_peft(use_rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="run `make oracle`")
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY / "llama", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")],
        rank_pattern={"layers.1.self_attn.q_proj": 6},
        alpha_pattern={"down_proj": 20},
        use_rslora=use_rslora,
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    tokens = reference("llama")["tokens"]
    merged = (
        model.merge_and_unload()
    )  # beside the base weights PEFT adds in another order: its own two differ as much
    with torch.inference_mode():
        expected = merged(torch.from_numpy(tokens[None]).long()).logits[0].numpy()
    adapted = AdaptedCheckpoint(open_checkpoint(TINY / "llama"), tmp_path / "adapter")
    assert np.abs(expected - reference_logits(TINY / "llama", tokens)).max() > 0.1
    # Random adapters of this size amplify rounding: PEFT's logits merged and unmerged differ by up to 9e-5 themselves.
    assert np.abs(Sequence(adapted, "float32", tmp_path).extend(tokens) - expected).max() < 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_worded_and_cut_as_transformers_does(name: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(TINY / name)
    checkpoint = open_checkpoint(TINY / name)
    ours, template = checkpoint.tokenizer(), checkpoint.chat_template()
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>there</b>"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert template is not None
    assert template.render(messages) == expected


def test_text_is_cut_by_a_gguf_file_as_transformers_does(smollm2: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = open_checkpoint(smollm2).tokenizer()
    for text in (*TEXTS, Path(__file__).read_text(encoding="utf-8")):
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_a_quantised_gguf_file_gives_the_logits_of_transformers(smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    text = Path(__file__).read_text(encoding="utf-8")
    tokens = np.array(open_checkpoint(smollm2).tokenizer().encode(text)[:300])
    expected = reference_logits(smollm2.parent, tokens, gguf_file=smollm2.name)
    logits = Sequence(smollm2, "float32", tmp_path).extend(tokens)
    assert np.abs(logits - expected).max() < 5e-3 * expected.std()
    assert np.mean(logits.argmax(-1) == expected.argmax(-1)) > 0.99
