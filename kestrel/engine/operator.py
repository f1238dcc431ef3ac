"""The operator `kestrel.Call` of onnxruntime: it runs a compiled function on the threads of the graph it stands in.

Between two products onnxruntime's threads spin for some milliseconds, so a second pool would share its cores with
them: attention on threads of its own took as long on two cores as on one. onnxruntime lends its pool to custom
operators (KernelContext_ParallelFor), and this operator lends it to any compiled function.

Custom operators come from a shared library with the function RegisterCustomOps. Ours is part of this process, so
the library is a file in memory that holds one jump to it. Graphs can be built before the operator is implemented
(`kernels.py`), which may take a compiler; none can run before.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import onnxruntime as ort

from kestrel.engine.elf import Code, address_of, in_memory, jump_to, shared_library

# Inputs: int64 [1], the address of a record, and float32 of any shape. Output: float32 [rows, width] of the record.
DOMAIN, NAME = "kestrel", "Call"

# Places in onnxruntime's OrtApi, a table of function pointers that only ever grows at its end (onnxruntime_c_api.h).
_API_VERSION = 17  # the first with KernelContext_ParallelFor
_CREATE_DOMAIN, _DOMAIN_ADD, _ADD_DOMAIN = 26, 27, 28
_TENSOR_DATA, _GET_INPUT, _GET_OUTPUT, _PARALLEL_FOR = 51, 90, 91, 274
_CUSTOM_OP_VERSION = 12  # of the table below: what came later is not used
_FLOAT, _INT64 = 1, 7  # ONNXTensorElementDataType


class _CustomOp(ctypes.Structure):
    """OrtCustomOp, as far as version 12 of it reads."""

    _fields_ = [("version", ctypes.c_uint32)] + [
        (name, ctypes.c_void_p)
        for name in (
            "create_kernel", "get_name", "get_provider", "get_input_type", "get_num_inputs", "get_output_type",
            "get_num_outputs", "compute", "destroy", "get_input_kind", "get_output_kind",
        )
    ] + [("unused", ctypes.c_void_p * 16)]  # fmt: skip


def _pointer(kind: Any, function: Any) -> int:
    """The address of a Python function as a C function; it is kept for ever."""
    callback = kind(function)
    _kept.append(callback)
    return address_of(callback)


_kept: list[Any] = []  # what C code holds addresses of


def _text(text: bytes) -> int:
    buffer = ctypes.create_string_buffer(text)
    _kept.append(buffer)
    return ctypes.addressof(buffer)


_operator = _CustomOp(_CUSTOM_OP_VERSION)  # read by onnxruntime whenever it needs something of it


def implement(compute: int) -> None:
    """Say what the operator does: the address of `compute`, see `compiled/worker_pool.py`."""
    _operator.compute = compute


@functools.cache
def _describe(api: int) -> _CustomOp:
    """The operator: the address of a record and a float32 tensor in, a float32 tensor out."""
    table = (ctypes.c_size_t * (_PARALLEL_FOR + 1)).from_address(api)

    # A kernel is the addresses of four functions of onnxruntime, and a word to spare.
    def create_kernel(op: int, api: int, info: int) -> int:
        kernel = np.array(
            [table[_GET_INPUT], table[_TENSOR_DATA], table[_GET_OUTPUT], table[_PARALLEL_FOR], 0], np.uint64
        )
        _kept.append(kernel)
        return int(kernel.ctypes.data)

    word, pointer = ctypes.c_size_t, ctypes.c_void_p
    name, provider = _text(NAME.encode()), _text(b"CPUExecutionProvider")

    def constant(value: int, *args: Any) -> int:
        return _pointer(ctypes.CFUNCTYPE(word, *args), lambda *_: value)

    op = _operator
    op.create_kernel = _pointer(ctypes.CFUNCTYPE(word, pointer, pointer, pointer), create_kernel)
    op.get_name = constant(name, pointer)
    op.get_provider = constant(provider, pointer)
    op.get_input_type = _pointer(
        ctypes.CFUNCTYPE(word, pointer, word), lambda op, index: _FLOAT if index else _INT64
    )
    op.get_num_inputs = constant(2, pointer)
    op.get_output_type = constant(_FLOAT, pointer, word)
    op.get_num_outputs = constant(1, pointer)
    # A function without effect: what a kernel holds lives as long as the process.
    op.destroy = address_of(ctypes.CDLL(None).labs)
    op.get_input_kind = constant(0, pointer, word)
    op.get_output_kind = constant(0, pointer, word)
    return op


@functools.cache
def _library() -> str:
    """Path of the library that onnxruntime opens."""

    def register(options: int, base: int) -> int:
        get_api = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint32)(
            (ctypes.c_size_t * 2).from_address(base)[0]
        )
        api = get_api(_API_VERSION)
        table = (ctypes.c_size_t * (_PARALLEL_FOR + 1)).from_address(api)

        def call(place: int, *args: Any) -> int:
            kind = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_void_p] * len(args))
            return int(kind(table[place])(*args))

        domain = ctypes.c_void_p()
        op = _describe(api)
        return (
            call(_CREATE_DOMAIN, _text(DOMAIN.encode()), ctypes.addressof(domain))
            or call(_DOMAIN_ADD, domain, ctypes.addressof(op))
            or call(_ADD_DOMAIN, options, domain)
        )

    kind = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    return in_memory(shared_library(Code(jump_to(_pointer(kind, register)), {"RegisterCustomOps": 0})))


def register(options: ort.SessionOptions) -> None:
    """Let sessions made with these options use the operator."""
    options.register_custom_ops_library(_library())
