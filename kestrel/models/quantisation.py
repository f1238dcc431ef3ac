"""Block quantisation of weight matrices for onnxruntime's `com.microsoft.MatMulNBits`.

A row is cut into blocks of 32 numbers; a block has one float32 scale and unsigned codes around an implicit zero
point: number = (code - zero point) * scale. The operator quantises activations to 8 bits in the same blocks, and with
8-bit weights that is the larger part of the error. Blocks of 16 halve it (SmolLM2-135M, mean KL from float32: 0.0026
instead of 0.0041), but take 10 bits a number instead of 9 and a third more time for a prompt, an eighth for a token.

Every operation is elementwise IEEE arithmetic or a maximum, and sums are written out as additions in a fixed
order. So the same matrix gives the same bits on every processor: library sums differ with the width of its vectors.
"""

import numpy as np
import numpy.typing as npt

from kestrel.errors import ModelError

BLOCK_SIZE = 32  # numbers in a block
ZERO_POINTS = {8: 128, 4: 8}
SMALLEST = np.float32(1e-30)  # blocks below this are stored as zeros: the inverse of their scale overflows
# Where the largest number of a 4-bit block may land between the codes; the best of these is taken. The largest may
# stick out beyond -8 or 7 and be clipped when that serves the other 31.
EXTREMES_4 = (np.float32(-8.0), np.float32(-8.6), np.float32(-7.2))

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def num_blocks(in_features: int) -> int:
    """Blocks of a row; the last one is padded with zeros."""
    return -(-in_features // BLOCK_SIZE)


def quantise(matrix: Floats, bits: int) -> tuple[Bytes, Floats]:
    """Quantise float32 [out, in]: (codes uint8 [out, blocks, 4 * bits], scales float32 [out, blocks]).

    4-bit codes are packed two a byte, the earlier number in the low nibble. ModelError for NaN and infinities.
    """
    rows, in_features = matrix.shape
    blocks = num_blocks(in_features)
    if in_features != blocks * BLOCK_SIZE:
        matrix = np.pad(matrix, ((0, 0), (0, blocks * BLOCK_SIZE - in_features)))
    numbers = matrix.reshape(rows, blocks, BLOCK_SIZE)
    largest = np.abs(numbers).max(-1)
    if not np.isfinite(largest).all():
        raise ModelError("weights hold NaN or infinities")
    return _quantise8(numbers, largest) if bits == 8 else _quantise4(numbers, largest)


def dequantise(codes: Bytes, scales: Floats, bits: int, in_features: int) -> Floats:
    """The float32 [out, in] that `codes` and `scales` stand for."""
    rows = codes.shape[0]
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(rows, -1, BLOCK_SIZE)
    numbers = (codes.astype(np.float32) - np.float32(ZERO_POINTS[bits])) * scales[..., None]
    return numbers.reshape(rows, -1)[:, :in_features]


def pack4(codes: Bytes) -> Bytes:
    """Pack 4-bit codes [..., 2 n] into bytes [..., n], the earlier code in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def _quantise8(numbers: Floats, largest: Floats) -> tuple[Bytes, Floats]:
    scales = largest / np.float32(127)
    used = scales > SMALLEST
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=used)
    codes = numbers * inverse[..., None]
    np.rint(codes, out=codes)
    codes += np.float32(128)
    return codes.astype(np.uint8), np.where(used, scales, np.float32(0))


def _quantise4(numbers: Floats, largest: Floats) -> tuple[Bytes, Floats]:
    """Try each of EXTREMES_4, with the least-squares scale for its codes; keep the codes of smallest error.

    For codes q the best scale is sum(x q) / sum(q q), and it removes sum(x q)**2 / sum(q q) of the squared error.
    """
    columns = np.ascontiguousarray(
        numbers.reshape(-1, BLOCK_SIZE).T
    )  # [32, blocks]: sums run down the first axis
    extreme = largest.reshape(-1)
    used = extreme > SMALLEST
    extreme = np.where(columns.max(0) == extreme, extreme, -extreme)
    inverse = np.divide(np.float32(1), extreme, out=np.zeros_like(extreme), where=used)
    best_gain = np.full(extreme.shape, -1, np.float32)
    best_codes = np.zeros_like(columns)
    scales = np.zeros_like(extreme)
    for code in EXTREMES_4:
        codes = np.multiply(columns, np.multiply(inverse, code), dtype=np.float32)
        np.rint(codes, out=codes)
        np.clip(codes, np.float32(-8), np.float32(7), out=codes)
        products = _sum_in_order(columns, codes)
        squares = _sum_in_order(codes, codes)
        scale = np.divide(products, squares, out=np.zeros_like(products), where=used)
        gain = products * scale
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_codes, codes, where=better)
        np.copyto(scales, scale, where=better)
    best_codes += np.float32(8)
    codes4 = best_codes.astype(np.uint8)
    packed = codes4[0::2] | codes4[1::2] << np.uint8(4)
    return np.ascontiguousarray(packed.T).reshape(*largest.shape, BLOCK_SIZE // 2), scales.reshape(
        largest.shape
    )


def _sum_in_order(left: Floats, right: Floats) -> Floats:
    """Sum of left * right over the first axis, row after row."""
    total: Floats = np.multiply(left[0], right[0])
    product = np.empty_like(total)
    for one, other in zip(left[1:], right[1:], strict=True):
        np.multiply(one, other, out=product)
        total += product
    return total
