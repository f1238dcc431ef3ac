"""Checkpoint: a model as its author published it, whatever the file format."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kestrel.errors import ModelError
from kestrel.models.chat import ChatTemplate
from kestrel.models.geometry import Geometry
from kestrel.models.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Checkpoint(Protocol):
    """Read-only access to one checkpoint; every tensor of `geometry.tensor_shapes()` is known to be there.

    Tensor names are those of `Geometry.tensor_shapes`. Matrices are [out, in]; the rows of q and k (and their
    biases) are in rotate-half order whatever the file uses. Implementations are safe to read from several
    threads and hold no copy of the weights: they read the memory-mapped file.
    """

    @property
    def geometry(self) -> Geometry:
        """Shapes and constants."""
        ...

    @property
    def name(self) -> str:
        """A short readable name: file or folder name without extension, or the name it was declared under."""
        ...

    @property
    def digest(self) -> str:
        """xxh3_128 (hex) of everything the tensors are made from; names the converted weights."""
        ...

    @property
    def embed_digest(self) -> str:
        """xxh3_128 (hex) of the embedding matrix as stored: its bytes and their type, nothing else of the file."""
        ...

    def tensor(self, name: str) -> Floats:
        """A whole tensor, dequantised; KeyError if there is no such tensor."""
        ...

    def rows(self, name: str, first: int, end: int) -> Floats:
        """Rows [first, end) of a matrix, dequantised: float32 [end - first, in]."""
        ...

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        """Rows [first, end) as `weights.Linear` keeps them, when the file's own quantisation can be so without loss.

        (values uint8 [rows, blocks, block * bits // 8], scales float32 [rows, blocks]); None otherwise.
        """
        ...

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Rows of the embedding matrix at the checkpoint's own precision: float32 [len(ids), hidden]."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer (a fraction of a second); ModelError if there is none."""
        ...

    def chat_template(self) -> ChatTemplate | None:
        """The chat template, or None when the checkpoint has none."""
        ...


def open_checkpoint(path: Path, memo_root: Path | None = None) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder; ModelError if it is missing, damaged or not supported.

    `memo_root` is the folder whose `digests.json` remembers digests of unchanged files between runs.
    """
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            hint = f"set model.path={files[0]} to open that file" if files else "check model.path"
            raise ModelError(f"{path} has no config.json, so it is no Hugging Face folder; {hint}")
        from kestrel.models.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path, memo_root)
    if not path.is_file():
        raise ModelError(
            f"no checkpoint at {path}: expected a .gguf file or a Hugging Face folder; check model.path"
        )
    from kestrel.models.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path, memo_root)


def check_shapes(geometry: Geometry, found: dict[str, tuple[int, ...]], where: Path) -> None:
    """ModelError unless `found` (canonical name -> shape) has the tensors of the geometry and no others."""
    expected = geometry.tensor_shapes()
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(
                f"{where}: tensor {name} is missing; the file is incomplete or of another architecture"
            )
        if found[name] != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        if name not in expected:
            raise ModelError(f"{where}: tensor {name} has no place in {geometry.architecture}")
