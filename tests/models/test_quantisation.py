"""Quantised blocks are as close as their codes allow, and mean to onnxruntime what they mean here."""

import os

import numpy as np
import onnx
import onnxruntime
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper

from kestrel.engine.layers import share_resources
from kestrel.errors import ModelError
from kestrel.models.quantisation import BLOCK_SIZE, Bytes, Floats, dequantise, quantise

NUMBERS = st.floats(-1000, 1000, width=32).map(lambda number: number if abs(number) > 1e-20 else 0.0)
MATRICES = arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=NUMBERS)


def matrix(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


@settings(max_examples=60, deadline=None)
@given(MATRICES)
def test_int8_is_off_by_half_a_step_at_most(numbers: Floats) -> None:
    codes, scales = quantise(numbers, 8)
    steps = np.repeat(scales, BLOCK_SIZE, axis=1)[:, : numbers.shape[1]]
    error = np.abs(dequantise(codes, scales, 8, numbers.shape[1]).astype(np.float64) - numbers)
    assert (error <= steps * 0.501 + 1e-30).all()


@settings(max_examples=60, deadline=None)
@given(MATRICES)
def test_int4_is_never_worse_than_q4_0(numbers: Floats) -> None:
    columns = numbers.shape[1]
    padded = np.pad(numbers, ((0, 0), (0, -columns % 32)))
    plain = q4_0(padded)[:, :columns]
    codes, scales = quantise(numbers, 4)
    error = np.square(dequantise(codes, scales, 4, columns).astype(np.float64) - numbers).sum()
    plain_error = np.square(plain.astype(np.float64) - numbers).sum()
    assert error <= plain_error * 1.0001 + 1e-9


def test_int4_of_normal_numbers_is_five_percent_better_than_q4_0() -> None:
    numbers = matrix(64, 512)
    plain = q4_0(numbers)
    better = dequantise(*quantise(numbers, 4), 4, 512)
    assert np.linalg.norm(better - numbers) < 0.955 * np.linalg.norm(plain - numbers)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_of_zeros_and_of_vanishing_numbers_become_zeros(bits: int) -> None:
    numbers = np.zeros((3, 64), np.float32)
    numbers[1, :32] = 1e-42
    numbers[2, 40] = 3.0
    codes, scales = quantise(numbers, bits)
    restored = dequantise(codes, scales, bits, 64)
    assert np.isfinite(scales).all()
    assert not restored[:2].any()
    assert abs(restored[2, 40] - 3.0) < 1e-6 and np.count_nonzero(restored[2]) == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bits: int, bad: float) -> None:
    numbers = matrix(2, 64)
    numbers[1, 5] = bad
    with pytest.raises(ModelError, match="NaN or infinities"):
        quantise(numbers, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_quantised_on_their_own(bits: int) -> None:
    numbers = matrix(9, 80)
    codes, scales = quantise(numbers, bits)
    for row in range(9):
        alone = quantise(numbers[row : row + 1], bits)
        assert np.array_equal(alone[0][0], codes[row])
        assert np.array_equal(alone[1][0].view(np.int32), scales[row].view(np.int32))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("in_features", [64, 80])
def test_onnxruntime_reads_the_blocks_as_they_are_meant(bits: int, in_features: int) -> None:
    codes, scales = quantise(matrix(24, in_features), bits)
    x = matrix(5, in_features, seed=1)
    product = mat_mul_n_bits(x, codes, scales, bits)
    assert np.abs(product - x @ dequantise(codes, scales, bits, in_features).T).max() < 1e-4


def q4_0(numbers: Floats) -> Floats:
    """What llama.cpp's Q4_0 leaves of the numbers."""
    return dequantize(gguf_quantize(numbers, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)


def mat_mul_n_bits(x: Floats, codes: Bytes, scales: Floats, bits: int) -> Floats:
    """x times the transposed matrix, by onnxruntime at full accuracy."""
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=x.shape[1],
        N=codes.shape[0],
        bits=bits,
        block_size=BLOCK_SIZE,
        accuracy_level=1,
    )
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (x.shape[0], codes.shape[0]))],
        [onnx.numpy_helper.from_array(codes, "codes"), onnx.numpy_helper.from_array(scales, "scales")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    share_resources(len(os.sched_getaffinity(0)))  # as an engine in this process does
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]
