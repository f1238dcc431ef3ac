"""Weights as the engine uses them: converted once from a checkpoint, memory-mapped ever after.

The converted file is a plain safetensors file in a folder of its own, named after the checkpoint's digest and the
recipe. It is disposable: when it is missing, damaged or made by another version of the conversion, it is made again.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from kestrel.errors import ModelError
from kestrel.identity import canonical_json
from kestrel.log import Log, log_to_stderr
from kestrel.models.adapter import AdaptedCheckpoint
from kestrel.models.checkpoint import Checkpoint
from kestrel.models.digests import DigestMemo
from kestrel.models.geometry import Geometry
from kestrel.models.lock import folder_lock
from kestrel.models.quantisation import BLOCK_SIZE, Bytes, Floats, num_blocks, quantise
from kestrel.residency import advise

CONVERSION = 3  # raise it when the same checkpoint and recipe would give other bytes
Bits = Literal[4, 8, 32]
RECIPES: dict[str, Bits] = {"int8": 8, "int4": 4, "float32": 32}
ALIGNMENT = 64  # bytes; where arrays of the converted file start
CHUNK_NUMBERS = 1 << 18  # numbers converted at a time by one thread: stays in its cache

Progress = Callable[[int, int], None]  # (numbers converted, numbers in all)


@dataclass(frozen=True)
class Linear:
    """A weight matrix, ready to be an initializer of onnxruntime.

    bits 32: `values` float32 [in, out] as MatMul wants it, no scales. bits 8 and 4: `values` uint8
    [out, blocks, block * bits // 8], `scales` float32 [out, blocks] as com.microsoft MatMulNBits wants them without
    zero points: a block of BLOCK_SIZE numbers runs along `in` (the last one padded with zeros), number = (code -
    zero point) * scale with zero point 128 or 8, two 4-bit codes a byte, the earlier in the low nibble.
    """

    bits: Bits
    in_features: int
    out_features: int
    values: npt.NDArray[Any]
    scales: Floats | None

    @property
    def size(self) -> int:
        """Its numbers."""
        return self.in_features * self.out_features

    @property
    def nbytes(self) -> int:
        """Bytes read when every number is used once."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def last_outputs(self, count: int) -> "Linear":
        """The matrix of the last `count` outputs; of all, if there are no more."""
        count = min(count, self.out_features)
        if self.scales is None:
            return replace(self, out_features=count, values=np.ascontiguousarray(self.values[:, -count:]))
        return replace(self, out_features=count, values=self.values[-count:], scales=self.scales[-count:])


@dataclass(frozen=True)
class Mlp:
    """A SwiGLU MLP: the only one of a dense layer, or one expert."""

    gate_up: Linear  # rows of gate, then up
    down: Linear


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms and biases are float32 vectors."""

    input_norm: Floats
    qkv: Linear  # rows of q, then k, then v
    qkv_bias: Floats | None
    q_norm: Floats | None  # [head_dim]
    k_norm: Floats | None  # [head_dim]
    o: Linear
    post_norm: Floats
    router: Linear | None  # a score for each expert, always float32; None in a dense layer
    mlps: tuple[Mlp, ...]  # a single one in a dense layer


@dataclass(frozen=True)
class Weights:
    """All weights of a model. Arrays are read-only views of the memory-mapped converted file."""

    geometry: Geometry
    recipe: str
    digest: (
        str  # xxh3_128 hex of every byte the model computes with: converted arrays and the embedding matrix
    )
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Linear
    checkpoint: Checkpoint
    adapter: str | None  # digest of the LoRA adapter merged in; its effect is part of `digest`
    file: Path  # the converted one

    def as_identity(self) -> dict[str, Any]:
        """Plain JSON data for the model identity."""
        identity = {"recipe": self.recipe, "digest": self.digest}
        return identity if self.adapter is None else identity | {"adapter": self.adapter}

    def embed(self, ids: npt.ArrayLike) -> Floats:
        """Embedding rows float32 [len(ids), hidden], at the checkpoint's own precision."""
        return self.checkpoint.embed(ids)

    def leave_memory(self) -> None:
        """Take the converted file out of this process's memory; the page cache keeps it, and what is read comes back.

        For when others have copies: onnxruntime, which maps the file too, packs the matrices its own way.
        """
        for start, end in _mappings(self.file):
            advise(start, end - start, mmap.MADV_DONTNEED)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices: what one decoded token reads of a dense model."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.o, *([] if layer.router is None else [layer.router])]
            linears += [linear for mlp in layer.mlps for linear in (mlp.gate_up, mlp.down)]
        return sum(linear.nbytes for linear in linears)


def load_weights(
    checkpoint: Checkpoint,
    recipe: str,
    cache_dir: Path,
    progress: Progress | None = None,
    log: Log | None = None,
) -> Weights:
    """Open the converted weights below `cache_dir`, converting the checkpoint first if need be.

    Matrices become int8, int4 or float32 (`recipe`); norms and biases stay float32. A checkpoint that already holds
    8- or 4-bit blocks of 32 (GGUF Q8_0, Q4_0) is taken over without loss. Of several processes one converts, the
    others wait. Conversion needs little memory: it streams rows into the file. ModelError if it cannot be done.
    """
    if recipe not in RECIPES:
        raise ModelError(f"weights {recipe!r} are not supported; expected one of {', '.join(RECIPES)}")
    log = log or log_to_stderr
    layout = _Layout(checkpoint, recipe)
    path = cache_dir / f"{checkpoint.digest}-{recipe}.safetensors"
    memo = DigestMemo(cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        found = layout.open(path, memo)
        if isinstance(found, str):
            with folder_lock(cache_dir):
                found = layout.open(path, memo)  # another process may have made it meanwhile
                if isinstance(found, str):
                    if path.exists():
                        log(f"[MODEL] converting again, {path.name} is not usable: {found}")
                    else:
                        log(f"[MODEL] converting {checkpoint.name} to {recipe} -> {path}")
                    layout.convert(path, memo, progress)
                    found = layout.open(path, memo)
    except OSError as error:
        raise ModelError(
            f"cannot convert {checkpoint.name} to {recipe}: {layout.nbytes:,} bytes are needed in {cache_dir}: {error}"
        ) from error
    if isinstance(found, str):
        raise ModelError(f"{path} was just written but is not usable: {found}; check the disk")
    return layout.weights(path, *found)


@dataclass(frozen=True)
class _Array:
    """One array of the converted file and the checkpoint tensors it is made of."""

    name: str
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    offset: int  # from the start of the data
    sources: tuple[str, ...]  # stacked along the first axis ([out, in] matrices) or concatenated (vectors)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype({"F32": "<f4", "U8": "u1"}[self.dtype])

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.numpy_dtype.itemsize

    def view(self, data: Bytes) -> npt.NDArray[Any]:
        """The array, given the data part of the file."""
        return data[self.offset : self.offset + self.nbytes].view(self.numpy_dtype).reshape(self.shape)


class _Layout:
    """Where everything lies in the converted file of one checkpoint and recipe."""

    def __init__(self, checkpoint: Checkpoint, recipe: str) -> None:
        self.checkpoint = checkpoint
        self.recipe = recipe
        self.bits = RECIPES[recipe]
        self._bits: dict[str, Bits] = {}  # of each matrix
        self.arrays: dict[str, _Array] = {}
        self.nbytes = 0  # of the data
        self._shapes = checkpoint.geometry.tensor_shapes()
        geometry = checkpoint.geometry
        for layer in range(geometry.num_layers):
            prefix = f"layers.{layer}."
            self._add_vector(prefix, "input_norm")
            self._add_linear(prefix, "qkv", "q", "k", "v")
            if geometry.qkv_bias:
                self._add_vector(prefix, "qkv_bias", "q_bias", "k_bias", "v_bias")
            if geometry.qk_norm:
                self._add_vector(prefix, "q_norm")
                self._add_vector(prefix, "k_norm")
            self._add_linear(prefix, "o", "o")
            self._add_vector(prefix, "post_norm")
            if geometry.experts is not None:
                # Which experts a token meets hangs on small differences of scores, and the matrix is small.
                self._add_linear(prefix, "router", "router", bits=32)
            for mlp in geometry.mlp_names:
                self._add_linear(prefix, f"{mlp}gate_up", f"{mlp}gate", f"{mlp}up")
                self._add_linear(prefix, f"{mlp}down", f"{mlp}down")
        self._add_vector("", "norm")
        # At 4 bits the head would cost more quality than all layers together; it stays at 8.
        head_bits: Bits = 8 if self.bits == 4 else self.bits
        self._add_linear("", "head", "embed" if geometry.tied_head else "head", bits=head_bits)

    def _add_vector(self, prefix: str, name: str, *sources: str) -> None:
        sources = sources or (name,)
        size = sum(self._shapes[prefix + source][0] for source in sources)
        self._add(prefix + name, "F32", (size,), prefix, sources)

    def _add_linear(self, prefix: str, name: str, *sources: str, bits: Bits | None = None) -> None:
        bits = bits or self.bits
        self._bits[prefix + name] = bits
        out_features = sum(self._shapes[prefix + source][0] for source in sources)
        in_features = self._shapes[prefix + sources[0]][1]
        if bits == 32:
            self._add(prefix + name, "F32", (in_features, out_features), prefix, sources)
        else:
            blocks = num_blocks(in_features)
            shape = (out_features, blocks, BLOCK_SIZE * bits // 8)
            self._add(prefix + name, "U8", shape, prefix, sources)
            self._add(prefix + name + ".scales", "F32", (out_features, blocks), prefix, sources)

    def _add(
        self, name: str, dtype: str, shape: tuple[int, ...], prefix: str, sources: tuple[str, ...]
    ) -> None:
        array = _Array(name, dtype, shape, self.nbytes, tuple(prefix + source for source in sources))
        self.arrays[name] = array
        self.nbytes = -(-(self.nbytes + array.nbytes) // ALIGNMENT) * ALIGNMENT

    def header(self, digests: dict[str, str]) -> bytes:
        """The file up to its data. Gaps between arrays are covered by `pad.…` entries: the format allows none."""
        entries: dict[str, Any] = {}
        arrays = list(self.arrays.values())
        ends = [array.offset for array in arrays[1:]] + [self.nbytes]
        for array, end in zip(arrays, ends, strict=True):
            own = array.offset + array.nbytes
            entries[array.name] = {
                "dtype": array.dtype,
                "shape": list(array.shape),
                "data_offsets": [array.offset, own],
            }
            if own != end:
                entries[f"pad.{array.name}"] = {
                    "dtype": "U8",
                    "shape": [end - own],
                    "data_offsets": [own, end],
                }
        made_of = {
            "conversion": CONVERSION,
            "checkpoint": self.checkpoint.digest,
            "recipe": self.recipe,
            "digests": digests,
        }
        entries["__metadata__"] = {"kestrel": canonical_json(made_of).decode("ascii")}
        text = canonical_json(entries)
        padded = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
        return padded.to_bytes(8, "little") + text.ljust(padded)

    def open(self, path: Path, memo: DigestMemo) -> tuple[Bytes, dict[str, str]] | str:
        """Map the file: (its data, digest of each array and of the embedding matrix), or why it is not usable."""
        blank = self.header(self._blank_digests())
        try:
            with open(path, "rb") as file:
                header = file.read(len(blank))
                if os.fstat(file.fileno()).st_size != len(blank) + self.nbytes:
                    return (
                        f"it has {os.fstat(file.fileno()).st_size:,} bytes, not {len(blank) + self.nbytes:,}"
                    )
                data = np.memmap(file, np.uint8, "r", offset=len(blank), shape=(self.nbytes,)).view(
                    np.ndarray
                )
        except FileNotFoundError:
            return "it does not exist"
        try:
            digests = json.loads(json.loads(header[8:])["__metadata__"]["kestrel"])["digests"]
            if not isinstance(digests, dict) or self.header(digests) != header:
                return "its header is damaged or of another version"
        except (ValueError, KeyError, TypeError):
            return "its header is damaged or of another version"
        embed = {"embed": digests["embed"]}
        if memo.remember(path, "arrays", lambda _: _combine(self._digests(data) | embed)) != _combine(
            digests
        ):
            return "its contents do not match their digests"
        return data, digests

    def convert(self, path: Path, memo: DigestMemo, progress: Progress | None) -> None:
        """Write the file: temp file beside it, fsync, rename. The caller holds the lock of the folder."""
        for stale in path.parent.glob("*.safetensors.tmp"):
            stale.unlink()
        temp = path.with_name(path.name + ".tmp")
        blank = self.header(self._blank_digests())
        try:
            with open(temp, "xb+") as file:
                # Space is taken now: a full disk is an error here, but a crash when a mapped page finds no room.
                os.posix_fallocate(file.fileno(), 0, len(blank) + self.nbytes)
                data = np.memmap(file, np.uint8, "r+", offset=len(blank), shape=(self.nbytes,))
                self._fill(data.view(np.ndarray), progress)
                data.flush()
                digests = self._digests(data) | {"embed": self.checkpoint.embed_digest}
                file.seek(0)
                file.write(self.header(digests))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        memo.store(path, "arrays", _combine(digests))

    def _fill(self, data: Bytes, progress: Progress | None) -> None:
        """Convert chunk by chunk on all cores; the bytes do not depend on who does which."""
        chunks = list(self._chunks())
        total = sum(size for _, size in chunks)
        done = 0
        workers = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(workers) as pool:
            pending: dict[Future[None], int] = {}
            try:
                for work, size in chunks:
                    if len(pending) >= 2 * workers:
                        finished, _ = wait(pending, return_when=FIRST_COMPLETED)
                        for future in finished:
                            done += pending.pop(future)
                            future.result()
                        if progress:
                            progress(done, total)
                    pending[pool.submit(work, data)] = size
                for future in pending:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if progress:
            progress(total, total)

    def _chunks(self) -> Iterator[tuple[Callable[[Bytes], None], int]]:
        """Pieces of work in file order, with the numbers each converts."""
        for array in self.arrays.values():
            if array.name.endswith(".scales"):
                continue  # written together with its codes
            if len(array.shape) == 1:
                yield self._vector_work(array), array.shape[0]
                continue
            row = 0
            for source in array.sources:
                out_features, in_features = self._shapes[source]
                step = max(1, CHUNK_NUMBERS // in_features)
                for first in range(0, out_features, step):
                    end = min(first + step, out_features)
                    yield (
                        self._matrix_work(array, source, first, end, row + first),
                        (end - first) * in_features,
                    )
                row += out_features

    def _vector_work(self, array: _Array) -> Callable[[Bytes], None]:
        def work(data: Bytes) -> None:
            vector = np.concatenate([self.checkpoint.tensor(source) for source in array.sources])
            if not np.isfinite(vector).all():
                raise ModelError(f"{self.checkpoint.name}: {array.name} holds NaN or infinities")
            array.view(data)[:] = vector

        return work

    def _matrix_work(
        self, array: _Array, source: str, first: int, end: int, row: int
    ) -> Callable[[Bytes], None]:
        """Convert rows [first, end) of `source` to rows [row, …) of the array."""

        bits = self._bits[array.name]

        def work(data: Bytes) -> None:
            values = array.view(data)
            if bits == 32:
                matrix = self.checkpoint.rows(source, first, end)
                if not np.isfinite(matrix).all():
                    raise ModelError(f"{self.checkpoint.name}: {source} holds NaN or infinities")
                values[:, row : row + end - first] = matrix.T
                return
            blocks = self.checkpoint.blocks(source, bits, first, end)
            if blocks is None:
                try:
                    blocks = quantise(self.checkpoint.rows(source, first, end), bits)
                except ModelError as error:
                    raise ModelError(f"{self.checkpoint.name}: {source}: {error}") from error
            values[row : row + end - first] = blocks[0]
            self.arrays[array.name + ".scales"].view(data)[row : row + end - first] = blocks[1]

        return work

    def _blank_digests(self) -> dict[str, str]:
        """Digests of the right length: a header has the same length whatever they are."""
        return dict.fromkeys([*self.arrays, "embed"], "0" * 32)

    def _digests(self, data: Bytes) -> dict[str, str]:
        return {
            array.name: xxhash.xxh3_128_hexdigest(array.view(data).data) for array in self.arrays.values()
        }

    def weights(self, path: Path, data: Bytes, digests: dict[str, str]) -> Weights:
        """Views of the mapped data of the file."""
        geometry = self.checkpoint.geometry
        shapes = {name: array.shape for name, array in self.arrays.items()}
        used = {"recipe": self.recipe, "shapes": shapes, "digests": digests}

        def vector(name: str) -> Floats:
            return self.arrays[name].view(data)

        def linear(name: str) -> Linear:
            array = self.arrays[name]
            in_features = self._shapes[array.sources[0]][1]
            out_features = sum(self._shapes[source][0] for source in array.sources)
            bits = self._bits[name]
            scales = None if bits == 32 else self.arrays[name + ".scales"].view(data)
            return Linear(bits, in_features, out_features, array.view(data), scales)

        layers = tuple(
            LayerWeights(
                input_norm=vector(f"layers.{layer}.input_norm"),
                qkv=linear(f"layers.{layer}.qkv"),
                qkv_bias=vector(f"layers.{layer}.qkv_bias") if geometry.qkv_bias else None,
                q_norm=vector(f"layers.{layer}.q_norm") if geometry.qk_norm else None,
                k_norm=vector(f"layers.{layer}.k_norm") if geometry.qk_norm else None,
                o=linear(f"layers.{layer}.o"),
                post_norm=vector(f"layers.{layer}.post_norm"),
                router=linear(f"layers.{layer}.router") if geometry.experts is not None else None,
                mlps=tuple(
                    Mlp(linear(f"layers.{layer}.{mlp}gate_up"), linear(f"layers.{layer}.{mlp}down"))
                    for mlp in geometry.mlp_names
                ),
            )
            for layer in range(geometry.num_layers)
        )
        return Weights(
            geometry=geometry,
            recipe=self.recipe,
            digest=xxhash.xxh3_128_hexdigest(canonical_json(used)),
            layers=layers,
            norm=vector("norm"),
            head=linear("head"),
            checkpoint=self.checkpoint,
            adapter=self.checkpoint.adapter_digest
            if isinstance(self.checkpoint, AdaptedCheckpoint)
            else None,
            file=path,
        )


def _mappings(path: Path) -> Iterator[tuple[int, int]]:
    """Where this process has mapped the file and changed nothing: addresses (start, end). None without /proc."""
    name = os.path.realpath(path)
    start, end = 0, 0  # of a mapping of the file
    try:
        lines = Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("Anonymous:"):
            if start and line.split()[1] == "0":
                yield start, end
        elif (fields := line.split(maxsplit=5))[0][-1] != ":":  # a mapping begins
            is_it = len(fields) == 6 and fields[5] == name
            start, end = (int(address, 16) for address in fields[0].split("-")) if is_it else (0, 0)


def _combine(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(digests))
