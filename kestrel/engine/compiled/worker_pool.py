# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
"""What the operator `kestrel.Call` does: the phases of a record, each shared out to onnxruntime's own threads.

`compute` is its KernelCompute.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kestrel.engine.records import INPUT, OUTPUT, ROWS


@intrinsic
def load_word(typing, address):
    """The 64-bit word at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def take_ticket(typing, address):
    """Add 1 to the 64-bit word at an address that other threads count too; return what it was."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def as_pointer(typing, address, kind):
    """An address as a pointer of numba's type `kind`."""

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return kind.instance_type(types.int64, kind), codegen


def _caller(num_args: int) -> Any:
    """An intrinsic that calls the C function at an address with so many words; it returns a word."""

    @intrinsic
    def call(typing, address, args):
        def codegen(context, builder, sig, values):
            word = ir.IntType(64)
            words = [builder.extract_value(values[1], i) for i in range(num_args)]
            kind = ir.FunctionType(word, [word] * num_args).as_pointer()
            return builder.call(builder.inttoptr(values[0], kind), words)

        return types.int64(types.int64, types.UniTuple(types.int64, num_args)), codegen

    return call


call_1, call_2, call_3, call_5 = (_caller(n) for n in (1, 2, 3, 5))


def compute(kernel, context):
    """KernelCompute: find the record, tell it where input and output are, and run its phases."""
    get_input, tensor_data = load_word(kernel), load_word(kernel + 8)
    slot = kernel + 32  # a word to spare
    call_3(get_input, (context, 0, slot))
    call_2(tensor_data, (load_word(slot), slot))
    record = load_word(load_word(slot))
    call_3(get_input, (context, 1, slot))
    call_2(tensor_data, (load_word(slot), record + 8 * INPUT))
    if call_5(load_word(kernel + 16), (context, 0, record + 8 * ROWS, 2, slot)) != 0:
        return  # no memory for the output; onnxruntime misses it and says so
    call_2(tensor_data, (load_word(slot), record + 8 * OUTPUT))
    begin, work = load_word(record), load_word(record + 8)
    phase = 0
    while True:
        workers = call_2(begin, (record, phase))
        if workers == 0:
            return
        if workers == 1:
            call_2(work, (record, 0))
        else:
            call_5(load_word(kernel + 24), (context, work, workers, 0, record))
        phase += 1
