"""Make the tiny checkpoints beside this file and what the reference implementation says about them.

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers
    /tmp/oracle/bin/python tests/oracle/make_tiny.py

Each folder is a Hugging Face checkpoint with random weights and `reference.npz`:

    tokens int32 [300]            the prompt
    columns int64 [8]             vocabulary ids whose logits are kept at every position
    logits float32 [300, 8]
    best int32 [300]              argmax over the whole vocabulary
    positions int64 [3], full float32 [3, vocab]    whole rows of logits
    greedy int32 [24]             greedy continuation of the first 200 tokens
"""

from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

HERE = Path(__file__).parent
VOCAB = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "The falcon is a small bird of prey that hovers over open fields, waiting for the moment to dive.",
    "A page of a prefix is written once, verified on every read, and removed when nobody needs it.",
    "In 2024 there were 365 + 1 days; 3.14159 is close to pi, and 1,000,000 is a round number.",
    "Ein schöner Tag, déjà vu, 你好世界, こんにちは, привет мир. \n\n\tdef main():\n\t\treturn 'it's done'",
] * 4


def make_tokenizer(begin: str | None, added: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges; `begin` is put before every text, `added` has the last ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(added),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(added)
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token="<|im_end|>", chat_template=CHATML
    )


def make_weights(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Fill with numbers that make attention and MLP matter, rounded to the type they are stored in."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                drawn = drawn * 0.5 if name.endswith("bias") else 1 + 0.2 * drawn
            else:
                drawn *= 0.3 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn.to(dtype).float())


def make_reference(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Logits of a fixed prompt and its greedy continuation, float32."""
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = generator.integers(len(SPECIAL), VOCAB - len(VISION), 300).astype(np.int32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens[None]).long()).logits[0].float().numpy()
        greedy, margins = [], []
        ids = torch.from_numpy(tokens[None, :200]).long()
        for _ in range(24):
            last = model(ids).logits[0, -1]
            best = last.topk(2).values
            margins.append(float(best[0] - best[1]))
            greedy.append(int(last.argmax()))
            ids = torch.cat([ids, torch.tensor([[greedy[-1]]])], 1)
    print(f"  logits deviate by {logits.std():.2f}, greedy has {len(set(greedy))} different tokens,", end=" ")
    print(f"its smallest margin is {min(margins):.4f}")
    columns = np.sort(generator.choice(VOCAB, 8, replace=False))
    positions = np.array([0, 131, 299])
    return {
        "tokens": tokens,
        "columns": columns,
        "logits": logits[:, columns],
        "best": logits.argmax(-1).astype(np.int32),
        "positions": positions,
        "full": logits[positions],
        "greedy": np.array(greedy, np.int32),
    }


def make(
    name: str,
    config: PreTrainedConfig,
    seed: int,
    dtype: torch.dtype,
    begin: str | None = None,
    shards: str = "1GB",
    added: tuple[str, ...] = (),
) -> None:
    """Write one checkpoint and its reference."""
    print(name)
    folder = HERE / name
    for stale in folder.glob("*"):
        stale.unlink()
    if isinstance(config, Qwen3VLConfig):
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    make_weights(model, seed, dtype)
    reference = make_reference(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    make_tokenizer(begin, list(added)).save_pretrained(folder)
    np.savez_compressed(folder / "reference.npz", **reference)
    for file in folder.iterdir():
        file.chmod(0o644)
    print(f"  {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")


def main() -> None:
    """Make them all."""
    common = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "num_hidden_layers": 2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
    }
    make(
        "llama",
        LlamaConfig(
            **common,
            hidden_size=64,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
        seed=9,
        dtype=torch.bfloat16,
        begin="<|endoftext|>",
    )
    plain = {"rope_type": "default", "rope_theta": 1000000.0}
    make(
        "qwen2",
        Qwen2Config(
            **common,
            hidden_size=80,  # no multiple of a quantisation block
            intermediate_size=48,
            num_attention_heads=5,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rope_parameters=plain,
        ),
        seed=11,
        dtype=torch.float16,
    )
    make(
        "qwen3",
        Qwen3Config(
            **{**common, "num_hidden_layers": 3},
            hidden_size=64,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,  # not hidden_size / num_attention_heads
            tie_word_embeddings=True,
            rope_parameters=plain,
        ),
        seed=7,
        dtype=torch.bfloat16,
        shards="100KB",
    )
    make(
        "qwen3moe",
        Qwen3MoeConfig(
            **common,
            hidden_size=48,
            intermediate_size=999,  # of layers without experts: there are none
            moe_intermediate_size=32,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters=plain,
        ),
        seed=5,
        dtype=torch.bfloat16,
    )
    text = {
        **common,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_parameters": {**plain, "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [],
    }
    named = {
        f"{token.strip('<|>').replace('_pad', '')}_token_id": VOCAB - len(VISION) + place
        for place, token in enumerate(VISION)
        if token != "<|vision_pad|>"
    }
    make(
        "qwen3vl",
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **named),
        seed=5,
        dtype=torch.bfloat16,
        added=VISION,
    )


if __name__ == "__main__":
    main()
