"""The compiled kernels: kept as a library that needs no compiler, made again when it is damaged."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel.engine import kernels
from kestrel.engine.elf import Code, address_of, in_memory, jump_to, link, shared_library

IMPORTED = """
import sys
from kestrel.engine.kernels import load_kernels
load_kernels("float32")
print(*sorted(name for name in ("numba", "llvmlite") if name in sys.modules))
"""


def imported_by_loading(cache: Path) -> list[str]:
    """Which compilers a new process has imported once its kernels are loaded."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={"XDG_CACHE_HOME": str(cache), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_process_that_finds_its_kernels_imports_no_compiler(tmp_path: Path) -> None:
    assert imported_by_loading(tmp_path) == ["llvmlite", "numba"]
    assert imported_by_loading(tmp_path) == []
    (kept,) = tmp_path.rglob("*.so")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert imported_by_loading(tmp_path) == ["llvmlite", "numba"]
    assert kept.read_bytes() == whole  # and the same code again


def test_kernels_are_used_though_they_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kestrel").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not kernels.are_compiled("float32")
    kernels._keep(kernels._path("float32"), b"code")
    assert not kernels.are_compiled("float32")


def test_a_library_calls_what_it_needs_of_others_and_jumps_where_it_is_told() -> None:
    code = jump_to(address_of(ctypes.CDLL(None).labs))
    library = ctypes.CDLL(in_memory(shared_library(Code(code, {"magnitude": 0}))))
    assert library.magnitude(ctypes.c_long(-5)) == 5


def test_compiled_code_finds_its_constants_and_the_c_library() -> None:
    from llvmlite import binding

    from kestrel.engine.instructions import instruction_level

    source = """
    @table = internal constant [4 x i64] [i64 3, i64 1, i64 4, i64 1]

    declare i64 @labs(i64)

    define i64 @entry(i64 %i) {
      %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %i
      %value = load i64, ptr %at
      ret i64 %value
    }

    define i64 @distance(i64 %a, i64 %b) {
      %difference = sub i64 %a, %b
      %result = call i64 @labs(i64 %difference)
      ret i64 %result
    }
    """

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=instruction_level(), opt=2, reloc="pic", codemodel="small"
    )
    code = link(target.emit_object(binding.parse_assembly(source)))
    assert set(code.functions) == {"entry", "distance"} and list(code.imports) == ["labs"]
    library = ctypes.CDLL(in_memory(shared_library(code)))
    assert [library.entry(ctypes.c_long(i)) for i in range(4)] == [3, 1, 4, 1]
    assert library.distance(ctypes.c_long(2), ctypes.c_long(9)) == 7
