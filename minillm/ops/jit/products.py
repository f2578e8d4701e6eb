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
from minillm.ops.jit.microkernel import ROWS, U1, U2, U3, aligned, multiply_add, whole_rows
from minillm.ops.jit.prefetching import AHEAD, prefetch
from minillm.ops.jit.scales import group_of, minimum, scale
from minillm.ops.jit.tiles import TiledMatrix, dequantize
from minillm.ops.jit.weight_formats import LANES, weight

# With the compiler off, a product with more weights than this is handed to NumPy: as a Python loop, one token of the
# default model would take minutes. Smaller products stay steppable.
LARGEST_INTERPRETED_PRODUCT = 100_000

FEW = 3  # rows for which widening a block of weights does not pay
SHARES = 256  # of the tiles that there are, at most: more than threads, so that all end nearly together
WIDE = 3  # tiles of outputs that many rows are multiplied with at once: measured, 15 % faster than one
SLAB = 64  # rows that one thread takes at once, at most
PIECES = 12  # of work that there should be: threads then end nearly together

U4, U5, U6, U7 = map(np.uint64, range(4, 8))
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
    codes, scales, minimums, shared, zero, block_size, outputs, _ = matrix
    rows = len(x)
    few = rows <= FEW
    x = _padded(x, rows if few else whole_rows(rows), codes.shape[1] * block_size)
    sums = np.empty((len(x), minimums.shape[1]), np.float32)
    _sum_blocks(x, sums)
    product = np.empty((rows, outputs), np.float32)
    if few:
        _multiply_few_rows(x, sums, codes, zero, scales, minimums, shared, product)
    else:
        _multiply_rows(x, sums, codes, zero, scales, minimums, shared, product)
    add_bias(product, 0, bias)
    return product


@compiled
def add_bias(product, start, bias):
    """Add a bias to the outputs from `start` on: of one matrix, or of one of several that were multiplied as one."""
    for row in range(len(product) if len(bias) else 0):
        for i in range(len(bias)):
            product[row, start + i] += bias[i]


@compiled
def _padded(x, rows, inputs):
    """`x` with zeros added to so many rows and inputs."""
    if x.shape == (rows, inputs):
        return x
    padded = np.zeros((rows, inputs), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


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
def _multiply_few_rows(x, sums, codes, zero, scales, minimums, shared, product):
    """Decode's product: brings in every weight once, so it should run at the memory's speed.

    Eight inputs a step; the tile's 64 running sums stay in registers from step to step. Rows take turns at a tile,
    which is still in the cache for the second. Room for the sums is made before: made anew for every tile, it cost
    decode 7 % of its time.
    """
    tiles, blocks = codes.shape[0], codes.shape[1]
    block_size = x.shape[1] // blocks
    shares = min(tiles, SHARES)
    room = aligned(2 * shares, LANES)  # of a share: the outputs' sums, and below them those within a block
    for share in prange(shares):
        share = np.int64(share)  # Numba counts a parallel loop in unsigned numbers
        mine, below = np.uint64(2 * share), np.uint64(2 * share + 1)
        for lane in range(LANES):
            room[below, lane] = 0
        for tile in range(share * tiles // shares, (share + 1) * tiles // shares):
            for row in range(len(product)):
                for lane in range(LANES):
                    room[mine, lane] = 0
                for block in range(blocks):
                    if row == 0:
                        prefetch(codes, (tile * blocks + block) * codes.strides[1] + AHEAD, codes.strides[1])
                    for step in range(block_size // 8):
                        r, i = np.uint64(row), np.uint64(block * block_size + 8 * step)
                        x0, x1, x2, x3 = x[r, i], x[r, i + U1], x[r, i + U2], x[r, i + U3]
                        x4, x5, x6, x7 = x[r, i + U4], x[r, i + U5], x[r, i + U6], x[r, i + U7]
                        for lane in range(LANES):
                            s = room[below, lane]
                            s += x0 * weight(codes, zero, tile, block, step, 0, lane)
                            s += x1 * weight(codes, zero, tile, block, step, 1, lane)
                            s += x2 * weight(codes, zero, tile, block, step, 2, lane)
                            s += x3 * weight(codes, zero, tile, block, step, 3, lane)
                            s += x4 * weight(codes, zero, tile, block, step, 4, lane)
                            s += x5 * weight(codes, zero, tile, block, step, 5, lane)
                            s += x6 * weight(codes, zero, tile, block, step, 6, lane)
                            s += x7 * weight(codes, zero, tile, block, step, 7, lane)
                            room[below, lane] = s
                    inputs = sums[np.uint64(row), np.uint64(block)] if len(minimums) else np.float32(0)
                    _add_block(room, mine, tile, block, inputs, scales, minimums, shared)
                for lane in range(min(LANES, product.shape[1] - tile * LANES)):
                    product[row, tile * LANES + lane] = room[mine, lane]


@inlined
def _add_block(room, mine, tile, block, inputs, scales, minimums, shared):
    """Take a block's 64 sums into the outputs' chains: times the scale, plus the minimum times the sum of the inputs.

    The outputs' sums are in row `mine` of `room`; those of the block, in the row below, are zero afterwards.
    """
    below, tile, block, group = mine + U1, np.uint64(tile), np.uint64(block), group_of(scales, shared, block)
    if len(scales) == 0:
        for lane in range(LANES):
            room[mine, lane] += room[below, lane]
            room[below, lane] = 0
    elif len(minimums) == 0:
        for lane in range(LANES):
            room[mine, lane] += room[below, lane] * scale(scales, shared, tile, block, group, lane)
            room[below, lane] = 0
    else:
        for lane in range(LANES):
            t = room[mine, lane] + room[below, lane] * scale(scales, shared, tile, block, group, lane)
            room[mine, lane] = t + inputs * minimum(minimums, shared, tile, block, group, lane)
            room[below, lane] = 0


@compiled_parallel
def _multiply_rows(x, sums, codes, zero, scales, minimums, shared, product):
    """Prefill's product, [T, I] -> [T, O]: the same chain a row; a block of weights is widened once for many rows.

    A piece of work is 64 rows, fewer where pieces would be too few for the threads, times three tiles of outputs; times
    one, where rows are so few that it is the weights' coming that takes the time: they come best from one place.

    The *bench* is what the innermost loops work on, small enough to stay in the cache: four rows of sums within a
    block, below them the block's weights widened, below those its scales and its minimums. `x` is of whole fours of
    rows.
    """
    tiles, blocks = codes.shape[0], codes.shape[1]
    block_size = x.shape[1] // blocks
    wide = WIDE if len(x) > 8 else 1
    groups, slab_size = -(-tiles // wide), SLAB
    while slab_size > 8 and groups * -(-len(x) // slab_size) < PIECES:
        slab_size //= 2
    slabs = -(-len(x) // slab_size)
    for item in prange(groups * slabs):
        group, slab = divmod(np.int64(item), slabs)  # Numba counts a parallel loop in unsigned numbers
        first_tile, first_row = group * wide, slab * slab_size
        width, rows = min(wide, tiles - first_tile), min(slab_size, len(x) - first_row)
        lanes = width * LANES
        # As wide in any case: where the compiler knows the distance from row to row, the loops become faster.
        totals = aligned(rows, WIDE * LANES)
        bench = aligned(ROWS + block_size + 2, WIDE * LANES)
        totals[:] = 0
        bench[:] = 0
        for block in range(blocks):
            for i in range(width):
                _widen_block(codes, zero, scales, minimums, shared, first_tile + i, block, bench, i * LANES)
            for row in range(0, rows, ROWS):
                multiply_add(bench, x, first_row + row, block * block_size, bench, ROWS, 0, block_size, lanes)
                _add_blocks(totals, row, bench, lanes, sums, first_row + row, block)
        left = first_tile * LANES
        for row in range(min(rows, len(product) - first_row)):
            for lane in range(min(lanes, product.shape[1] - left)):
                product[first_row + row, left + lane] = totals[row, lane]


@inlined
def _widen_block(codes, zero, scales, minimums, shared, tile, block, bench, left):
    """A tile's weights of one block, its scales and its minimums, as float32 onto the bench, from lane `left` on."""
    tile, block, left = np.uint64(tile), np.uint64(block), np.uint64(left)
    block_size = len(bench) - ROWS - 2
    for step in range(block_size // 8):
        k = np.uint64(ROWS + 8 * step)
        for lane in range(LANES):
            o = left + np.uint64(lane)
            bench[k, o] = weight(codes, zero, tile, block, step, 0, lane)
            bench[k + U1, o] = weight(codes, zero, tile, block, step, 1, lane)
            bench[k + U2, o] = weight(codes, zero, tile, block, step, 2, lane)
            bench[k + U3, o] = weight(codes, zero, tile, block, step, 3, lane)
            bench[k + U4, o] = weight(codes, zero, tile, block, step, 4, lane)
            bench[k + U5, o] = weight(codes, zero, tile, block, step, 5, lane)
            bench[k + U6, o] = weight(codes, zero, tile, block, step, 6, lane)
            bench[k + U7, o] = weight(codes, zero, tile, block, step, 7, lane)
    k, group = np.uint64(ROWS + block_size), group_of(scales, shared, block)
    for lane in range(LANES):
        o = left + np.uint64(lane)
        bench[k, o] = scale(scales, shared, tile, block, group, lane) if len(scales) else np.float32(1)
    if len(minimums):
        for lane in range(LANES):
            bench[k + U1, left + np.uint64(lane)] = minimum(minimums, shared, tile, block, group, lane)


@inlined
def _add_blocks(totals, row, bench, lanes, sums, sums_row, block):
    """`_add_block` for four rows and several tiles, whose scales and minimums are on the bench."""
    scale = np.uint64(len(bench) - 2)
    for r in range(ROWS):
        t, r = np.uint64(row + r), np.uint64(r)
        if sums.shape[1] == 0:
            for lane in range(lanes):
                totals[t, lane] += bench[r, lane] * bench[scale, lane]
                bench[r, lane] = 0
        else:
            inputs = sums[np.uint64(sums_row) + r, np.uint64(block)]
            for lane in range(lanes):
                total = totals[t, lane] + bench[r, lane] * bench[scale, lane]
                totals[t, lane] = total + inputs * bench[scale + U1, lane]
                bench[r, lane] = 0
