"""Matrix products whose bits do not depend on how many rows they are given.

Every output is one chain of fused multiply-adds over its inputs, in order: inside a block first, then the block's
scale and minimum take it into the chain over blocks. The 64 outputs of a tile are 64 such chains side by side, a
SIMD lane each; threads take different tiles. So no sum is ever split, and decode's kernel for one row and prefill's
for many give the same bits.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from minillm.ops import reference
from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.tiles import LANES, TiledMatrix, dequantize, weight

# With the compiler off, a product with more weights than this is handed to NumPy: as a Python loop, one token of the
# default model would take minutes. Smaller products stay steppable.
LARGEST_INTERPRETED_PRODUCT = 100_000

NO_BIAS = np.empty(0, np.float32)


def linear(x: np.ndarray, matrix: TiledMatrix, bias: np.ndarray | None = None) -> np.ndarray:
    """`x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]; a row's bits do not depend on the rows beside it.

    Raises
    ------
    ValueError
        `x` has not as many columns as the matrix has inputs.
    """
    if x.shape[1] != matrix.num_inputs:
        raise ValueError(f"rows of {x.shape[1]} numbers do not fit a matrix of {matrix.num_inputs} inputs")
    if numba.config.DISABLE_JIT and matrix.num_outputs * matrix.num_inputs > LARGEST_INTERPRETED_PRODUCT:
        return reference.linear(x, dequantize(matrix), bias)
    return multiply(x, tuple(matrix), NO_BIAS if bias is None else bias)


@compiled
def multiply(x, matrix, bias):
    """`linear`, for other kernels to call. The matrix is a plain tuple: Numba is slow at receiving named ones."""
    codes, scales, minimums, zero, block_size, outputs, _ = matrix
    rows, inputs = x.shape
    blocks = codes.shape[1]
    if inputs < blocks * block_size:
        padded = np.zeros((rows, blocks * block_size), np.float32)
        padded[:, :inputs] = x
        x = padded
    sums = np.empty((rows, minimums.shape[1]), np.float32)
    _sum_blocks(x, sums)
    product = np.empty((rows, outputs), np.float32)
    if rows == 1:
        _multiply_one_row(x, sums, codes, zero, scales, minimums, product)
    else:
        _multiply_rows(x, sums, codes, zero, scales, minimums, product)
    if len(bias):
        for row in range(rows):
            for output in range(outputs):
                product[row, output] += bias[output]
    return product


@compiled
def _sum_blocks(x, sums):
    """Sum each row of `x` within each of the `sums.shape[1]` blocks: what a block's minimum is multiplied with."""
    rows, blocks = sums.shape
    if blocks == 0:
        return
    block_size = x.shape[1] // blocks
    for row in range(rows):
        for block in range(blocks):
            total = np.float32(0)
            for k in range(block_size):
                total += x[row, block * block_size + k]
            sums[row, block] = total


@compiled_parallel
def _multiply_one_row(x, sums, codes, zero, scales, minimums, product):
    """Decode's product: reads every weight once, so it runs at the memory's speed.

    Eight inputs a step keep the lanes' running sums in registers between a load and a store.
    """
    tiles, blocks, _, _ = codes.shape
    steps = x.shape[1] // blocks // 8
    for tile in prange(tiles):
        total = np.zeros((1, LANES), np.float32)
        partial = np.empty((1, LANES), np.float32)
        for block in range(blocks):
            partial[:] = 0
            for step in range(steps):
                i = (block * steps + step) * 8
                x0, x1, x2, x3 = x[0, i], x[0, i + 1], x[0, i + 2], x[0, i + 3]
                x4, x5, x6, x7 = x[0, i + 4], x[0, i + 5], x[0, i + 6], x[0, i + 7]
                for lane in range(LANES):
                    s = partial[0, lane]
                    s += x0 * weight(codes, zero, tile, block, step, 0, lane)
                    s += x1 * weight(codes, zero, tile, block, step, 1, lane)
                    s += x2 * weight(codes, zero, tile, block, step, 2, lane)
                    s += x3 * weight(codes, zero, tile, block, step, 3, lane)
                    s += x4 * weight(codes, zero, tile, block, step, 4, lane)
                    s += x5 * weight(codes, zero, tile, block, step, 5, lane)
                    s += x6 * weight(codes, zero, tile, block, step, 6, lane)
                    s += x7 * weight(codes, zero, tile, block, step, 7, lane)
                    partial[0, lane] = s
            _add_block(total, 0, partial, 0, tile, block, scales, sums, minimums)
        for lane in range(min(LANES, product.shape[1] - tile * LANES)):
            product[0, tile * LANES + lane] = total[0, lane]


@inlined
def _add_block(total, row, partial, r, tile, block, scales, sums, minimums):
    """Take a block's sums into the outputs' chains: times the scale, plus the minimum times the inputs' sum."""
    if len(scales) == 0:
        for lane in range(LANES):
            total[row, lane] += partial[r, lane]
        return
    for lane in range(LANES):
        total[row, lane] += partial[r, lane] * scales[tile, block, lane]
    if len(minimums):
        for lane in range(LANES):
            total[row, lane] += sums[row, block] * minimums[tile, block, lane]


@compiled_parallel
def _multiply_rows(x, sums, codes, zero, scales, minimums, product):
    """Prefill's product, [T, I] -> [T, O]: the same chain a row; a block of weights is widened once for all.

    Four rows share each weight that is loaded, and their 4 x 64 running sums just fit the registers. Four inputs
    a turn keep them there. The last one to three rows go alone, through the same chain.
    """
    tiles, blocks, _, _ = codes.shape
    rows, outputs = product.shape
    block_size = x.shape[1] // blocks
    fours = rows - rows % 4
    for tile in prange(tiles):
        total = np.zeros((rows, LANES), np.float32)
        partial = np.empty((4, LANES), np.float32)
        weights = np.empty((block_size, LANES), np.float32)
        for block in range(blocks):
            first = block * block_size
            for step in range(block_size // 8):
                for j in range(8):
                    for lane in range(LANES):
                        weights[8 * step + j, lane] = weight(codes, zero, tile, block, step, j, lane)
            for row in range(0, fours, 4):
                partial[:] = 0
                for k in range(0, block_size, 4):
                    i = first + k
                    a0, a1, a2, a3 = x[row, i], x[row, i + 1], x[row, i + 2], x[row, i + 3]
                    b0, b1, b2, b3 = x[row + 1, i], x[row + 1, i + 1], x[row + 1, i + 2], x[row + 1, i + 3]
                    c0, c1, c2, c3 = x[row + 2, i], x[row + 2, i + 1], x[row + 2, i + 2], x[row + 2, i + 3]
                    d0, d1, d2, d3 = x[row + 3, i], x[row + 3, i + 1], x[row + 3, i + 2], x[row + 3, i + 3]
                    for lane in range(LANES):
                        w0, w1 = weights[k, lane], weights[k + 1, lane]
                        w2, w3 = weights[k + 2, lane], weights[k + 3, lane]
                        a, b, c, d = partial[0, lane], partial[1, lane], partial[2, lane], partial[3, lane]
                        a += a0 * w0
                        b += b0 * w0
                        c += c0 * w0
                        d += d0 * w0
                        a += a1 * w1
                        b += b1 * w1
                        c += c1 * w1
                        d += d1 * w1
                        a += a2 * w2
                        b += b2 * w2
                        c += c2 * w2
                        d += d2 * w2
                        a += a3 * w3
                        b += b3 * w3
                        c += c3 * w3
                        d += d3 * w3
                        partial[0, lane], partial[1, lane], partial[2, lane], partial[3, lane] = a, b, c, d
                for r in range(4):
                    _add_block(total, row + r, partial, r, tile, block, scales, sums, minimums)
            for row in range(fours, rows):
                partial[0, :] = 0
                for k in range(block_size):
                    for lane in range(LANES):
                        partial[0, lane] += x[row, first + k] * weights[k, lane]
                _add_block(total, row, partial, 0, tile, block, scales, sums, minimums)
        for row in range(rows):
            for lane in range(min(LANES, outputs - tile * LANES)):
                product[row, tile * LANES + lane] = total[row, lane]
