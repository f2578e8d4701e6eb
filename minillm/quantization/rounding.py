"""Rounding float weights to few bits, a block of neighbouring inputs at a time."""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix

CHUNK = 65_536  # weights that `quantize` rounds at a time, so that what it works on stays in the processor's cache


def quantize(matrix: np.ndarray, bits: int, block_size: int = 32) -> QuantizedMatrix:
    """Round a float matrix to 8 or 4 bits a weight, a block of neighbouring inputs at a time (see `round_blocks`).

    Parameters
    ----------
    matrix : float32 [O, I]; a last block that is not full has the scale and minimum of the weights it has
    bits : 8 or 4
    block_size : Q, how many inputs share a scale

    Raises
    ------
    ValueError
        `bits` or `block_size` is none that there is, or a weight (or the span of a block) is not finite.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; weights are quantized to 4 or 8")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block holds at least one weight")
    outputs, inputs = matrix.shape
    blocks, missing = -(-inputs // block_size), -inputs % block_size
    codes = np.empty((outputs, blocks, block_size), np.int8)
    scales, minimums = np.empty((2, outputs, blocks), np.float32)
    rows = max(1, CHUNK // max(1, inputs))
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        weights = np.asarray(matrix[part], np.float32)
        if missing:  # repeating the last weight moves neither the largest nor the smallest
            weights = np.pad(weights, ((0, 0), (0, missing)), mode="edge")
        rounded = round_blocks(weights.reshape(-1, block_size), bits)
        codes[part], scales[part], minimums[part] = (
            values.reshape(whole[part].shape) for values, whole in zip(rounded, (codes, scales, minimums), strict=True)
        )
        if not np.isfinite(scales[part]).all():
            row, block = np.argwhere(~np.isfinite(scales[part]))[0]
            why = _why_not(weights[row, block * block_size : (block + 1) * block_size])
            raise ValueError(f"row {first + row}, block {block} {why}")
    return QuantizedMatrix(codes, scales, minimums if bits == 4 else None, bits, inputs)


def round_blocks(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minimums of blocks of weights: float32 [n, Q] -> int8 [n, Q], float32 [n], float32 [n].

    8 bits are symmetric: the largest weight of a block, by magnitude, becomes 127 or -127, and the minimum stays 0.
    4 bits need all they have: the block's smallest weight becomes 0 and its largest 15. No weight is off by more than
    half a scale (but for blocks of nothing but numbers under 1e-36, whose scale is itself rounded). A block whose
    weights, or the span from smallest to largest, are no finite numbers has a scale that is none either.
    """
    # [Q, n], a copy: SIMD then runs over many blocks instead of along the few weights of one
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
        columns /= np.where(scales == 0, np.float32(1), scales)  # a block of equal weights has nothing to scale
        codes = np.clip(np.rint(columns, out=columns), lowest, highest, out=columns).astype(np.int8)
    return codes.T, scales, minimums


def _why_not(weights: np.ndarray) -> str:
    if np.isfinite(weights).all():
        return f"spans {weights.min()} to {weights.max()}, more than float32 can hold"
    return "holds NaN or infinity, which no code stands for"
