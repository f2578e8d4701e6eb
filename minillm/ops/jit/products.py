"""Matrix products whose bits do not depend on the number of rows.

Every output is one chain of fused multiply-adds over its inputs, in order. The products within a block are summed
first; the block's scale and minimum are then applied to this sum, and the result is added to the chain over blocks. The
64 outputs of a tile are 64 such chains side by side, one SIMD lane each, and threads process different tiles. No sum is
ever split, so decode's kernel for a few rows and prefill's kernel for many give the same bits.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from minillm.ops import reference
from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.microkernel import ROWS, U1, U2, U3, aligned, multiply_add, whole_rows
from minillm.ops.jit.prefetching import AHEAD, prefetch
from minillm.ops.jit.scales import minimum, scale, scale_group
from minillm.ops.jit.tiles import TiledMatrix, dequantize
from minillm.ops.jit.weight_formats import LANES, weight

# With the compiler off, NumPy computes products with more weights than this: as Python loops, one token of the default
# model would take minutes. A debugger can still step into smaller products.
LARGEST_INTERPRETED_PRODUCT = 100_000

GEMV_ROWS = 3  # maximum number of rows for which widening a block of weights first does not pay
MAX_SHARES = 256  # maximum number of shares of the tiles; more than threads, so that all finish at nearly the same time
TILES_AT_ONCE = 3  # tiles of outputs that many rows are multiplied with together; 15 % faster than one
ROW_BLOCK = 64  # rows that a thread processes together, at most
MIN_PIECES = 12  # pieces of work to aim for, so that all threads finish at nearly the same time

U4, U5, U6, U7 = map(np.uint64, range(4, 8))
NO_BIAS = np.empty(0, np.float32)


def linear(x: np.ndarray, matrix: TiledMatrix, bias: np.ndarray | None = None) -> np.ndarray:
    """Compute `x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]. A row's bits do not depend on the other rows.

    Raises
    ------
    ValueError
        The number of columns of `x` differs from the number of inputs of the matrix.
    """
    if x.shape[1] != matrix.num_inputs:
        raise ValueError(f"x has {x.shape[1]} columns, but the matrix has {matrix.num_inputs} inputs")
    if numba.config.DISABLE_JIT and matrix.num_outputs * matrix.num_inputs > LARGEST_INTERPRETED_PRODUCT:
        return reference.linear(x, dequantize(matrix), bias)
    return multiply(x, tuple(matrix), NO_BIAS if bias is None else bias)


@compiled
def multiply(x, matrix, bias):
    """`linear` for other kernels to call. The matrix is a plain tuple, because Numba receives named ones slowly."""
    codes, scales, minimums, shared, zero, block_size, outputs, _ = matrix
    rows = len(x)
    is_gemv = rows <= GEMV_ROWS
    x = _padded(x, rows if is_gemv else whole_rows(rows), codes.shape[1] * block_size)
    sums = np.empty((len(x), minimums.shape[1]), np.float32)
    _sum_blocks(x, sums)
    product = np.empty((rows, outputs), np.float32)
    if is_gemv:
        _multiply_few_rows(x, sums, codes, zero, scales, minimums, shared, product)
    else:
        _multiply_rows(x, sums, codes, zero, scales, minimums, shared, product)
    add_bias(product, 0, bias)
    return product


@compiled
def add_bias(product, start, bias):
    """Add a bias to the outputs from `start` on: all outputs, or one part of joined matrices."""
    for row in range(len(product) if len(bias) else 0):
        for i in range(len(bias)):
            product[row, start + i] += bias[i]


@compiled
def _padded(x, rows, inputs):
    """Return `x` padded with zeros to `rows` and `inputs`."""
    if x.shape == (rows, inputs):
        return x
    padded = np.zeros((rows, inputs), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


@compiled
def _sum_blocks(x, sums):
    """Sum each row of `x` within each of the `sums.shape[1]` blocks; a block's minimum is multiplied by this sum."""
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
def _multiply_few_rows(x, sums, codes, zero, scales, minimums, shared, product):
    """Compute decode's product. It reads every weight once, so it should run at memory bandwidth.

    Each step handles eight inputs, and the tile's 64 running sums stay in registers between steps. All rows use a tile
    while it is in the processor's cache. The scratch array for the sums is allocated once, before the loop: one
    allocation per tile cost decode 7 % of its time.
    """
    tiles, blocks = codes.shape[0], codes.shape[1]
    block_size = x.shape[1] // blocks
    shares = min(tiles, MAX_SHARES)
    scratch = aligned(2 * shares, LANES)  # for each share: the sums of outputs, then the sums within a block
    for share in prange(shares):
        share = np.int64(share)  # the index of a parallel loop is unsigned
        totals, within = np.uint64(2 * share), np.uint64(2 * share + 1)
        for lane in range(LANES):
            scratch[within, lane] = 0
        for tile in range(share * tiles // shares, (share + 1) * tiles // shares):
            for row in range(len(product)):
                for lane in range(LANES):
                    scratch[totals, lane] = 0
                for block in range(blocks):
                    if row == 0:
                        prefetch(codes, (tile * blocks + block) * codes.strides[1] + AHEAD, codes.strides[1])
                    for step in range(block_size // 8):
                        r, i = np.uint64(row), np.uint64(block * block_size + 8 * step)
                        x0, x1, x2, x3 = x[r, i], x[r, i + U1], x[r, i + U2], x[r, i + U3]
                        x4, x5, x6, x7 = x[r, i + U4], x[r, i + U5], x[r, i + U6], x[r, i + U7]
                        for lane in range(LANES):
                            s = scratch[within, lane]
                            s += x0 * weight(codes, zero, tile, block, step, 0, lane)
                            s += x1 * weight(codes, zero, tile, block, step, 1, lane)
                            s += x2 * weight(codes, zero, tile, block, step, 2, lane)
                            s += x3 * weight(codes, zero, tile, block, step, 3, lane)
                            s += x4 * weight(codes, zero, tile, block, step, 4, lane)
                            s += x5 * weight(codes, zero, tile, block, step, 5, lane)
                            s += x6 * weight(codes, zero, tile, block, step, 6, lane)
                            s += x7 * weight(codes, zero, tile, block, step, 7, lane)
                            scratch[within, lane] = s
                    inputs = sums[np.uint64(row), np.uint64(block)] if len(minimums) else np.float32(0)
                    _add_block(scratch, totals, tile, block, inputs, scales, minimums, shared)
                for lane in range(min(LANES, product.shape[1] - tile * LANES)):
                    product[row, tile * LANES + lane] = scratch[totals, lane]


@inlined
def _add_block(scratch, totals, tile, block, inputs, scales, minimums, shared):
    """Add a block's 64 sums to the sums of outputs: times the scale, plus the minimum times the sum of the inputs.

    The sums of outputs are in row `totals` of `scratch`. The block's sums are in the next row, which is set to zero.
    """
    within, tile, block, group = totals + U1, np.uint64(tile), np.uint64(block), scale_group(scales, shared, block)
    if len(scales) == 0:
        for lane in range(LANES):
            scratch[totals, lane] += scratch[within, lane]
            scratch[within, lane] = 0
    elif len(minimums) == 0:
        for lane in range(LANES):
            scratch[totals, lane] += scratch[within, lane] * scale(scales, shared, tile, block, group, lane)
            scratch[within, lane] = 0
    else:
        for lane in range(LANES):
            t = scratch[totals, lane] + scratch[within, lane] * scale(scales, shared, tile, block, group, lane)
            scratch[totals, lane] = t + inputs * minimum(minimums, shared, tile, block, group, lane)
            scratch[within, lane] = 0


@compiled_parallel
def _multiply_rows(x, sums, codes, zero, scales, minimums, shared, product):
    """Compute prefill's product, [T, I] -> [T, O]. Every row has the same chain; a block is widened once for many rows.

    A piece of work is up to ROW_BLOCK rows, fewer if there would be too few pieces for the threads, times three tiles
    of outputs. With few rows it is one tile, because reading the weights then takes most of the time, and consecutive
    memory is read fastest.

    The innermost loops work on the *scratch* array, which is small enough to stay in the processor's cache: four rows
    of sums within a block, then the block's widened weights, then its scales and its minimums. The number of rows of
    `x` is a multiple of four.
    """
    tiles, blocks = codes.shape[0], codes.shape[1]
    block_size = x.shape[1] // blocks
    at_once = TILES_AT_ONCE if len(x) > 8 else 1
    column_blocks, row_block = -(-tiles // at_once), ROW_BLOCK
    while row_block > 8 and column_blocks * -(-len(x) // row_block) < MIN_PIECES:
        row_block //= 2
    row_blocks = -(-len(x) // row_block)
    for item in prange(column_blocks * row_blocks):
        column, piece = divmod(np.int64(item), row_blocks)  # the index of a parallel loop is unsigned
        first_tile, first_row = column * at_once, piece * row_block
        width, rows = min(at_once, tiles - first_tile), min(row_block, len(x) - first_row)
        lanes = width * LANES
        # The width is constant, because loops are faster if the compiler knows the distance between rows.
        totals = aligned(rows, TILES_AT_ONCE * LANES)
        scratch = aligned(ROWS + block_size + 2, TILES_AT_ONCE * LANES)
        totals[:] = 0
        scratch[:] = 0
        for block in range(blocks):
            for i in range(width):
                _widen_block(codes, zero, scales, minimums, shared, first_tile + i, block, scratch, i * LANES)
            for row in range(0, rows, ROWS):
                multiply_add(scratch, x, first_row + row, block * block_size, scratch, ROWS, 0, block_size, lanes)
                _add_blocks(totals, row, scratch, lanes, sums, first_row + row, block)
        left = first_tile * LANES
        for row in range(min(rows, len(product) - first_row)):
            for lane in range(min(lanes, product.shape[1] - left)):
                product[first_row + row, left + lane] = totals[row, lane]


@inlined
def _widen_block(codes, zero, scales, minimums, shared, tile, block, scratch, left):
    """Widen one block of a tile, its scales and its minimums to float32 in `scratch`, from lane `left` on."""
    tile, block, left = np.uint64(tile), np.uint64(block), np.uint64(left)
    block_size = len(scratch) - ROWS - 2
    for step in range(block_size // 8):
        k = np.uint64(ROWS + 8 * step)
        for lane in range(LANES):
            o = left + np.uint64(lane)
            scratch[k, o] = weight(codes, zero, tile, block, step, 0, lane)
            scratch[k + U1, o] = weight(codes, zero, tile, block, step, 1, lane)
            scratch[k + U2, o] = weight(codes, zero, tile, block, step, 2, lane)
            scratch[k + U3, o] = weight(codes, zero, tile, block, step, 3, lane)
            scratch[k + U4, o] = weight(codes, zero, tile, block, step, 4, lane)
            scratch[k + U5, o] = weight(codes, zero, tile, block, step, 5, lane)
            scratch[k + U6, o] = weight(codes, zero, tile, block, step, 6, lane)
            scratch[k + U7, o] = weight(codes, zero, tile, block, step, 7, lane)
    k, group = np.uint64(ROWS + block_size), scale_group(scales, shared, block)
    for lane in range(LANES):
        o = left + np.uint64(lane)
        scratch[k, o] = scale(scales, shared, tile, block, group, lane) if len(scales) else np.float32(1)
    if len(minimums):
        for lane in range(LANES):
            scratch[k + U1, left + np.uint64(lane)] = minimum(minimums, shared, tile, block, group, lane)


@inlined
def _add_blocks(totals, row, scratch, lanes, sums, sums_row, block):
    """Apply `_add_block` to four rows and several tiles, whose scales and minimums are in `scratch`."""
    scales = np.uint64(len(scratch) - 2)  # the row of the scales; the minimums follow
    for r in range(ROWS):
        t, r = np.uint64(row + r), np.uint64(r)
        if sums.shape[1] == 0:
            for lane in range(lanes):
                totals[t, lane] += scratch[r, lane] * scratch[scales, lane]
                scratch[r, lane] = 0
        else:
            inputs = sums[np.uint64(sums_row) + r, np.uint64(block)]
            for lane in range(lanes):
                total = totals[t, lane] + scratch[r, lane] * scratch[scales, lane]
                totals[t, lane] = total + inputs * scratch[scales + U1, lane]
                scratch[r, lane] = 0
