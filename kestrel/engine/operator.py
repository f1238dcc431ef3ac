"""The operator `kestrel.Call` of onnxruntime: it runs a compiled function on the threads of the graph it stands in.

Between two products onnxruntime's threads spin for some milliseconds, so a second pool would share its cores with
them: attention on threads of its own took as long on two cores as on one. onnxruntime lends its pool to custom
operators (KernelContext_ParallelFor), and this operator lends it to any compiled function.

Custom operators come from a shared library with the function RegisterCustomOps. Ours is part of this process, so
the library is a file in memory that holds one jump to it. Graphs can be built before the operator is implemented
(`worker_pool.py`), which takes a compiler; none can run before.
"""

import ctypes
import functools
import os
import platform
import struct
from typing import Any

import numpy as np
import onnxruntime as ort

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


def address_of(function: Any) -> int:
    """The address of a C function known to ctypes."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_kept: list[Any] = []  # what C code holds addresses of


def _text(text: bytes) -> int:
    buffer = ctypes.create_string_buffer(text)
    _kept.append(buffer)
    return ctypes.addressof(buffer)


_operator = _CustomOp(_CUSTOM_OP_VERSION)  # read by onnxruntime whenever it needs something of it


def implement(compute: int) -> None:
    """Say what the operator does: the address of a C function of a kernel and a context, see `worker_pool.py`."""
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
    descriptor = os.memfd_create("kestrel-call", 0)
    os.write(descriptor, shared_library(b"RegisterCustomOps", _pointer(kind, register)))
    return f"/proc/self/fd/{descriptor}"


def shared_library(symbol: bytes, address: int) -> bytes:
    """A 64-bit ELF library with one function, which jumps to an address of this process (x86-64, aarch64)."""
    if platform.machine() == "x86_64":
        machine, code = 62, b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"  # movabs rax; jmp rax
    else:
        machine, code = 183, struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)  # ldr x16, 8; br x16
    page = 1 << 16  # the largest there is
    head = 64 + 4 * 56  # a multiple of 8, so the code, which comes first, begins there
    strings = b"\0" + symbol + b"\0"
    function = struct.pack("<IBBHQQ", 1, 0x12, 0, 1, head, len(code))  # global, its name at 1
    at, body = {}, b""
    for part, content in (
        ("code", code),
        ("strings", strings),
        ("symbols", b"\0" * 24 + function),  # the first symbol is always empty
        ("hash", struct.pack("<5I", 1, 2, 1, 0, 0)),  # one bucket, whose chain begins and ends with symbol 1
    ):
        body += b"\0" * (-len(body) % 8)
        at[part] = head + len(body)
        body += content
    size = head + len(body)
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (4, at["hash"]), (5, at["strings"]), (6, at["symbols"]), (10, len(strings)), (11, 24), (0, 0),
        )
    )  # fmt: skip
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, place, place, place, length, length, align)
        for kind, flags, place, length, align in (
            (1, 5, 0, size, page),  # loaded, read and executed
            (1, 6, page, len(dynamic), page),  # loaded, read and written: the loader notes addresses in it
            (2, 6, page, len(dynamic), 8),  # the dynamic section
            (0x6474E551, 6, 0, 0, 16),  # no executable stack
        )
    )
    start = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    start += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    return (start + headers + body).ljust(page, b"\0") + dynamic


def register(options: ort.SessionOptions) -> None:
    """Let sessions made with these options use the operator."""
    options.register_custom_ops_library(_library())
