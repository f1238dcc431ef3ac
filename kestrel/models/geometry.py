"""Geometry: the numbers that say which transformer a checkpoint is, and the RoPE frequencies they imply."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import ModelError

# Decoders with RMSNorm, SwiGLU and rotate-half RoPE; qwen3moe has a mixture of experts in every layer.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
ROPE_SCALINGS = ("linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, rotate-half order: dimension i turns together with i + dim/2.

    `dim` is how many leading dimensions of a head turn (at most head_dim). `scaling` is None for plain RoPE,
    otherwise {"type": one of ROPE_SCALINGS, …} with the parameter names of Hugging Face's `rope_scaling`;
    "factors" divides each frequency by its own number ({"factors": [dim/2 floats]}), as GGUF's
    `rope_freqs.weight` does.
    """

    theta: float
    dim: int
    scaling: dict[str, Any] | None = None

    def frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Angle per position, float64 [dim/2], and the factor that cos and sin are both multiplied with.

        Formulas are those of `transformers.modeling_rope_utils`. ModelError for a scaling that is unknown or
        lacks a parameter.
        """
        # math.pow: numpy's power rounds differently where it has AVX512
        plain = np.array([math.pow(self.theta, -(i / self.dim)) for i in range(0, self.dim, 2)])
        if self.scaling is None:
            return plain, 1.0
        kind = self.scaling.get("type")
        if kind == "linear":
            return plain / _number(self.scaling, "factor"), 1.0
        if kind == "factors":
            factors = np.asarray(self.scaling.get("factors", ()), dtype=np.float64)
            if factors.shape != plain.shape or not (factors > 0).all():
                raise ModelError(
                    f"RoPE frequency factors must be {plain.size} positive numbers, found {factors.size}"
                )
            return plain / factors, 1.0
        if kind == "llama3":
            return _llama3(plain, self.scaling), 1.0
        if kind == "yarn":
            return _yarn(plain, self.scaling, self.theta)
        raise ModelError(
            f"RoPE scaling {kind!r} is not supported; supported: none, {', '.join(ROPE_SCALINGS)}"
        )


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `num_experts` MLPs in each layer, of which every token uses `num_used`.

    A router's softmax over all experts weighs them; `normalised` weights of those used are divided by their sum.
    """

    num_experts: int
    num_used: int
    normalised: bool


@dataclass(frozen=True)
class Geometry:
    """Shapes and constants of a decoder. Attention scale is head_dim ** -0.5, activation SiLU, always."""

    architecture: str  # one of ARCHITECTURES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # of the MLP, or of each expert
    vocab_size: int  # rows of the embedding matrix; a tokenizer may know fewer ids
    context_tokens: int  # the longest context the checkpoint was made for
    norm_eps: float
    rope: Rope
    qkv_bias: bool  # biases are added to q, k and v
    qk_norm: bool  # q and k are RMS-normalised per head before RoPE
    tied_head: bool  # the LM head is the embedding matrix
    experts: Experts | None = None  # None: one MLP in each layer, used by every token

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be positive, found {getattr(self, name)}")
        for name in ("vocab_size", "context_tokens", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ModelError(f"{name} must be positive, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}"
            )
        if (self.experts is not None) != (self.architecture == "qwen3moe"):
            raise ModelError(f"{self.architecture} with experts={self.experts} is not supported")
        if self.experts is not None and not 0 < self.experts.num_used <= self.experts.num_experts:
            raise ModelError(
                f"a token must use 1 to {self.experts.num_experts} experts, found {self.experts.num_used}"
            )
        if self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim:
            raise ModelError(
                f"RoPE must turn an even number of at most {self.head_dim} dimensions, found {self.rope.dim}"
            )
        if not self.rope.theta > 1:
            raise ModelError(f"RoPE needs theta > 1, found {self.rope.theta}")
        self.rope.frequencies()  # an unusable scaling is an error now, not at the first request

    def as_identity(self) -> dict[str, Any]:
        """Plain JSON data for the model identity: everything but `context_tokens`, which does not change KV."""
        identity: dict[str, Any] = {
            "architecture": self.architecture,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "ffn_size": self.ffn_size,
            "vocab_size": self.vocab_size,
            "norm_eps": self.norm_eps,
            "rope": {"theta": self.rope.theta, "dim": self.rope.dim, "scaling": self.rope.scaling},
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "tied_head": self.tied_head,
        }
        if self.experts is not None:
            identity["experts"] = asdict(self.experts)
        return identity

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 K and V of one token, all layers."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 4

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def mlp_names(self) -> tuple[str, ...]:
        """What stands before gate, up and down in the tensor names of a layer: one prefix for each MLP it has."""
        if self.experts is None:
            return ("",)
        return tuple(f"experts.{number}." for number in range(self.experts.num_experts))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint by canonical name, in canonical order; matrices are [out, in]."""
        hidden, heads, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            names: dict[str, tuple[int, ...]] = {"input_norm": (hidden,)}
            names |= {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden)}
            if self.qkv_bias:
                names |= {"q_bias": (heads,), "k_bias": (kv,), "v_bias": (kv,)}
            if self.qk_norm:
                names |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            names |= {"o": (hidden, heads), "post_norm": (hidden,)}
            if self.experts is not None:
                names |= {"router": (self.experts.num_experts, hidden)}
            for mlp in self.mlp_names:
                names |= {
                    f"{mlp}gate": (self.ffn_size, hidden),
                    f"{mlp}up": (self.ffn_size, hidden),
                    f"{mlp}down": (hidden, self.ffn_size),
                }
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in names.items()}
        shapes["norm"] = (hidden,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, hidden)
        return shapes


def _number(scaling: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive number among the parameters of a RoPE scaling."""
    value = scaling.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(
            f"RoPE scaling {scaling.get('type')!r} needs a positive number {name}, found {value!r}"
        )
    return float(value)


def _llama3(plain: npt.NDArray[np.float64], scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Long waves are slowed by `factor`, short ones kept, those between are blended."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise ModelError(
            f"RoPE scaling llama3 needs high_freq_factor > low_freq_factor, found {high} and {low}"
        )
    wavelength = 2 * np.pi / plain
    blend = (original / wavelength - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    slowed = np.where(wavelength > original / low, plain / factor, between)
    return np.where(wavelength < original / high, plain, slowed)


def _yarn(
    plain: npt.NDArray[np.float64], scaling: dict[str, Any], theta: float
) -> tuple[npt.NDArray[np.float64], float]:
    """YaRN (arXiv 2309.00071): per dimension a ramp from the original frequency to the interpolated one."""
    factor = _number(scaling, "factor")
    original = _number(scaling, "original_max_position_embeddings")
    dim = 2 * plain.size

    def turning_dimension(turns: float) -> float:
        """The (fractional) dimension whose wave makes `turns` turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = turning_dimension(_number(scaling, "beta_fast", 32.0))
    high = turning_dimension(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero, as transformers does it
    ramp = np.clip((np.arange(plain.size) - low) / (high - low), 0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return frequencies, _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        ratio = magnitude(_number(scaling, "mscale")) / magnitude(_number(scaling, "mscale_all_dim"))
        return frequencies, ratio
    return frequencies, magnitude(1.0)
