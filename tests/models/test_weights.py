"""Weights are converted once, byte for byte the same everywhere, and a damaged conversion is made again."""

import json
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from kestrel.errors import ModelError
from kestrel.models import weights as weights_module
from kestrel.models.adapter import AdaptedCheckpoint
from kestrel.models.checkpoint import Bytes, Checkpoint, Floats, open_checkpoint
from kestrel.models.geometry import Experts
from kestrel.models.quantisation import dequantise, quantise
from kestrel.models.random import RandomCheckpoint
from kestrel.models.weights import Linear, Weights, load_weights
from tests.models.gguf_writing import write_gguf
from tests.models.lora import write_adapter
from tests.models.tiny import GEOMETRY, TINY, TINY_NAMES, random_checkpoint

RECIPES = ["int8", "int4", "float32"]


def quiet(line: str) -> None:
    """No log."""


def restored(linear: Linear) -> Floats:
    """The float32 [out, in] a Linear stands for."""
    if linear.scales is None:
        return linear.values.T
    return dequantise(linear.values, linear.scales, linear.bits, linear.in_features)


def arrays_of(weights: Weights) -> list[npt.NDArray[Any]]:
    """Every array of the converted file."""
    linears = [weights.head]
    vectors = [weights.norm]
    for layer in weights.layers:
        linears += [layer.qkv, layer.o, *([] if layer.router is None else [layer.router])]
        linears += [linear for mlp in layer.mlps for linear in (mlp.gate_up, mlp.down)]
        vectors += [layer.input_norm, layer.post_norm]
        vectors += [vector for vector in (layer.qkv_bias, layer.q_norm, layer.k_norm) if vector is not None]
    arrays: list[npt.NDArray[Any]] = [*vectors]
    for linear in linears:
        arrays += [linear.values] if linear.scales is None else [linear.values, linear.scales]
    return arrays


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_matrix_and_vector_arrives_at_its_place(recipe: str, name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(TINY / name)
    weights = load_weights(checkpoint, recipe, tmp_path, log=quiet)

    def expected(*names: str, bits: int = weights.layers[0].qkv.bits) -> Floats:
        matrix = np.concatenate([checkpoint.tensor(part) for part in names])
        return matrix if bits == 32 else dequantise(*quantise(matrix, bits), bits, matrix.shape[1])

    for index, layer in enumerate(weights.layers):
        at = f"layers.{index}."
        assert np.array_equal(restored(layer.qkv), expected(at + "q", at + "k", at + "v"))
        assert np.array_equal(restored(layer.o), expected(at + "o"))
        if layer.router is not None:
            assert np.array_equal(restored(layer.router), checkpoint.tensor(at + "router"))
        for prefix, mlp in zip(weights.geometry.mlp_names, layer.mlps, strict=True):
            assert np.array_equal(restored(mlp.gate_up), expected(at + prefix + "gate", at + prefix + "up"))
            assert np.array_equal(restored(mlp.down), expected(at + prefix + "down"))
        assert np.array_equal(layer.input_norm, checkpoint.tensor(at + "input_norm"))
        assert np.array_equal(layer.post_norm, checkpoint.tensor(at + "post_norm"))
        assert (layer.qkv_bias is not None) == (name == "qwen2")
        assert (layer.q_norm is not None) == (layer.k_norm is not None) == (name[:5] == "qwen3")
        if layer.qkv_bias is not None:
            bias = np.concatenate([checkpoint.tensor(at + part) for part in ("q_bias", "k_bias", "v_bias")])
            assert np.array_equal(layer.qkv_bias, bias)
        if layer.k_norm is not None:
            assert np.array_equal(layer.k_norm, checkpoint.tensor(at + "k_norm"))
    assert np.array_equal(weights.norm, checkpoint.tensor("norm"))
    assert np.array_equal(
        restored(weights.head), expected("embed" if name != "llama" else "head", bits=weights.head.bits)
    )
    assert np.array_equal(weights.embed([3, 4]), checkpoint.tensor("embed")[3:5])


@pytest.mark.parametrize("recipe", RECIPES)
def test_arrays_are_aligned_read_only_views_of_one_file(recipe: str, tmp_path: Path) -> None:
    weights = load_weights(open_checkpoint(TINY / "qwen2"), recipe, tmp_path, log=quiet)
    for array in arrays_of(weights):
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous and not array.flags.writeable and not array.flags.owndata
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_the_converted_file_is_plain_safetensors(tmp_path: Path) -> None:
    checkpoint = random_checkpoint()
    weights = load_weights(checkpoint, "int8", tmp_path, log=quiet)
    tensors = load_file(tmp_path / f"{checkpoint.digest}-int8.safetensors")
    assert np.array_equal(tensors["layers.1.gate_up"], weights.layers[1].mlps[0].gate_up.values)
    assert np.array_equal(tensors["head.scales"], weights.head.scales)


@pytest.mark.parametrize(
    "kind, recipe", [(GGMLQuantizationType.Q8_0, "int8"), (GGMLQuantizationType.Q4_0, "int4")]
)
def test_gguf_blocks_are_taken_over_without_loss(
    kind: GGMLQuantizationType, recipe: str, tmp_path: Path
) -> None:
    source = random_checkpoint(architecture="llama", qk_norm=False)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", source, kind))
    layer = load_weights(checkpoint, recipe, tmp_path, log=quiet).layers[1]
    qkv = np.concatenate([checkpoint.tensor(f"layers.1.{part}") for part in "qkv"])
    assert np.array_equal(restored(layer.qkv), qkv)
    assert np.array_equal(restored(layer.mlps[0].down), checkpoint.tensor("layers.1.down"))


def test_the_digest_is_the_same_on_every_board() -> None:
    """So that boards agree on names: these were found on x86-64 and hold until the conversion is another one."""
    assert DIGESTS == {recipe: digest_of(random_checkpoint(3), recipe) for recipe in RECIPES}


DIGESTS = {
    "int8": "45530d74cdf9b2c65029db07cee2a2b6",
    "int4": "c69cdda31d254e7a94fe41b55bd5405a",
    "float32": "64c498fc7744a3c846b2038dea4156fe",
}


def digest_of(checkpoint: Checkpoint, recipe: str) -> str:
    """The digest of weights converted into a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        return load_weights(checkpoint, recipe, Path(folder), log=quiet).digest


def test_the_digest_covers_embeddings_norms_and_matrices(tmp_path: Path) -> None:
    source = random_checkpoint(tied_head=False)
    digests = set()
    for tensor in ("none", "embed", "norm", "layers.0.q_norm", "layers.1.up", "head"):
        digests.add(digest_of(Changed(source, tensor), "int8"))
    assert len(digests) == 6


def test_the_digest_does_not_depend_on_the_file_around_the_tensors(tmp_path: Path) -> None:
    source = random_checkpoint()
    plain = open_checkpoint(write_gguf(tmp_path / "a.gguf", source))
    named = open_checkpoint(write_gguf(tmp_path / "b.gguf", source, metadata={"general.name": "another"}))
    assert plain.digest != named.digest
    assert digest_of(plain, "int8") == digest_of(named, "int8")


def test_a_second_start_converts_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    first = load_weights(random_checkpoint(), "int8", tmp_path, log=lines.append)
    assert len(lines) == 1 and "converting random to int8" in lines[0]
    before = os.stat(tmp_path / f"{random_checkpoint().digest}-int8.safetensors")
    again = load_weights(Unreadable(GEOMETRY, 0), "int8", tmp_path, log=lines.append)
    assert len(lines) == 1
    assert again.digest == first.digest
    after = os.stat(tmp_path / f"{random_checkpoint().digest}-int8.safetensors")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_another_checkpoint_or_recipe_gets_a_file_of_its_own(tmp_path: Path) -> None:
    digests = {
        load_weights(random_checkpoint(seed), recipe, tmp_path, log=quiet).digest
        for seed in (0, 1)
        for recipe in ("int8", "int4")
    }
    assert len(digests) == len(list(tmp_path.glob("*.safetensors"))) == 4


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda data: data[:-100], "bytes, not"),
        (lambda data: data[:50], "bytes, not"),
        (lambda data: b"", "bytes, not"),
        (lambda data: data + b"x", "bytes, not"),
        (lambda data: b"\xff" * 8 + data[8:], "its header is damaged or of another version"),
        (lambda data: data.replace(b'"conversion\\":3', b'"conversion\\":2'), "of another version"),
        (lambda data: data[:-500] + b"~" + data[-499:], "do not match their digests"),
    ],
)
def test_a_damaged_file_is_made_again_and_said_so(damage: Any, complaint: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint()
    digest = load_weights(checkpoint, "int8", tmp_path, log=quiet).digest
    path = tmp_path / f"{checkpoint.digest}-int8.safetensors"
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    lines: list[str] = []
    assert load_weights(checkpoint, "int8", tmp_path, log=lines.append).digest == digest
    assert len(lines) == 1 and "converting again" in lines[0] and complaint in lines[0]
    assert path.read_bytes() == whole


def test_damaged_digests_json_only_costs_time(tmp_path: Path) -> None:
    digest = load_weights(random_checkpoint(), "int8", tmp_path, log=quiet).digest
    for garbage in ("{", "[]", '{"x": 1}'):
        (tmp_path / "digests.json").write_text(garbage)
        lines: list[str] = []
        assert load_weights(random_checkpoint(), "int8", tmp_path, log=lines.append).digest == digest
        assert not lines


def test_progress_ends_at_all_numbers(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(random_checkpoint(), "int4", tmp_path, lambda *step: seen.append(step), quiet)
    matrices_and_vectors = GEOMETRY.num_parameters  # the tied head stands for the embedding
    assert seen[-1] == (matrices_and_vectors, matrices_and_vectors)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_conversion_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="random: layers.1.up: weights hold NaN or infinities"):
        load_weights(Changed(random_checkpoint(), "layers.1.up", np.nan), "int8", tmp_path, log=quiet)
    with pytest.raises(ModelError, match="random: layers.1.up holds NaN or infinities"):
        load_weights(Changed(random_checkpoint(), "layers.1.up", np.inf), "float32", tmp_path, log=quiet)
    assert not list(tmp_path.iterdir())


def test_temp_files_of_a_killed_conversion_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "dead-int8.safetensors.tmp").write_bytes(b"half")
    load_weights(random_checkpoint(), "int8", tmp_path, log=quiet)
    assert not list(tmp_path.glob("*.tmp"))


def test_an_unknown_recipe_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'int2' are not supported; expected one of int8, int4, float32"):
        load_weights(random_checkpoint(), "int2", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ModelError, match=r"cannot convert random to int8: [\d,]+ bytes are needed in .*/file/x"
    ):
        load_weights(random_checkpoint(), "int8", tmp_path / "file" / "x", log=quiet)


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_module.os, "posix_fallocate", no_space)
    with pytest.raises(ModelError, match="bytes are needed .*No space left on device"):
        load_weights(random_checkpoint(), "int8", tmp_path, log=quiet)
    assert not list(tmp_path.iterdir())


def convert_in_process(folder: str, barrier: Any, results: Any) -> None:
    """One of several processes that start at once."""
    lines: list[str] = []
    barrier.wait()
    weights = load_weights(random_checkpoint(hidden_size=256), "int4", Path(folder), log=lines.append)
    results.put((weights.digest, len(lines)))


def test_of_several_processes_one_converts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=convert_in_process, args=(str(tmp_path), barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len({digest for digest, _ in found}) == 1
    assert sorted(lines for _, lines in found) == [0, 0, 1]


def test_smollm2_is_converted_to_int8(smollm2: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    weights = load_weights(checkpoint, "int8", tmp_path, log=quiet)
    assert np.array_equal(
        restored(weights.head)[:500], checkpoint.rows("embed", 0, 500)
    )  # it is Q8_0 in the file
    down = checkpoint.tensor("layers.29.down")
    assert np.linalg.norm(restored(weights.layers[29].mlps[0].down) - down) < 0.01 * np.linalg.norm(down)
    header = json.loads(
        (tmp_path / f"{checkpoint.digest}-int8.safetensors").read_bytes()[8:200000].split(b"   ")[0]
    )
    assert json.loads(header["__metadata__"]["kestrel"])["checkpoint"] == checkpoint.digest
    shutil.rmtree(tmp_path)


class Unreadable(RandomCheckpoint):
    """A checkpoint whose tensors must not be read."""

    def rows(self, name: str, first: int, end: int) -> Floats:
        raise AssertionError("the converted file should have been enough")


class Changed(RandomCheckpoint):
    """A checkpoint with one number of one tensor changed."""

    def __init__(self, source: RandomCheckpoint, name: str, number: float = 9.0) -> None:
        super().__init__(source.geometry, 0)
        self._changed, self._number = name, np.float32(number)

    @property
    def digest(self) -> str:
        return super().digest[:-1] + "x"

    @property
    def embed_digest(self) -> str:
        digest = super().embed_digest
        return digest[:-1] + "y" if self._changed == "embed" else digest

    def tensor(self, name: str) -> Floats:
        tensor = super().tensor(name)
        if name == self._changed and tensor.ndim == 1:
            tensor[0] = self._number
        return tensor

    def rows(self, name: str, first: int, end: int) -> Floats:
        rows = super().rows(name, first, end)
        if name == self._changed and first == 0:
            rows[0, 0] = self._number
        return rows

    def blocks(self, name: str, bits: int, first: int, end: int) -> tuple[Bytes, Floats] | None:
        return None


class Watched:
    """A checkpoint that notes the largest piece that is asked of it."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.most_numbers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def rows(self, name: str, first: int, end: int) -> Floats:
        rows = self.source.rows(name, first, end)
        self.most_numbers = max(self.most_numbers, rows.size)
        return rows

    def tensor(self, name: str) -> Floats:
        tensor = self.source.tensor(name)
        self.most_numbers = max(self.most_numbers, tensor.size)
        return tensor


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_asks_for_a_few_rows_at_a_time(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_NUMBERS", 1000)
    mixture = random_checkpoint(architecture="qwen3moe", experts=Experts(5, 2, True))
    for source in (random_checkpoint(), mixture):
        adapted = AdaptedCheckpoint(source, write_adapter(tmp_path / source.geometry.architecture, source))
        watched = Watched(adapted)
        load_weights(watched, recipe, tmp_path, log=quiet)  # type: ignore[arg-type]
        assert 0 < watched.most_numbers <= 1000


def resident_kilobytes(folder: Path) -> int:
    """What this process has in memory of the mapped files of a folder."""
    nbytes, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:  # a new mapping
            is_inside = str(folder) in line
        elif is_inside and line.startswith("Rss:"):
            nbytes += int(line.split()[1])
    return nbytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_left_memory_take_none_and_come_back_as_they_were(recipe: str, tmp_path: Path) -> None:
    weights = load_weights(open_checkpoint(TINY / "qwen2"), recipe, tmp_path, log=quiet)
    before = [array.copy() for array in arrays_of(weights)]
    assert resident_kilobytes(tmp_path) > 0
    weights.leave_memory()
    assert resident_kilobytes(tmp_path) == 0
    assert all((now == then).all() for now, then in zip(arrays_of(weights), before, strict=True))
