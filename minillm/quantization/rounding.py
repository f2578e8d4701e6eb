"""Quantize float weights: round each block of consecutive inputs to integer codes."""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix

CHUNK = 65_536  # weights that `quantize` rounds at a time, so that its buffers fit in the CPU cache


def quantize(matrix: np.ndarray, bits: int, block_size: int = 32) -> QuantizedMatrix:
    """Quantize a float matrix to 8 or 4 bits per weight, one block of consecutive inputs at a time.

    `round_blocks` describes the rounding.

    Parameters
    ----------
    matrix : float32 [O, I]; the padding of a partial last block does not affect its scale and minimum
    bits : 8 or 4
    block_size : Q, the number of inputs that share a scale

    Raises
    ------
    ValueError
        `bits` or `block_size` is invalid, or a weight, or the range of a block, is not finite.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, expected 4 or 8")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1")
    outputs, inputs = matrix.shape
    blocks, padding = -(-inputs // block_size), -inputs % block_size
    codes = np.empty((outputs, blocks, block_size), np.int8)
    scales, minimums = np.empty((2, outputs, blocks), np.float32)
    rows = max(1, CHUNK // max(1, inputs))
    for first in range(0, outputs, rows):
        chunk = slice(first, first + rows)
        weights = np.asarray(matrix[chunk], np.float32)
        if padding:  # repeating the last weight changes neither the largest nor the smallest
            weights = np.pad(weights, ((0, 0), (0, padding)), mode="edge")
        rounded = round_blocks(weights.reshape(-1, block_size), bits)
        codes[chunk], scales[chunk], minimums[chunk] = (
            values.reshape(whole[chunk].shape) for values, whole in zip(rounded, (codes, scales, minimums), strict=True)
        )
        if not np.isfinite(scales[chunk]).all():
            row, block = np.argwhere(~np.isfinite(scales[chunk]))[0]
            problem = _problem(weights[row, block * block_size : (block + 1) * block_size])
            raise ValueError(f"row {first + row}, block {block} {problem}")
    return QuantizedMatrix(codes, scales, minimums if bits == 4 else None, bits, inputs)


def round_blocks(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize blocks of weights, float32 [n, Q], to codes int8 [n, Q], scales float32 [n] and minimums float32 [n].

    8-bit codes are symmetric: the weight of largest magnitude in a block becomes 127 or -127, and the minimum is 0.
    4-bit codes use their whole range: the smallest weight of a block becomes 0 and the largest becomes 15. The error of
    a weight is at most half the scale, except in blocks of weights below 1e-36, whose scale is itself rounded. If a
    weight, or the range from smallest to largest, is not finite, the scale of the block is not finite either.
    """
    # [Q, n], as a copy, so that SIMD lanes hold different blocks: a single block has too few weights
    columns = np.array(blocks.T, order="C")
    smallest, largest = columns.min(axis=0), columns.max(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        if bits == 4:
            lowest, highest, minimums = 0, 15, smallest
            columns -= minimums
            scales = (largest - smallest) / np.float32(15)
        else:
            lowest, highest, minimums = -127, 127, np.zeros_like(smallest)
            scales = np.maximum(largest, -smallest) / np.float32(127)
        columns /= np.where(scales == 0, np.float32(1), scales)  # avoids 0 / 0 if all weights are equal
        codes = np.clip(np.rint(columns, out=columns), lowest, highest, out=columns).astype(np.int8)
    return codes.T, scales, minimums


def _problem(weights: np.ndarray) -> str:
    if np.isfinite(weights).all():
        return f"spans {weights.min()} to {weights.max()}, a range that float32 cannot hold"
    return "holds NaN or infinity, which cannot be quantized"
