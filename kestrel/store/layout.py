"""The shape of a page: which tensors its artifact holds, in which order, and how many bytes they take."""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

KvDtype = Literal["float32", "int8"]

SAFETENSORS_DTYPES: dict[str, str] = {"float32": "F32", "int8": "I8"}
ITEM_NBYTES: dict[str, int] = {"F32": 4, "I8": 1, "I32": 4}


class TensorSpec(NamedTuple):
    """One tensor of an artifact, without its bytes; `dtype` is the safetensors name (F32, I8, I32)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def tensor_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A tensor's spec with its size in bytes worked out (C order, no padding)."""
    nbytes = ITEM_NBYTES[dtype]
    for length in shape:
        nbytes *= length
    return TensorSpec(name, dtype, shape, nbytes)


@dataclass(frozen=True)
class PageLayout:
    """How the K and V of any page of one model are laid out.

    Per layer, back to back: K as [kv_heads, head_dim, n] (transposed, as the attention kernel reads it), for
    int8 its scales float32 [kv_heads, n], V as [kv_heads, n, head_dim], for int8 its scales float32
    [kv_heads, n]. n is the number of tokens of the page at hand, so a layout holds no n of its own.
    Raises ValueError for a shape no page can have.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: KvDtype = "float32"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} of a page layout must be at least 1, found {getattr(self, field)}")
        if self.kv_dtype not in get_args(KvDtype):
            raise ValueError(f"kv_dtype must be one of {get_args(KvDtype)}, found {self.kv_dtype!r}")
        if self.kv_dtype == "int8" and self.num_kv_heads * self.head_dim % 4:
            # The float32 scales follow the int8 rows directly; so they stay on 4-byte boundaries for any n.
            raise ValueError(
                f"num_kv_heads * head_dim must be a multiple of 4 for int8, "
                f"found {self.num_kv_heads} * {self.head_dim}"
            )

    def layer_tensors(self, layer: int, num_tokens: int) -> list[TensorSpec]:
        """Tensors of one layer in file order: k, (k_scale,) v, (v_scale)."""
        heads, dim, n = self.num_kv_heads, self.head_dim, num_tokens
        dtype = SAFETENSORS_DTYPES[self.kv_dtype]
        k = tensor_spec(f"layers.{layer}.k", dtype, (heads, dim, n))
        v = tensor_spec(f"layers.{layer}.v", dtype, (heads, n, dim))
        if self.kv_dtype == "float32":
            return [k, v]
        k_scale = tensor_spec(f"layers.{layer}.k_scale", "F32", (heads, n))
        v_scale = tensor_spec(f"layers.{layer}.v_scale", "F32", (heads, n))
        return [k, k_scale, v, v_scale]

    def tensors(self, num_tokens: int) -> list[TensorSpec]:
        """The K and V tensors of a page of `num_tokens` in file order, layer 0 first (without `tokens`)."""
        return [spec for layer in range(self.num_layers) for spec in self.layer_tensors(layer, num_tokens)]

    @functools.cache  # noqa: B019
    def layer_nbytes(self, num_tokens: int) -> int:
        """Bytes of one layer of a page: one contiguous range of its artifact, the same for every layer."""
        return sum(spec.nbytes for spec in self.layer_tensors(0, num_tokens))

    def page_nbytes(self, num_tokens: int) -> int:
        """Bytes of K and V of a page, all layers; an artifact is this plus its header and token ids."""
        return self.num_layers * self.layer_nbytes(num_tokens)
