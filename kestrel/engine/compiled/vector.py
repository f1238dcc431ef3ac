# mypy: disable-error-code="no-untyped-call"
"""Vector micro-kernels of attention, written as LLVM IR so that every bit is defined by IEEE 754.

No fast-math flag is used anywhere and every multiply-add is an explicit fused one, so neither the
compiler, the vector width, the number of threads nor the number of rows can change a result: a score
is one chain of fused multiply-adds over head_dim, an output element one chain over keys, a softmax
sum 16 fixed lanes added by a fixed tree. AVX2, AVX512 and NEON give the same bits.

The functions are numba intrinsics: they look like Python calls inside a jitted function and become
inline vector code. Arrays are flat; offsets count elements.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kestrel.engine.instructions import instruction_level
from kestrel.engine.records import BLOCK, ROW

LANES = 16  # accumulators of a softmax sum: a fixed number, whatever the CPU's vector width
ROW_TILES = (1, 2, 4, 8)  # rows that share one pass over K or V
# For these, memory is slower than the work on what it brings: what comes next is asked for meanwhile. An int8
# page has 8 KiB of K for a head: too little for the processor to see it coming.
_FEW_ROWS = (1, 2, 4)
_CACHE_LINE = 64

F32 = ir.FloatType()
I32 = ir.IntType(32)
NEVER = np.float32(-1e30)  # "no key seen yet": below any score, still finite

# 2^f on [-0.5, 0.5], minimax polynomial, highest power first; relative error 2e-7
EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


# Floats in a vector register, and accumulators that fit the register file.
WIDTH, ACCUMULATORS = {"x86-64-v4": (16, 16), "generic": (4, 16)}.get(instruction_level(), (8, 8))


def _vector(width: int) -> ir.Type:
    return ir.VectorType(F32, width) if width > 1 else F32


def _const(value: float | np.float32, width: int = WIDTH) -> ir.Constant:
    rounded = float(np.float32(value))
    return ir.Constant(F32, rounded) if width == 1 else ir.Constant(_vector(width), [rounded] * width)


def _splat(builder: ir.IRBuilder, value: ir.Value, width: int) -> ir.Value:
    if width == 1:
        return value
    kind = ir.VectorType(value.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, width), [0] * width)
    )


def _call(builder: ir.IRBuilder, name: str, args: list[ir.Value]) -> ir.Value:
    """Call a generic LLVM intrinsic (llvm.fma, llvm.floor…) on floats or float vectors."""
    kind = args[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    fn = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.{suffix}"
    )
    return builder.call(fn, args)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "fma", [a, b, c])


def _load(builder: ir.IRBuilder, pointer: ir.Value, width: int) -> ir.Value:
    """Load `width` elements as float32; int8 elements are converted, which is exact."""
    element = pointer.type.pointee
    kind = ir.VectorType(element, width) if width > 1 else element
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1 if element != F32 else 4)
    if element == F32:
        return loaded
    wide = ir.VectorType(I32, width) if width > 1 else I32
    return builder.sitofp(builder.sext(loaded, wide), _vector(width))


class _Lines:
    """Lines of K or V in memory, and where as many of the same length begin that are wanted next."""

    def __init__(self, array: Any, base: ir.Value, stride: ir.Value, ahead: ir.Value, length: ir.Value):
        """array: numba's type of what they lie in; base, ahead: pointers; stride: elements between two lines."""
        self._array, self._base, self._stride, self._ahead, self._length = array, base, stride, ahead, length

    def load(
        self, builder: ir.IRBuilder, number: ir.Value, column: ir.Value, vectors: int, width: int, rows: int
    ) -> list[ir.Value]:
        """Columns [column, column + vectors * width) of a line; for few rows the next ones are asked for."""
        line = _at(builder, self._base, builder.mul(number, self._stride), column)
        loaded = [_load(builder, _at(builder, line, v * width), width) for v in range(vectors)]
        if rows in _FEW_ROWS:
            wanted = _at(builder, self._ahead, builder.mul(number, self._length), column)
            _read_ahead(builder, self._array, wanted, vectors * width)
        return loaded


def _read_ahead(builder: ir.IRBuilder, array: Any, start: ir.Value, numbers: int) -> None:
    """Ask for `numbers` elements from a pointer on to be brought near; no address is wrong."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for first in range(0, numbers, _CACHE_LINE * 8 // array.dtype.bitwidth):
        line = builder.bitcast(_at(builder, start, first), byte)
        builder.call(prefetch, [line, I32(0), I32(3), I32(1)])  # read, into the nearest cache, data


def _store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _at(builder: ir.IRBuilder, pointer: ir.Value, *offsets: ir.Value | int) -> ir.Value:
    total: ir.Value | None = None
    for offset in offsets:
        value = ir.Constant(ir.IntType(64), offset) if isinstance(offset, int) else offset
        total = value if total is None else builder.add(total, value)
    return builder.gep(pointer, [total])


def _data(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, builder, value).data


def _tiles(rows: int) -> tuple[tuple[int, int], ...]:
    """(vectors, floats in each) to try in turn while walking an axis, widest first."""
    widest = max(1, ACCUMULATORS // rows)
    return ((widest, WIDTH), (1, WIDTH), (1, 1)) if widest > 1 else ((1, WIDTH), (1, 1))


def _walk(builder: ir.IRBuilder, length: ir.Value, rows: int, body: Any) -> None:
    """Emit body(position, vectors, width) over [0, length) in the widest tiles that fit.

    Elements never mix, so the choice of tiles cannot be seen in the result.
    """
    i64 = ir.IntType(64)
    position = cgutils.alloca_once_value(builder, i64(0))
    for vectors, width in _tiles(rows):
        step = i64(vectors * width)
        test = builder.append_basic_block("tile.test")
        work = builder.append_basic_block("tile.body")
        done = builder.append_basic_block("tile.done")
        builder.branch(test)
        builder.position_at_end(test)
        here = builder.load(position)
        builder.cbranch(builder.icmp_signed("<=", builder.add(here, step), length), work, done)
        builder.position_at_end(work)
        body(here, vectors, width)
        builder.store(builder.add(here, step), position)
        builder.branch(test)
        builder.position_at_end(done)


def _make_scores(rows: int) -> Any:
    @intrinsic
    def scores(
        typing: Any, q: Any, q_at: Any, k: Any, k_at: Any, stride: Any, dim: Any, keys: Any, s: Any, s_at: Any,
        ahead: Any,
    ) -> Any:  # fmt: skip
        """s[r, c] = sum over d of q[d, r] * k[d, c], one fused chain over d for each element.

        q: [dim, rows] packed from q_at; k: dim rows of `keys` elements, `stride` apart, float32 or
        int8; s: rows of `keys` floats, ROW elements apart, from s_at. ahead: where in k's array the
        dim * keys elements begin that are wanted next.
        """
        i64 = types.int64
        signature = types.void(q, i64, k, i64, i64, i64, i64, s, i64, i64)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            q_data, k_data, s_data = (_data(context, builder, sig.args[i], args[i]) for i in (0, 2, 7))
            q_base = _at(builder, q_data, args[1])
            s_base = _at(builder, s_data, args[8])
            stride_, dim_, keys_ = args[4], args[5], args[6]
            k_at_, ahead_ = (_at(builder, k_data, args[i]) for i in (3, 9))
            lines = _Lines(k, k_at_, stride_, ahead_, keys_)

            def tile(column: ir.Value, vectors: int, width: int) -> None:
                sums = [
                    [cgutils.alloca_once(builder, _vector(width)) for _ in range(vectors)]
                    for _ in range(rows)
                ]
                for row in sums:
                    for one in row:
                        builder.store(_const(0.0, width), one)
                with cgutils.for_range(builder, dim_) as loop:
                    d = builder.sext(loop.index, ir.IntType(64))
                    loaded = lines.load(builder, d, column, vectors, width, rows)
                    first = builder.mul(d, ir.IntType(64)(rows))
                    for r in range(rows):
                        weight = _splat(builder, builder.load(_at(builder, q_base, first, r)), width)
                        for v in range(vectors):
                            builder.store(
                                _fma(builder, weight, loaded[v], builder.load(sums[r][v])), sums[r][v]
                            )
                for r in range(rows):
                    for v in range(vectors):
                        target = _at(builder, s_base, column, r * ROW + v * width)
                        _store(builder, builder.load(sums[r][v]), target)

            _walk(builder, keys_, rows, tile)
            return context.get_dummy_value()

        return signature, codegen

    return scores


def _make_add_values(rows: int) -> Any:
    @intrinsic
    def add_values(
        typing: Any,
        p: Any,
        p_at: Any,
        v: Any,
        v_at: Any,
        dim: Any,
        keys: Any,
        out: Any,
        out_at: Any,
        ahead: Any,
    ) -> Any:
        """out[r, d] += sum over c of p[r, c] * v[c, d], one fused chain over c for each element.

        p: rows of weights, ROW elements apart; v: [keys, dim] float32 or int8; out: [rows, dim]. ahead:
        where in v's array the keys * dim elements begin that are wanted next.
        """
        i64 = types.int64
        signature = types.void(p, i64, v, i64, i64, i64, out, i64, i64)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            p_data, v_data, o_data = (_data(context, builder, sig.args[i], args[i]) for i in (0, 2, 6))
            p_base = _at(builder, p_data, args[1])
            o_base = _at(builder, o_data, args[7])
            dim_, keys_ = args[4], args[5]
            v_at_, ahead_ = (_at(builder, v_data, args[i]) for i in (3, 8))
            lines = _Lines(v, v_at_, dim_, ahead_, dim_)

            def tile(column: ir.Value, vectors: int, width: int) -> None:
                sums = []
                for r in range(rows):
                    line = _at(builder, o_base, builder.mul(ir.IntType(64)(r), dim_), column)
                    for i in range(vectors):
                        one = cgutils.alloca_once(builder, _vector(width))
                        builder.store(_load(builder, _at(builder, line, i * width), width), one)
                        sums.append(one)
                with cgutils.for_range(builder, keys_) as loop:
                    c = builder.sext(loop.index, ir.IntType(64))
                    loaded = lines.load(builder, c, column, vectors, width, rows)
                    for r in range(rows):
                        weight = _splat(builder, builder.load(_at(builder, p_base, c, r * ROW)), width)
                        for i in range(vectors):
                            one = sums[r * vectors + i]
                            builder.store(_fma(builder, weight, loaded[i], builder.load(one)), one)
                for r in range(rows):
                    line = _at(builder, o_base, builder.mul(ir.IntType(64)(r), dim_), column)
                    for i in range(vectors):
                        _store(builder, builder.load(sums[r * vectors + i]), _at(builder, line, i * width))

            _walk(builder, dim_, rows, tile)
            return context.get_dummy_value()

        return signature, codegen

    return add_values


def _scale(
    builder: ir.IRBuilder, base: ir.Value, length: ir.Value, factor: Callable[[ir.Value, int, int], ir.Value]
) -> None:
    """Multiply `length` floats from a pointer on, in place; factor(place, further, width): of those from there on."""

    def tile(place: ir.Value, vectors: int, width: int) -> None:
        for v in range(vectors):
            one = _at(builder, base, place, v * width)
            _store(builder, builder.fmul(_load(builder, one, width), factor(place, v * width, width)), one)

    _walk(builder, length, 4, tile)


@intrinsic
def scale_all(typing: Any, x: Any, at: Any, length: Any, factor: Any) -> Any:
    """x[at + i] *= factor for i in [0, length)."""
    signature = types.void(x, types.int64, types.int64, types.float32)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        base = _at(builder, _data(context, builder, sig.args[0], args[0]), args[1])
        _scale(builder, base, args[2], lambda place, further, width: _splat(builder, args[3], width))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def scale_each(typing: Any, x: Any, at: Any, length: Any, factors: Any, factors_at: Any, unit: Any) -> Any:
    """x[at + i] *= factors[factors_at + i] * unit for i in [0, length)."""
    signature = types.void(x, types.int64, types.int64, factors, types.int64, types.float32)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        base, other = (
            _at(builder, _data(context, builder, sig.args[i], args[i]), args[i + 1]) for i in (0, 3)
        )

        def factor(place: ir.Value, further: int, width: int) -> ir.Value:
            own = _load(builder, _at(builder, other, place, further), width)
            return builder.fmul(own, _splat(builder, args[5], width))

        _scale(builder, base, args[2], factor)
        return context.get_dummy_value()

    return signature, codegen


def _exp2(builder: ir.IRBuilder, x: ir.Value, width: int) -> ir.Value:
    """2^x for x <= 0; x is clamped at -126, so the result is a normal number."""
    low = _const(-126.0, width)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    whole = _call(builder, "floor", [builder.fadd(x, _const(0.5, width))])
    part = builder.fsub(x, whole)
    y = _const(EXP2[0], width)
    for c in EXP2[1:]:
        y = _fma(builder, y, part, _const(c, width))
    integers = ir.VectorType(I32, width) if width > 1 else I32
    bias, shift = (
        (ir.Constant(integers, [n] * width) if width > 1 else ir.Constant(integers, n)) for n in (127, 23)
    )
    exponent = builder.shl(builder.add(builder.fptosi(whole, integers), bias), shift)
    return builder.fmul(y, builder.bitcast(exponent, _vector(width)))


@intrinsic
def exp2(typing: Any, x: Any) -> Any:
    """2^x of one float32, the very polynomial the softmax uses; x <= 0."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _exp2(builder, args[0], 1)

    return types.float32(types.float32), codegen


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _fma(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def softmax_block(typing: Any, s: Any, at: Any, seen: Any, highest: Any) -> Any:
    """Turn one row of BLOCK scores (base 2) into weights, in place; return (new highest score, sum of weights).

    s[at : at+BLOCK]: scores in, 2^(score - highest) out, and exact zeros from position `seen` (1..BLOCK)
    on; highest: the highest score of the blocks before.
    """
    signature = types.UniTuple(types.float32, 2)(s, types.int64, types.int64, types.float32)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        width, vectors = WIDTH, LANES // WIDTH
        base = _at(builder, _data(context, builder, sig.args[0], args[0]), args[1])
        kind = ir.VectorType(I32, width)
        limit = _splat(builder, builder.trunc(args[2], I32), width)

        def visible(first: int, v: int) -> ir.Value:
            index = ir.Constant(kind, [first + v * width + i for i in range(width)])
            return builder.icmp_signed("<", index, limit)

        highs = [_const(NEVER) for _ in range(vectors)]
        for first in range(0, BLOCK, LANES):
            for v in range(vectors):
                x = _load(builder, _at(builder, base, first + v * width), width)
                x = builder.select(visible(first, v), x, _const(NEVER))
                highs[v] = builder.select(builder.fcmp_ordered(">", x, highs[v]), x, highs[v])
        high = args[3]
        for vector in highs:
            for i in range(width):
                x = builder.extract_element(vector, I32(i))
                high = builder.select(builder.fcmp_ordered(">", x, high), x, high)

        top = _splat(builder, high, width)
        sums = [_const(0.0) for _ in range(vectors)]
        for first in range(0, BLOCK, LANES):
            for v in range(vectors):
                place = _at(builder, base, first + v * width)
                weight = _exp2(builder, builder.fsub(_load(builder, place, width), top), width)
                weight = builder.select(visible(first, v), weight, _const(0.0))
                _store(builder, weight, place)
                sums[v] = builder.fadd(sums[v], weight)
        lanes = [builder.extract_element(x, I32(i)) for x in sums for i in range(width)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [builder.fadd(lanes[i], lanes[i + half]) for i in range(half)]
        return context.make_tuple(builder, sig.return_type, (high, lanes[0]))

    return signature, codegen


scores_1, scores_2, scores_4, scores_8 = (_make_scores(n) for n in ROW_TILES)
add_values_1, add_values_2, add_values_4, add_values_8 = (_make_add_values(n) for n in ROW_TILES)
