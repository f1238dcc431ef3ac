"""Promise: imports point one way, and nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kestrel"

# A module may import from rooms of lower rank and from its own room. Rooms of equal rank do not know each other.
RANKS = {
    "errors": 0,
    "log": 0,
    "config": 1,
    "identity": 2,
    "residency": 2,
    "models": 3,
    "store": 3,
    "prefixes": 4,
    "seed": 4,
    "configured": 4,
    "engine": 5,
    "sharing": 5,
    "cache": 6,
    "generation": 7,
    "runtime": 8,
    "preparation": 9,
    "server": 9,
    "bench": 9,
    "exactness": 9,
    "doctor": 10,
    "commands": 11,
    "cli": 12,
    "__main__": 13,
}
FREE = {"__init__"}  # kestrel/__init__.py holds the version; it imports nothing
FORBIDDEN = {"store": {"dvc", "onnx", "onnxruntime", "numba", "tokenizers", "hydra", "omegaconf"}}
OMEGACONF_ROOM = "config"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """The room of a dotted name below kestrel: `kestrel.store.files` is in `store`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def dotted(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imported(file: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of a file, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{file}:{node.lineno}: relative import; imports name their module in full"
            )
            module = node.module or ""
            # `from kestrel import config` names a module, `from kestrel import __version__` does not.
            names = [f"kestrel.{alias.name}" for alias in node.names] if module == "kestrel" else [module]
            found += [(node.lineno, name) for name in names]
    return found


def test_every_room_has_a_rank() -> None:
    assert {room(dotted(file)) for file in modules()} - FREE <= set(RANKS)


@pytest.mark.parametrize("file", modules(), ids=dotted)
def test_imports_point_one_way(file: Path) -> None:
    here = room(dotted(file))
    for line, name in imported(file):
        if not name.startswith("kestrel.") or name == "kestrel.__version__":
            continue
        there = room(name)
        assert here != "__init__", f"{file}:{line}: kestrel/__init__.py imports {name}"
        assert there == here or RANKS[there] < RANKS[here], f"{file}:{line}: {here} imports {name}"


@pytest.mark.parametrize("file", modules(), ids=dotted)
def test_rooms_keep_away_from_what_they_must_not_know(file: Path) -> None:
    here = room(dotted(file))
    forbidden = FORBIDDEN.get(here, set())
    for line, name in imported(file):
        top = name.split(".")[0]
        assert top not in ("pipelines", "tests"), f"{file}:{line}: the package imports {name}"
        assert top not in forbidden, f"{file}:{line}: {here} imports {name}"
        if top in ("hydra", "omegaconf"):
            assert here == OMEGACONF_ROOM, f"{file}:{line}: only kestrel/config.py knows {top}"


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after `statement` in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_the_command_line_starts_light() -> None:
    heavy = {
        "numpy",
        "numba",
        "onnxruntime",
        "onnx",
        "hydra",
        "omegaconf",
        "dvc",
        "fastapi",
        "rich",
        "matplotlib",
    }
    assert not loaded_by("import kestrel.cli") & heavy


@pytest.mark.parametrize("module", ["kestrel.runtime", "kestrel.server.app", "kestrel.store.store"])
def test_serving_loads_neither_dvc_nor_plots(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"dvc", "matplotlib", "hydra", "rich"}


def test_the_compiler_is_not_loaded_before_weights_can_be_packed_beside_it() -> None:
    assert not loaded_by("import kestrel.runtime") & {"numba", "llvmlite", "fastapi"}
