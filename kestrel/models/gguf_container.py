"""The GGUF container: metadata and where each tensor lies. Nothing here knows what the tensors mean.

The `gguf` package's reader builds a numpy array for every vocabulary entry, which takes seconds at each start; this
one reads a 50,000-entry vocabulary in some 50 ms, and checks every length against the file before it believes it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kestrel.errors import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in numpy order: rows first."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


def split_tensor(tensor: GGUFTensor) -> list[GGUFTensor]:
    """The tensor cut along its first dimension."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return [
        GGUFTensor(f"{tensor.name}[{i}]", tensor.kind, tensor.shape[1:], tensor.offset + i * nbytes, nbytes)
        for i in range(tensor.shape[0])
    ]


class GGUFContainer:
    """A memory-mapped GGUF file; ModelError if it is damaged, truncated or of a kind that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._buffer = self.data.data
        self._at = 0
        if bytes(self._take(4)) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        found = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{path} is damaged: general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in found:
            self._add_tensor(name, kind, shape, start + offset)

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored, uint8 [rows, bytes of a row] (one row for a vector): a view of the map."""
        rows = math.prod(tensor.shape[:-1])
        return self.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)

    def _add_tensor(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> None:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {number}") from None
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{self.path} is damaged: rows of {name} hold {shape[-1]} numbers, not a multiple of {block}"
            )
        nbytes = math.prod(shape) // block * block_nbytes
        if offset + nbytes > self.data.size:
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + nbytes:,}, the file has"
                f" {self.data.size:,}; download it again"
            )
        if name in self.tensors:
            raise ModelError(f"{self.path} is damaged: tensor {name} appears twice")
        self.tensors[name] = GGUFTensor(name, kind, shape, offset, nbytes)

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._buffer):
            raise ModelError(
                f"{self.path} is truncated or damaged: its header goes past the end of the file"
                f" ({len(self._buffer):,} bytes); download it again"
            )
        piece = self._buffer[self._at : end]
        self._at = end
        return piece

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return str(self._take(self._scalar("<Q")), "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """A metadata value: Python scalars and strings; arrays as lists."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            if item in _SCALARS:
                form = np.dtype(_SCALARS[item].replace("B", "u1").replace("b", "i1"))
                return np.frombuffer(self._take(count * form.itemsize), form).tolist()
            if item != _STRING:
                raise ModelError(f"{self.path} is damaged: an array of metadata type {item}")
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: unknown metadata type {kind}")
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self.path} is damaged: tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        if 0 in shape:
            raise ModelError(f"{self.path} is damaged: tensor {name} is empty")
        return name, self._scalar("<I"), shape[::-1], self._scalar("<Q")
