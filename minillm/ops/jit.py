"""The operations as compiled loops (Numba): the default on a CPU.

Why the bits never depend on the batch. Every number that comes out is one sequential chain of multiply-adds,
written as one loop over k, and SIMD lanes run across *outputs*, never across k. No sum is ever split or
reordered, so one row and five hundred rows, one thread and sixteen, give the same result to the last bit.
`fastmath` is limited to what keeps that true: `contract` (fuse a multiply and an add) and `nsz` (ignore the sign
of zero). `reassoc`, which would let the compiler reorder sums, is never on.

Weights lie in *tiles* of 64 outputs, the lanes: `[O/64, ..., 64]`, so the innermost loop runs along memory.
A kernel is short, and indexes whole arrays: handing slices to a helper costs more than the helper's work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A thread that has done its share of a loop waits for the others by spinning, for long by default: another busy
# program on the machine then makes decode 50 times slower, since the spinner takes the core that the last share
# needs. Spinning briefly and then sleeping costs 5 % on an idle machine. Read once, when OpenMP is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
import numpy as np
from numba import njit, prange
from numba.core import event

from minillm.ops import reference
from minillm.quantization import QuantizedMatrix

LANES = 64  # outputs a tile holds; measured: clearly faster than 16 or 32
FLOAT_BLOCK = 32  # inputs a block holds where the weights are floats and no scale says how many

compiled = njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
compiled_parallel = njit(cache=True, nogil=True, fastmath={"contract", "nsz"}, parallel=True)

# Interpreted (NUMBA_DISABLE_JIT=1), a product with more weights than this goes to the reference, which hands
# it to NumPy: as a Python loop, one token of the default model would take minutes. Smaller ones stay steppable.
LARGEST_INTERPRETED_PRODUCT = 100_000


@dataclass(frozen=True)
class TiledMatrix:
    """A weight matrix [O, I] in tiles of 64 outputs, its inputs in blocks: `codes[tile, block, k, lane]`.

    Quantized weights keep their integer codes, with a scale and perhaps a minimum a block. Float weights are the
    case of codes that need neither. What is missing to whole tiles and blocks is zero.
    """

    codes: np.ndarray  # int8 or float32 [O/64, I/Q, Q, 64]
    scales: np.ndarray  # float32 [O/64, I/Q, 64], or of length 0
    minimums: np.ndarray  # the same
    shape: tuple[int, int]  # (O, I)

    @property
    def padded_inputs(self) -> int:
        """I, rounded up to whole blocks."""
        return self.codes.shape[1] * self.codes.shape[2]


# --- weights -----------------------------------------------------------------------------------------------------


def as_vector(values: np.ndarray) -> np.ndarray:
    """A norm's weights or a layer's bias, copied: Numba compiles anew for arrays that cannot be written to."""
    return np.array(values, np.float32)


def as_matrix(weights: np.ndarray | QuantizedMatrix) -> TiledMatrix:
    """Lay a weight matrix [O, I] out in tiles; integer codes stay integer codes."""
    nothing = np.empty((0, 0, LANES), np.float32)
    if not isinstance(weights, QuantizedMatrix):
        codes = tile_rows(np.ascontiguousarray(weights, np.float32), FLOAT_BLOCK)
        return TiledMatrix(codes, nothing, nothing, weights.shape)
    outputs, _, block_size = weights.codes.shape
    if block_size % 8:
        raise ValueError(
            f"blocks of {block_size} inputs; the kernels take eight inputs a turn, so blocks of 8, 16, 32, ..."
        )
    return TiledMatrix(
        codes=tile_rows(weights.codes.reshape(outputs, -1), block_size),
        scales=tile_rows(weights.scales, 1)[:, :, 0],
        minimums=nothing if weights.minimums is None else tile_rows(weights.minimums, 1)[:, :, 0],
        shape=weights.shape,
    )


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """[O, I] -> [O/64, I/Q, Q, 64]: 64 rows become 64 lanes; what is missing to whole tiles and blocks is zero."""
    outputs, inputs = matrix.shape
    missing = (-outputs % LANES, -inputs % block_size)
    if any(missing):
        matrix = np.pad(matrix, ((0, missing[0]), (0, missing[1])))
    tiled = matrix.reshape(-1, LANES, matrix.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiled).reshape(len(tiled), -1, block_size, LANES)


def dequantize(matrix: TiledMatrix) -> np.ndarray:
    """Back from tiles to a plain float32 matrix [O, I], for those who want to look at it."""
    values = matrix.codes.astype(np.float32)
    if len(matrix.scales):
        values *= matrix.scales[:, :, None, :]
    if len(matrix.minimums):
        values += matrix.minimums[:, :, None, :]
    outputs, inputs = matrix.shape
    return values.transpose(0, 3, 1, 2).reshape(-1, matrix.padded_inputs)[:outputs, :inputs]


def to_numpy(array: np.ndarray) -> np.ndarray:
    """This backend computes with NumPy arrays already."""
    return array


def embed(token_ids: np.ndarray, matrix: TiledMatrix) -> np.ndarray:
    """Row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]."""
    rows = np.empty((len(token_ids), matrix.shape[1]), np.float32)
    _embed(token_ids, matrix.codes, matrix.scales, matrix.minimums, rows)
    return rows


@compiled
def _embed(token_ids, codes, scales, minimums, rows):
    """A token's row is one lane of its tile."""
    block_size = codes.shape[2]
    for t in range(rows.shape[0]):
        tile, lane = divmod(token_ids[t], LANES)
        for i in range(rows.shape[1]):
            block, k = divmod(i, block_size)
            value = np.float32(codes[tile, block, k, lane])
            if len(scales):
                value *= scales[tile, block, lane]
            if len(minimums):
                value += minimums[tile, block, lane]
            rows[t, i] = value


# --- matrix products ---------------------------------------------------------------------------------------------


def linear(x: np.ndarray, matrix: TiledMatrix, bias: np.ndarray | None = None) -> np.ndarray:
    """`x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]; a row's bits do not depend on the rows beside it."""
    outputs, inputs = matrix.shape
    product = np.empty((len(x), outputs), np.float32)
    if numba.config.DISABLE_JIT and outputs * inputs > LARGEST_INTERPRETED_PRODUCT:
        product[:] = reference.linear(x, dequantize(matrix))
    else:
        if inputs < matrix.padded_inputs:
            x = np.pad(x, ((0, 0), (0, matrix.padded_inputs - inputs)))
        sums = np.empty((len(x), matrix.minimums.shape[1]), np.float32)
        _sum_blocks(x, sums)
        multiply = _multiply_one_row if len(x) == 1 else _multiply_rows
        multiply(x, sums, matrix.codes, matrix.scales, matrix.minimums, product)
    return product if bias is None else product + bias


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
def _multiply_one_row(x, sums, codes, scales, minimums, product):
    """Decode's product: reads every weight once, so it runs at the memory's speed.

    A block's chain starts at zero and walks its inputs in order; then the block's scale, and its minimum, add it
    to the output's chain. Eight inputs a turn keep the running sums in registers between a load and a store.
    """
    tiles, blocks, block_size, _ = codes.shape
    outputs = product.shape[1]
    for tile in prange(tiles):
        total = np.zeros(LANES, np.float32)
        partial = np.empty(LANES, np.float32)
        for block in range(blocks):
            partial[:] = 0
            for k in range(0, block_size, 8):
                i = block * block_size + k
                x0, x1, x2, x3 = x[0, i], x[0, i + 1], x[0, i + 2], x[0, i + 3]
                x4, x5, x6, x7 = x[0, i + 4], x[0, i + 5], x[0, i + 6], x[0, i + 7]
                for lane in range(LANES):
                    s = partial[lane]
                    s += x0 * np.float32(codes[tile, block, k, lane])
                    s += x1 * np.float32(codes[tile, block, k + 1, lane])
                    s += x2 * np.float32(codes[tile, block, k + 2, lane])
                    s += x3 * np.float32(codes[tile, block, k + 3, lane])
                    s += x4 * np.float32(codes[tile, block, k + 4, lane])
                    s += x5 * np.float32(codes[tile, block, k + 5, lane])
                    s += x6 * np.float32(codes[tile, block, k + 6, lane])
                    s += x7 * np.float32(codes[tile, block, k + 7, lane])
                    partial[lane] = s
            for lane in range(LANES):
                total[lane] += partial[lane] * (scales[tile, block, lane] if len(scales) else np.float32(1))
            if len(minimums):
                for lane in range(LANES):
                    total[lane] += sums[0, block] * minimums[tile, block, lane]
        for lane in range(min(LANES, outputs - tile * LANES)):
            product[0, tile * LANES + lane] = total[lane]


@compiled_parallel
def _multiply_rows(x, sums, codes, scales, minimums, product):
    """Prefill's product: the same chain a row, but each block of codes is widened once and serves every row.

    Four rows share each weight that is loaded, and their 4 x 64 running sums just fit the registers. Four inputs
    a turn keep them there. The last one to three rows go alone, through the same chain.
    """
    tiles, blocks, block_size, _ = codes.shape
    rows, outputs = product.shape
    fours = rows - rows % 4
    for tile in prange(tiles):
        total = np.zeros((rows, LANES), np.float32)
        partial = np.empty((4, LANES), np.float32)
        weights = np.empty((block_size, LANES), np.float32)
        scale = np.ones(LANES, np.float32)
        for block in range(blocks):
            first = block * block_size
            for k in range(block_size):
                for lane in range(LANES):
                    weights[k, lane] = np.float32(codes[tile, block, k, lane])
            if len(scales):
                for lane in range(LANES):
                    scale[lane] = scales[tile, block, lane]
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
                    for lane in range(LANES):
                        total[row + r, lane] += partial[r, lane] * scale[lane]
            for row in range(fours, rows):
                partial[0, :] = 0
                for k in range(block_size):
                    for lane in range(LANES):
                        partial[0, lane] += x[row, first + k] * weights[k, lane]
                for lane in range(LANES):
                    total[row, lane] += partial[0, lane] * scale[lane]
            if len(minimums):
                for row in range(rows):
                    for lane in range(LANES):
                        total[row, lane] += sums[row, block] * minimums[tile, block, lane]
        for row in range(rows):
            for lane in range(min(LANES, outputs - tile * LANES)):
                product[row, tile * LANES + lane] = total[row, lane]


# --- norm, rotary embedding, activation --------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale every row of [T, D] to a root mean square of one, then by `weight`."""
    normed = np.empty_like(x)
    _rms_norm(x, weight, np.float32(eps), normed)
    return normed


@compiled
def _rms_norm(x, weight, eps, normed):
    rows, hidden = x.shape
    for row in range(rows):
        squares = np.float32(0)
        for i in range(hidden):
            squares += x[row, i] * x[row, i]
        scale = np.float32(1) / math.sqrt(squares / np.float32(hidden) + eps)
        for i in range(hidden):
            normed[row, i] = x[row, i] * scale * weight[i]


def rotary_angles(positions: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [T, K/2] of the angles `position * frequency` that rotary embedding turns by."""
    cosines = np.empty((len(positions), len(frequencies)), np.float32)
    sines = np.empty_like(cosines)
    _rotary_angles(positions, frequencies, cosines, sines)
    return cosines, sines


@compiled
def _rotary_angles(positions, frequencies, cosines, sines):
    """A loop of scalar sines, for NumPy's work on vectors, where a number's bits could depend on its neighbours."""
    for t in range(len(positions)):
        for i in range(len(frequencies)):
            angle = np.float32(positions[t]) * frequencies[i]
            cosines[t, i] = math.cos(angle)
            sines[t, i] = math.sin(angle)


def rotate(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    """Rotary position embedding: turn pair (i, i + K/2) of every head [T, H, K] by its angle."""
    rotated = np.empty_like(heads)
    _rotate(heads, cosines, sines, rotated)
    return rotated


@compiled
def _rotate(heads, cosines, sines, rotated):
    tokens, num_heads, head_dim = heads.shape
    half = head_dim // 2
    for t in range(tokens):
        for h in range(num_heads):
            for i in range(half):
                first, second = heads[t, h, i], heads[t, h, i + half]
                rotated[t, h, i] = first * cosines[t, i] - second * sines[t, i]
                rotated[t, h, i + half] = second * cosines[t, i] + first * sines[t, i]


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The gated activation of the feed-forward layer, `silu(gate) * up`: [T, F] twice -> [T, F]."""
    gated = np.empty_like(gate)
    _swiglu(gate, up, gated)
    return gated


@compiled_parallel
def _swiglu(gate, up, gated):
    rows, features = gate.shape
    for row in prange(rows):
        for i in range(features):
            g = gate[row, i]
            e = math.exp(-abs(g))  # at most 1: exp of a large number would overflow
            gated[row, i] = g * (np.float32(1) if g >= 0 else e) / (np.float32(1) + e) * up[row, i]


# --- attention over the paged cache ------------------------------------------------------------------------------


@compiled
def write_kv(keys, values, key_blocks, value_blocks, layer, slots):
    """Store each token's key and value [T, G, K] at its slot in a layer of the cache; see `reference`."""
    tokens, kv_heads, head_dim = keys.shape
    block_size = value_blocks.shape[3]
    for t in range(tokens):
        block, offset = divmod(slots[t], block_size)
        for g in range(kv_heads):
            for k in range(head_dim):
                key_blocks[block, layer, g, k, offset] = keys[t, g, k]
                value_blocks[block, layer, g, offset, k] = values[t, g, k]


def attention(
    queries: np.ndarray,
    key_blocks: np.ndarray,
    value_blocks: np.ndarray,
    layer: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
) -> np.ndarray:
    """Causal attention of every token over its own sequence's keys [T, H, K] -> [T, H, K]; see `reference`."""
    attended = np.empty_like(queries)
    sequence_of = np.repeat(np.arange(len(block_tables), dtype=np.int32), np.diff(query_starts))
    _attention(queries, key_blocks, value_blocks, layer, positions, sequence_of, block_tables, attended)
    return attended


@compiled_parallel
def _attention(queries, key_blocks, value_blocks, layer, positions, sequence_of, block_tables, attended):
    """One query at a time: score every key it may see, softmax, then the weighted sum of values.

    Each of the three walks the keys in the order of their positions, so a query's result depends on its own
    sequence alone, and not on how that is cut into blocks or chunks. Work is shared head by head: the late
    tokens of a prompt see more keys than the early ones, but all heads of a token see as many.
    """
    tokens, num_heads, head_dim = queries.shape
    _, _, kv_heads, block_size, _ = value_blocks.shape
    group = num_heads // kv_heads
    scale = np.float32(1 / math.sqrt(head_dim))
    for item in prange(num_heads * tokens):
        h, t = divmod(np.int64(item), tokens)  # Numba counts a parallel loop in unsigned numbers
        g = h // group
        table = sequence_of[t]
        length = positions[t] + 1
        scores = np.zeros(length, np.float32)
        for start in range(0, length, block_size):
            block = block_tables[table, start // block_size]
            for k in range(head_dim):
                q = queries[t, h, k] * scale
                for offset in range(min(block_size, length - start)):
                    scores[start + offset] += q * key_blocks[block, layer, g, k, offset]
        largest = scores[0]
        for position in range(1, length):
            largest = max(largest, scores[position])
        total = np.float32(0)
        for position in range(length):
            scores[position] = math.exp(scores[position] - largest)
            total += scores[position]
        mean = np.zeros(head_dim, np.float32)
        for position in range(length):
            block, offset = block_tables[table, position // block_size], position % block_size
            for k in range(head_dim):
                mean[k] += scores[position] * value_blocks[block, layer, g, offset, k]
        for k in range(head_dim):
            attended[t, h, k] = mean[k] / total


# --- the compiler and its threads ---------------------------------------------------------------------------------


def set_num_threads(threads: int | None) -> None:
    """Let this thread's parallel loops use so many cores; None means all there are. It changes no result's bits.

    Raises
    ------
    ValueError
        Fewer than one, or more than there are.
    """
    most = numba.config.NUMBA_NUM_THREADS
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"threads is {threads}; this machine has 1 to {most} to give")
    numba.set_num_threads(threads or most)


@contextmanager
def announcing_compilation(announce: Callable[[str], None]) -> Iterator[None]:
    """While the `with` block runs, say so, once, when a kernel has to be compiled: that takes a while.

    Kernels are compiled when first called, for the machine they run on, and kept beside this file (or, if that
    folder cannot be written, in the user's cache folder). Later processes load them in milliseconds.
    """

    class Listener(event.Listener):
        announced = False

        def on_start(self, compilation):
            if not self.announced:
                announce("compiling the kernels for this machine (once, some ten seconds) ...")
                self.announced = True

        def on_end(self, compilation):
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
