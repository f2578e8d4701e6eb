"""Weights laid out for the kernels: in tiles of 64 outputs, whatever they are stored as.

SIMD runs along memory, so what lies next to each other must be what is computed at once: 64 outputs, the lanes. A
weight matrix [O, I] becomes `[O/64, I/Q, Q, 64]`: tile of outputs, block of inputs, input within the block, lane. Where
weights take fewer bits than a float32, several inputs share a word; `forms.py` has the six forms, and reads any.

Integer codes come with a scale, and perhaps a minimum, per block and output (see `minillm/quantization`): in float16
where nothing is lost by it, and where they are quantized themselves, as the integers they are in the file, with the
float16 that several blocks share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled_parallel
from minillm.ops.jit.float16 import as_halves
from minillm.ops.jit.scales import widened
from minillm.ops.jit.weight_formats import LANES, bits_kept, form_of, pack, weight
from minillm.quantization import QuantizedMatrix

ARRAYS = 4  # how many of a TiledMatrix's fields are arrays, the first of them
FLOAT_BLOCK = 32  # inputs a block holds where the weights are floats and no scale says how many


class TiledMatrix(NamedTuple):
    """A weight matrix [O, I] in tiles. What fills them up to whole ones is never seen: `x` is zero there, or the sums
    are not looked at.

    A named tuple, so that its fields travel as one; `multiply` gets it as a plain one, which Numba receives faster.
    """

    codes: np.ndarray  # [O/64, I/Q, ...], in one of the six forms
    scales: np.ndarray  # [O/64, I/Q, 64], float32, the bits of float16, or int8 parts; of length 0 for floats
    minimums: np.ndarray  # the same, or of length 0 where the type has none
    shared: np.ndarray  # [O/64, I/(Q*S), 1 or 2, 64], what parts of scales, and of minimums, are multiplied with
    zero: np.float32  # of integer codes: the code that means 0
    block_size: int  # Q
    num_outputs: int  # O
    num_inputs: int  # I

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, I)`, the shape of the matrix it stands for."""
        return self.num_outputs, self.num_inputs

    def __repr__(self):
        kept = form_of(self.codes)
        return f"TiledMatrix({self.num_outputs} x {self.num_inputs}, {kept}, {num_bytes(self) / 1e6:.1f} MB)"


def num_bytes(matrix: TiledMatrix) -> int:
    """Bytes that reading the whole matrix moves."""
    return sum(array.nbytes for array in matrix[:ARRAYS])


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
        The blocks of a QuantizedMatrix are no multiple of eight inputs, or codes need more than the bits it says.
    """
    if not isinstance(weights, QuantizedMatrix):
        none, nothing_shared = np.empty((0, 0, LANES), np.float32), np.empty((0, 0, 2, LANES), np.float32)
        tiles = tile_rows(np.ascontiguousarray(weights, np.float32), FLOAT_BLOCK)
        if not (tiles.view(np.uint32) & 0xFFFF).any():  # nothing below bfloat16's precision
            tiles = (tiles.view(np.uint32) >> 16).astype(np.uint16)
        return TiledMatrix(tiles, none, none, nothing_shared, np.float32(0), FLOAT_BLOCK, *weights.shape)
    outputs, blocks, block_size = weights.codes.shape
    if block_size % 8:
        raise ValueError(f"blocks of {block_size} inputs; the kernels take eight at a time, so 8, 16, 24, ...")
    codes, bits = weights.codes.reshape(outputs, blocks * block_size), bits_kept(weights.bits, block_size)
    zero = 2 ** (bits - 1) if bits == 8 or weights.minimums is None else 0  # stored is code + zero, never negative
    if bits < 8 and not -zero <= codes.min(initial=0) <= codes.max(initial=0) < 2**bits - zero:
        raise ValueError(f"codes from {codes.min()} to {codes.max()} are not of {bits} bits")
    scales, minimums, shared = _tiled_scales(weights)
    return TiledMatrix(
        codes=pack(codes, block_size, bits, zero),
        scales=scales,
        minimums=minimums,
        shared=shared,
        zero=np.float32(zero),
        block_size=block_size,
        num_outputs=outputs,
        num_inputs=weights.num_inputs,
    )


def _tiled_scales(weights: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, minimums, and what they share."""
    values, parts = [weights.scales], [weights.quantized_scales]
    if weights.minimums is not None:
        values.append(weights.minimums)
        parts.append(weights.quantized_minimums)
    if None not in parts:
        shared = as_halves(np.stack([_by_blocks(part.super_scales) for part in parts], axis=2))
        tiled = [_by_blocks(part.sub_scales) for part in parts]
    else:  # both as halves or neither, or there would be more kinds of kernels to compile
        shared = np.empty((0, 0, 2, LANES), np.float32)
        tiled = list(as_halves(np.stack([_by_blocks(value) for value in values])))
    return tiled[0], tiled[1] if len(tiled) > 1 else np.empty((0, 0, LANES), np.float32), shared


def _by_blocks(values: np.ndarray) -> np.ndarray:
    """One number for each block [O, n] in tiles: [O/64, n, 64]."""
    return tile_rows(values, 1)[:, :, 0]


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
    forms = [(array.dtype, array.shape[1:]) for array in matrix[:ARRAYS]]
    return *forms, matrix.zero, matrix.block_size, matrix.num_inputs


def _end_to_end(matrices: Sequence[TiledMatrix]) -> list[TiledMatrix]:
    arrays = [np.concatenate(parts) for parts in list(zip(*matrices, strict=True))[:ARRAYS]]
    ends = np.cumsum([len(matrix.codes) for matrix in matrices])
    return [
        TiledMatrix(*(array[start:end] for array in arrays), *matrix[ARRAYS:])
        for matrix, start, end in zip(matrices, [0, *ends[:-1]], ends, strict=True)
    ]


def joined(matrices: Sequence[TiledMatrix]) -> TiledMatrix | None:
    """Matrices that `as_matrices` laid end to end as one matrix; None where they are not neighbours.

    Its outputs are those of the first, padded to whole tiles, then those of the second, and so on.
    """
    first = matrices[0]
    if any(matrix.codes.base is not first.codes.base for matrix in matrices):
        return None
    ends = [matrix.codes.ctypes.data + matrix.codes.nbytes for matrix in matrices]
    if [matrix.codes.ctypes.data for matrix in matrices[1:]] != ends[:-1]:
        return None
    array, start = whole(first)
    tiles = slice(start, start + sum(len(matrix.codes) for matrix in matrices))
    arrays = (of_all[tiles] for of_all in array[:ARRAYS])
    return TiledMatrix(*arrays, *array[ARRAYS:])._replace(num_outputs=(tiles.stop - tiles.start) * LANES)


def whole(matrix: TiledMatrix) -> tuple[TiledMatrix, int]:
    """All that `as_matrices` laid end to end with a matrix, as one, and which of its tiles is the matrix's first."""
    arrays = [array.base for array in matrix[:ARRAYS]]
    start = (matrix.codes.ctypes.data - arrays[0].ctypes.data) // arrays[0][0].nbytes
    return TiledMatrix(*arrays, *matrix[ARRAYS:])._replace(num_outputs=len(arrays[0]) * LANES), start


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """[O, I] -> [O/64, I/Q, Q, 64]: 64 rows become 64 lanes; what is missing to whole tiles and blocks is zero."""
    outputs, inputs = matrix.shape
    missing = (-outputs % LANES, -inputs % block_size)
    if any(missing):
        matrix = np.pad(matrix, ((0, missing[0]), (0, missing[1])))
    tiles, inputs = len(matrix) // LANES, matrix.shape[1]
    tiled = np.ascontiguousarray(matrix.reshape(tiles, LANES, inputs).transpose(0, 2, 1))
    return tiled.reshape(tiles, inputs // block_size, block_size, LANES)


def dequantize(matrix: TiledMatrix) -> np.ndarray:
    """Back from tiles to a plain float32 matrix [O, I], for those who want to look at it."""
    tiles, blocks = matrix.codes.shape[:2]
    values = np.empty((tiles, blocks, matrix.block_size, LANES), np.float32)
    _widen(matrix.codes, matrix.zero, values)
    if len(matrix.scales):
        values *= widened(matrix.scales, matrix.shared[:, :, 0])[:, :, None, :]
    if len(matrix.minimums):
        values += widened(matrix.minimums, matrix.shared[:, :, 1])[:, :, None, :]
    return values.transpose(0, 3, 1, 2).reshape(tiles * LANES, -1)[: matrix.num_outputs, : matrix.num_inputs]


@compiled_parallel
def _widen(codes, zero, values):
    tiles, blocks, block_size, _ = values.shape
    for tile in prange(tiles):
        for block in range(blocks):
            for step in range(block_size // 8):
                for j in range(8):
                    for lane in range(LANES):
                        values[tile, block, 8 * step + j, lane] = weight(codes, zero, tile, block, step, j, lane)
