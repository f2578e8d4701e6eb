"""The innermost loop of matrix products and of attention: four rows of numbers times a tile.

A processor with AVX-512 performs two multiply-adds of 16 numbers per cycle, but reads only two such vectors and writes
one. A number that was read must therefore be used several times: each number of the tile for four rows, and each number
of a row for all lanes.

For products, the loop's data is in one *scratch* array: four rows of sums, with the tile below them. The array starts
on a cache line, because a vector that straddles two lines is read twice; this made products 1.5 times as fast. (Two
separate arrays that both start on a cache line are as fast: measured, 315 and 307 GFLOP/s with 8 bits, 302 and 333 with
4.)
"""

from __future__ import annotations

import numpy as np

from minillm.ops.jit.compiling import compiled, inlined
from minillm.ops.jit.float16 import widen

ROWS = 4  # rows that use each number of a tile; their sums of 64 lanes fill half of AVX-512's registers

# Indices are unsigned. For signed indices, Numba tests for negative values, which costs as much as the work itself.
U0, U1, U2, U3 = map(np.uint64, range(4))


@compiled
def aligned(rows, lanes):
    """Return an uninitialized float32 array [rows, lanes] that starts at a multiple of 64 bytes.

    That is a cache line on nearly all processors; on others the kernels are slower but still correct.
    """
    memory = np.empty(rows * lanes + 16, np.float32)
    skip = -(memory.ctypes.data // 4) % 16
    return memory[skip : skip + rows * lanes].reshape(rows, lanes)


@inlined
def multiply_add(sums, x, row, first, tile, top, left, depth, lanes):
    """Add x[row + r, first + k] * tile[top + k, left + lane] to sums[r, lane] for k = 0 to depth - 1, in this order.

    This is done for four rows r and for `lanes` lanes. Each pass over the lanes handles four inputs, so the sums are
    loaded and stored a quarter as often.
    """
    a, b, c, d = np.uint64(row), np.uint64(row + 1), np.uint64(row + 2), np.uint64(row + 3)
    for turn in range(depth // 4):
        i, k = np.uint64(first + 4 * turn), np.uint64(top + 4 * turn)
        a0, a1, a2, a3 = x[a, i], x[a, i + U1], x[a, i + U2], x[a, i + U3]
        b0, b1, b2, b3 = x[b, i], x[b, i + U1], x[b, i + U2], x[b, i + U3]
        c0, c1, c2, c3 = x[c, i], x[c, i + U1], x[c, i + U2], x[c, i + U3]
        d0, d1, d2, d3 = x[d, i], x[d, i + U1], x[d, i + U2], x[d, i + U3]
        for lane in range(lanes):
            o = np.uint64(left) + np.uint64(lane)
            w0, w1 = widen(tile[k, o]), widen(tile[k + U1, o])
            w2, w3 = widen(tile[k + U2, o]), widen(tile[k + U3, o])
            sa, sb, sc, sd = sums[U0, lane], sums[U1, lane], sums[U2, lane], sums[U3, lane]
            sa += a0 * w0
            sb += b0 * w0
            sc += c0 * w0
            sd += d0 * w0
            sa += a1 * w1
            sb += b1 * w1
            sc += c1 * w1
            sd += d1 * w1
            sa += a2 * w2
            sb += b2 * w2
            sc += c2 * w2
            sd += d2 * w2
            sa += a3 * w3
            sb += b3 * w3
            sc += c3 * w3
            sd += d3 * w3
            sums[U0, lane], sums[U1, lane], sums[U2, lane], sums[U3, lane] = sa, sb, sc, sd
    for k in range(depth // 4 * 4, depth):
        for r in range(ROWS):
            factor = x[np.uint64(row + r), np.uint64(first + k)]
            for lane in range(lanes):
                sums[np.uint64(r), lane] += factor * widen(tile[np.uint64(top + k), np.uint64(left) + np.uint64(lane)])


@inlined
def whole_rows(rows):
    """Round `rows` up to a multiple of ROWS."""
    return -(-rows // ROWS) * ROWS
