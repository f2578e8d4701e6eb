"""Weights laid out for the kernels: in tiles of 64 outputs, whatever they are stored as.

SIMD runs along memory, so what lies next to each other must be what is computed at once: 64 outputs, the lanes. A
weight matrix [O, I] becomes `[O/64, I/Q, Q, 64]`: tile of outputs, block of inputs, input within the block, lane.
Weights come in four forms, and `weight` reads any of them:

    float32     as they are
    bfloat16    the upper half of a float32, in uint16
    8 bits      codes from 0 to 255, those of four neighbouring inputs in one word of 32 bits: [O/64, I/Q, Q/4, 64]
    4 bits      codes from 0 to 15, those of eight neighbouring inputs in one word: [O/64, I/Q, Q/8, 64]

Integer codes come with a scale, and perhaps a minimum, per block and output (see `minillm/quantization`), in float16
where nothing is lost by it.

4-bit weights stay 4 bits wide: decode waits for memory, and so a product with them takes half the time. The form
matters. Two codes a byte, as files have it, came to half the speed of words, for widening a byte to a lane is what a
processor with AVX-512 is slowest at; a word is loaded once and serves eight times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numba import prange
from numba.extending import overload
from numba.np.numpy_support import as_dtype

from minillm.ops.jit.compiling import compiled_parallel
from minillm.ops.jit.halves import as_halves
from minillm.quantization import QuantizedMatrix

LANES = 64  # outputs a tile holds; measured: clearly faster than 16 or 32
FLOAT_BLOCK = 32  # inputs a block holds where the weights are floats and no scale says how many

# Of a float32 of 2^23 or a little more, the fraction's lowest bit counts one. So an integer's bits put there, and 2^23
# taken off again, make the integer a float, exactly, and faster than the conversion instruction. Where the integer lies
# `place` bits further up in its word it need not be moved: then it is 2^(23 - place) whose bit there counts one.
EXPONENT = np.uint32(127 + 23)  # of 2^23, as float32 writes exponents


class TiledMatrix(NamedTuple):
    """A weight matrix [O, I] in tiles. What fills them up to whole ones is never seen: `x` is zero there, or the sums
    are not looked at.

    A named tuple, so that its fields travel as one; `multiply` gets it as a plain one, which Numba receives faster.
    """

    codes: np.ndarray  # [O/64, I/Q, Q or Q/4 or Q/8, 64], in one of the four forms
    scales: np.ndarray  # [O/64, I/Q, 64], float32 or the bits of float16; of length 0 for floats
    minimums: np.ndarray  # the same, or of length 0 where the type has none
    zero: np.float32  # of integer codes: the code that means 0
    block_size: int  # Q
    num_outputs: int  # O
    num_inputs: int  # I

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, I)`, the shape of the matrix it stands for."""
        return self.num_outputs, self.num_inputs

    def __repr__(self):
        kept = NAMES[self.codes.dtype]
        return f"TiledMatrix({self.num_outputs} x {self.num_inputs}, {kept}, {num_bytes(self) / 1e6:.1f} MB)"


def num_bytes(matrix: TiledMatrix) -> int:
    """Bytes that reading the whole matrix moves."""
    return matrix.codes.nbytes + matrix.scales.nbytes + matrix.minimums.nbytes


def as_vector(values: np.ndarray) -> np.ndarray:
    """A norm's weights or a layer's bias, copied: Numba compiles anew for arrays that cannot be written to."""
    return np.array(values, np.float32)


def to_numpy(array: np.ndarray) -> np.ndarray:
    """This backend computes with NumPy arrays already."""
    return array


def as_matrix(weights: np.ndarray | QuantizedMatrix) -> TiledMatrix:
    """Lay a weight matrix [O, I] out in tiles; integer codes stay integer codes, bfloat16 stays bfloat16.

    Raises
    ------
    ValueError
        The blocks of a QuantizedMatrix are no multiple of eight inputs, or codes of 4 bits are out of range.
    """
    none = np.empty((0, 0, LANES), np.float32)
    if not isinstance(weights, QuantizedMatrix):
        tiles = tile_rows(np.ascontiguousarray(weights, np.float32), FLOAT_BLOCK)
        if not (tiles.view(np.uint32) & 0xFFFF).any():  # nothing below bfloat16's precision
            tiles = (tiles.view(np.uint32) >> 16).astype(np.uint16)
        return TiledMatrix(tiles, none, none, np.float32(0), FLOAT_BLOCK, *weights.shape)
    outputs, blocks, block_size = weights.codes.shape
    if block_size % 8:
        raise ValueError(f"blocks of {block_size} inputs; the kernels take eight at a time, so 8, 16, 24, ...")
    bits, codes = weights.bits, weights.codes.reshape(outputs, blocks * block_size)
    zero = 128 if bits == 8 else 0 if weights.minimums is not None else 8  # stored is code + zero, never negative
    if bits == 4 and (codes.min(initial=-zero) < -zero or codes.max(initial=-zero) > 15 - zero):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} are not of 4 bits")
    tiles = np.zeros((-(-outputs // LANES), blocks, block_size * bits // 32, LANES), WORDS[bits])
    _pack_words(codes, zero, bits, tiles.view(np.uint32))  # of one type, to be compiled once
    if weights.minimums is None:
        scales, minimums = as_halves(tile_rows(weights.scales, 1)[:, :, 0]), none
    else:  # both or neither, or there would be more kinds of kernels to compile
        both = [tile_rows(values, 1)[:, :, 0] for values in (weights.scales, weights.minimums)]
        scales, minimums = as_halves(np.stack(both))
    return TiledMatrix(
        codes=tiles,
        scales=scales,
        minimums=minimums,
        zero=np.float32(zero),
        block_size=block_size,
        num_outputs=outputs,
        num_inputs=weights.num_inputs,
    )


def as_matrices(weights: Iterable[np.ndarray | QuantizedMatrix]) -> list[TiledMatrix]:
    """`as_matrix` of several, the tiles of all that are of one kind (form, block size and number of inputs) end to end
    in one array, in their order.

    Neighbours can then be multiplied with as one (`joined`), and the system gives a long array large pages: decode,
    which reads every weight once, was 14 % faster than with an array for each matrix.
    """
    matrices = [as_matrix(matrix) for matrix in weights]
    places: dict[tuple[object, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(_kind(matrix), []).append(place)
    for of_kind in places.values():
        for place, matrix in zip(of_kind, _end_to_end([matrices[place] for place in of_kind]), strict=True):
            matrices[place] = matrix
    return matrices


def _kind(matrix: TiledMatrix) -> tuple[object, ...]:
    has_minimums = len(matrix.minimums) > 0
    types = matrix.codes.dtype, matrix.scales.dtype, matrix.minimums.dtype
    return *types, has_minimums, matrix.zero, matrix.block_size, matrix.num_inputs


def _end_to_end(matrices: Sequence[TiledMatrix]) -> list[TiledMatrix]:
    codes, scales, minimums = (np.concatenate(parts) for parts in list(zip(*matrices, strict=True))[:3])
    ends = np.cumsum([len(matrix.codes) for matrix in matrices])
    return [
        matrix._replace(codes=codes[start:end], scales=scales[start:end], minimums=minimums[start:end])
        for matrix, start, end in zip(matrices, [0, *ends[:-1]], ends, strict=True)
    ]


def joined(matrices: Sequence[TiledMatrix]) -> TiledMatrix | None:
    """Matrices that `as_matrices` laid end to end as one matrix; None where they are not neighbours.

    Its outputs are those of the first, padded to whole tiles, then those of the second, and so on.
    """
    first = matrices[0]
    base = first.codes.base
    if base is None or any(matrix.codes.base is not base for matrix in matrices):
        return None
    ends = [matrix.codes.ctypes.data + matrix.codes.nbytes for matrix in matrices]
    if [matrix.codes.ctypes.data for matrix in matrices[1:]] != ends[:-1]:
        return None
    start = (first.codes.ctypes.data - base.ctypes.data) // base[0].nbytes
    tiles = slice(start, start + sum(len(matrix.codes) for matrix in matrices))
    return first._replace(
        codes=base[tiles],
        scales=first.scales.base[tiles],
        minimums=first.minimums.base[tiles],
        num_outputs=(tiles.stop - tiles.start) * LANES,
    )


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """[O, I] -> [O/64, I/Q, Q, 64]: 64 rows become 64 lanes; what is missing to whole tiles and blocks is zero."""
    outputs, inputs = matrix.shape
    missing = (-outputs % LANES, -inputs % block_size)
    if any(missing):
        matrix = np.pad(matrix, ((0, missing[0]), (0, missing[1])))
    tiles, inputs = len(matrix) // LANES, matrix.shape[1]
    tiled = np.ascontiguousarray(matrix.reshape(tiles, LANES, inputs).transpose(0, 2, 1))
    return tiled.reshape(tiles, inputs // block_size, block_size, LANES)


@compiled_parallel
def _pack_words(codes, zero, bits, words):
    """Neighbouring inputs' codes, `bits` each, into one word of 32 bits; the first lies lowest."""
    outputs = codes.shape[0]
    tiles, blocks, steps, _ = words.shape
    together = 32 // bits
    for tile in prange(tiles):
        for lane in range(min(LANES, outputs - np.int64(tile) * LANES)):
            row = np.int64(tile) * LANES + lane
            for block in range(blocks):
                for step in range(steps):
                    first = (block * steps + step) * together
                    word = np.uint32(0)
                    for j in range(together):
                        word |= np.uint32(codes[row, first + j] + zero) << np.uint32(bits * j)
                    words[tile, block, step, lane] = word


# --- reading a weight: input `8 * step + j` of a block, without its scale and minimum, as float32


def _float32(codes, zero, tile, block, step, j, lane):
    return codes[tile, block, 8 * step + j, lane]


def _bfloat16(codes, zero, tile, block, step, j, lane):
    return np.uint32(np.uint32(codes[tile, block, 8 * step + j, lane]) << np.uint32(16)).view(np.float32)


def _eight_bits(codes, zero, tile, block, step, j, lane):
    word = np.uint32(codes[tile, block, 2 * step + j // 4, lane])
    far = np.uint32(16 * (j % 4 // 2))  # a float32's fraction has 23 bits: codes beyond are brought into its reach
    place = np.uint32(8 * (j % 2))
    exponent = np.uint32(np.uint32(EXPONENT - place) << np.uint32(23))
    code = np.uint32(np.uint32(word >> far) & np.uint32(np.uint32(255) << place))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


def _four_bits(codes, zero, tile, block, step, j, lane):
    word = codes[tile, block, step, lane]
    far = np.uint32(12 * (j // 5))
    place = np.uint32(np.uint32(4 * j) - far)
    exponent = np.uint32(np.uint32(EXPONENT - place) << np.uint32(23))
    code = np.uint32(np.uint32(word >> far) & np.uint32(np.uint32(15) << place))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


WORDS = {8: np.dtype(np.int32), 4: np.dtype(np.uint32)}  # the same 32 bits: the type is how kernels tell the two apart
FORMS = {
    np.dtype(np.float32): _float32,
    np.dtype(np.uint16): _bfloat16,
    WORDS[8]: _eight_bits,
    WORDS[4]: _four_bits,
}
NAMES = {np.dtype(np.float32): "float32", np.dtype(np.uint16): "bfloat16", WORDS[8]: "8 bits", WORDS[4]: "4 bits"}


def weight(codes, zero, tile, block, step, j, lane):
    """One weight of a TiledMatrix, of whichever form: what runs when the compiler is off."""
    return FORMS[codes.dtype](codes, zero, tile, block, step, j, lane)


@overload(weight, inline="always")
def _compiled_weight(codes, zero, tile, block, step, j, lane):
    """What the compiler puts in place of `weight`: the one form that the codes have."""
    return FORMS[as_dtype(codes.dtype)]


def dequantize(matrix: TiledMatrix) -> np.ndarray:
    """Back from tiles to a plain float32 matrix [O, I], for those who want to look at it."""
    tiles, blocks, _, _ = matrix.codes.shape
    values = np.empty((tiles, blocks, matrix.block_size, LANES), np.float32)
    _widen(matrix.codes, matrix.zero, values)
    if len(matrix.scales):
        values *= _widened(matrix.scales)[:, :, None, :]
    if len(matrix.minimums):
        values += _widened(matrix.minimums)[:, :, None, :]
    return values.transpose(0, 3, 1, 2).reshape(tiles * LANES, -1)[: matrix.num_outputs, : matrix.num_inputs]


def _widened(scales: np.ndarray) -> np.ndarray:
    return scales if scales.dtype == np.float32 else scales.view(np.float16).astype(np.float32)


@compiled_parallel
def _widen(codes, zero, values):
    tiles, blocks, block_size, _ = values.shape
    for tile in prange(tiles):
        for block in range(blocks):
            for step in range(block_size // 8):
                for j in range(8):
                    for lane in range(LANES):
                        values[tile, block, 8 * step + j, lane] = weight(codes, zero, tile, block, step, j, lane)
