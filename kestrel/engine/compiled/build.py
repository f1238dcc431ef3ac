# mypy: disable-error-code="no-untyped-call"
"""The kernels' shared library, made by numba: functions compiled, linked, and without need of numba where they run.

numba's functions return a status and may raise; here nothing does, so each gets a caller that leaves the status alone,
and LLVM removes what only errors would need: the interpreter, numba's runtime, texts.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding

from kestrel.engine.elf import link, shared_library
from kestrel.engine.instructions import instruction_level

_CALLER = """
declare i32 @{native}(ptr, ptr, i64, i64)

define i64 @{name}(i64 %a, i64 %b) {{
  %result = alloca i64
  store i64 0, ptr %result
  %error = alloca ptr
  %status = call i32 @{native}(ptr %result, ptr %error, i64 %a, i64 %b)
  %value = load i64, ptr %result
  ret i64 %value
}}
"""

# Not for the processor at hand but for its level: what is kept may be read by another one.
_settings: Any = numba.config
_settings.CPU_NAME, _settings.CPU_FEATURES = instruction_level(), ""


def jitted(function: Any, *signature: str) -> Any:
    """Compile a function: with a signature at once, without when others of the library call it."""
    compiler: Any = numba.njit
    return compiler(*signature, nogil=True, error_model="numpy")(function)


def build_library(functions: dict[str, Callable[[int, int], Any]]) -> bytes:
    """A shared library of C functions by these names, each from two words to a word. CannotLink.

    functions: Python functions of two int64 that return int64 or nothing, and raise nothing.
    """
    module = binding.parse_assembly("")
    for name, function in functions.items():
        (result,) = jitted(function, "(int64, int64)").overloads.values()
        module.link_in(binding.parse_assembly(result.library.get_llvm_str()))
        native = result.fndesc.llvm_func_name
        module.link_in(binding.parse_assembly(_CALLER.format(native=native, name=name)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in functions:
            value.linkage = binding.Linkage.internal
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=instruction_level(), opt=3, reloc="pic", codemodel="small"
    )
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = True
    passes = binding.create_pass_builder(target, tuning)
    passes.getModulePassManager().run(module, passes)
    return shared_library(link(target.emit_object(module)))
