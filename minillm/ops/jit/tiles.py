"""Weights laid out for the kernels: in tiles of 64 outputs, in any storage format.

SIMD reads consecutive memory, so the numbers that are used at once, one per output or *lane*, are stored side by side.
A weight matrix [O, I] becomes `[O/64, I/Q, Q, 64]`: tile of outputs, block of inputs, input within the block, lane.
Weights of fewer bits than a float32 share words with neighbouring inputs; `weight_formats.py` has the six formats.

Integer codes have a scale, and some types also a minimum, per block and output (see `minillm/quantization`). These are
stored in float16 if that is exact. Scales that are quantized themselves stay integers, with a float16 for several
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numba
import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled_parallel
from minillm.ops.jit.float16 import as_float16_bits
from minillm.ops.jit.scales import widened
from minillm.ops.jit.weight_formats import LANES, bits_stored, format_name, pack, weight
from minillm.quantization import QuantizedMatrix

FLOAT_BLOCK = 32  # inputs per block of float weights, which have no scales


# Arrays of a TiledMatrix: codes, scales, minimums, shared.
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class TiledMatrix(NamedTuple):
    """A weight matrix [O, I] in tiles. Padding of the last tile has no effect: inputs are zero there, outputs unused.

    This is a named tuple. `multiply` takes it as a plain tuple, which Numba receives faster.
    """

    codes: np.ndarray  # [O/64, I/Q, ...], in one of the six formats
    scales: np.ndarray  # [O/64, I/Q, 64], float32, float16 bits, or int8; of length 0 for float weights
    minimums: np.ndarray  # the same, or of length 0 if the type has none
    shared: np.ndarray  # [O/64, I/(Q*S), 1 or 2, 64], factors of int8 scales and minimums, for S blocks each
    zero: np.float32  # the code that represents 0; for integer codes only
    block_size: int  # Q
    num_outputs: int  # O
    num_inputs: int  # I

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, I)`, the shape of the matrix."""
        return self.num_outputs, self.num_inputs

    @property
    def arrays(self) -> Arrays:
        """Codes, scales, minimums and shared factors: the fields that are arrays."""
        return self.codes, self.scales, self.minimums, self.shared

    def with_arrays(self, arrays: Iterable[np.ndarray], num_outputs: int) -> TiledMatrix:
        """Return a matrix of the same format and number of inputs with other arrays."""
        codes, scales, minimums, shared = arrays
        return self._replace(codes=codes, scales=scales, minimums=minimums, shared=shared, num_outputs=num_outputs)

    def __repr__(self) -> str:
        storage = format_name(self.codes)
        return f"TiledMatrix({self.num_outputs} x {self.num_inputs}, {storage}, {num_bytes(self) / 1e6:.1f} MB)"


def num_bytes(matrix: TiledMatrix) -> int:
    """Return the bytes read when the whole matrix is read."""
    return sum(array.nbytes for array in matrix.arrays)


def as_vector(values: np.ndarray) -> np.ndarray:
    """Return a copy of the weight of a norm, or of a bias: for read-only arrays Numba would compile again."""
    return np.array(values, np.float32)


def to_numpy(array: np.ndarray) -> np.ndarray:
    """Return the array itself: this backend computes with NumPy arrays."""
    return array


def as_matrix(weights: np.ndarray | QuantizedMatrix) -> TiledMatrix:
    """Lay a weight matrix [O, I] out in tiles. Integer codes stay integer codes, and bfloat16 stays bfloat16.

    Raises
    ------
    ValueError
        The block size of a QuantizedMatrix is not a multiple of eight, or a code does not fit in `bits` bits.
    """
    if not isinstance(weights, QuantizedMatrix):
        none, nothing_shared = np.empty((0, 0, LANES), np.float32), np.empty((0, 0, 2, LANES), np.float32)
        tiles = tile_rows(np.ascontiguousarray(weights, np.float32), FLOAT_BLOCK)
        if not (tiles.view(np.uint32) & 0xFFFF).any():  # the lower halves are all zero: bfloat16 is exact
            tiles = (tiles.view(np.uint32) >> 16).astype(np.uint16)
        return TiledMatrix(tiles, none, none, nothing_shared, np.float32(0), FLOAT_BLOCK, *weights.shape)
    outputs, blocks, block_size = weights.codes.shape
    if block_size % 8:
        raise ValueError(f"blocks have {block_size} inputs; the kernels need a multiple of 8")
    codes, bits = weights.codes.reshape(outputs, blocks * block_size), bits_stored(weights.bits, block_size)
    # The words hold code + zero, which is never negative.
    zero = 2 ** (bits - 1) if bits == 8 or weights.minimums is None else 0
    if bits < 8 and not -zero <= codes.min(initial=0) <= codes.max(initial=0) < 2**bits - zero:
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {bits} bits")
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
    """Return scales, minimums, and the floats that groups of blocks share, in tiles."""
    values, quantized = [weights.scales], [weights.quantized_scales]
    if weights.minimums is not None:
        values.append(weights.minimums)
        quantized.append(weights.quantized_minimums)
    complete = [scales for scales in quantized if scales is not None]
    if len(complete) == len(quantized):
        shared = as_float16_bits(np.stack([_by_blocks(scales.super_scales) for scales in complete], axis=2))
        tiled = [_by_blocks(scales.sub_scales) for scales in complete]
    else:  # both in float16 or neither, to compile fewer kinds of kernels
        shared = np.empty((0, 0, 2, LANES), np.float32)
        tiled = list(as_float16_bits(np.stack([_by_blocks(value) for value in values])))
    return tiled[0], tiled[1] if len(tiled) > 1 else np.empty((0, 0, LANES), np.float32), shared


def _by_blocks(values: np.ndarray) -> np.ndarray:
    """Lay out one number per block, [O, n], in tiles: [O/64, n, 64]."""
    return tile_rows(values, 1)[:, :, 0]


def as_matrices(weights: Iterable[np.ndarray | QuantizedMatrix]) -> list[TiledMatrix]:
    """Apply `as_matrix` to several matrices. All of the same format, block size and inputs share one array, in order.

    Adjacent matrices can then be used as one matrix (`joined`). A long array can also get large memory pages from the
    operating system: decode, which reads every weight once, was 14 % faster than with one array per matrix.
    """
    matrices = [as_matrix(matrix) for matrix in weights]
    indices: dict[tuple[object, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices.setdefault(_kind(matrix), []).append(index)
    for of_kind in indices.values():
        for index, matrix in zip(of_kind, _end_to_end([matrices[index] for index in of_kind]), strict=True):
            matrices[index] = matrix
    return matrices


def _kind(matrix: TiledMatrix) -> tuple[object, ...]:
    layouts = [(array.dtype, array.shape[1:]) for array in matrix.arrays]
    return *layouts, matrix.zero, matrix.block_size, matrix.num_inputs


def _end_to_end(matrices: Sequence[TiledMatrix]) -> list[TiledMatrix]:
    arrays = [np.concatenate(parts) for parts in zip(*(matrix.arrays for matrix in matrices), strict=True)]
    ends = np.cumsum([len(matrix.codes) for matrix in matrices])
    return [
        matrix.with_arrays((array[start:end] for array in arrays), matrix.num_outputs)
        for matrix, start, end in zip(matrices, [0, *ends[:-1]], ends, strict=True)
    ]


def joined(matrices: Sequence[TiledMatrix]) -> TiledMatrix | None:
    """Return adjacent matrices of `as_matrices` as one matrix, or None if they are not adjacent.

    Its outputs are the outputs of the first matrix, padded to whole tiles, then the outputs of the second, and so on.
    """
    first = matrices[0]
    if any(matrix.codes.base is not first.codes.base for matrix in matrices):
        return None
    ends = [matrix.codes.ctypes.data + matrix.codes.nbytes for matrix in matrices]
    if [matrix.codes.ctypes.data for matrix in matrices[1:]] != ends[:-1]:
        return None
    array, start = whole(first)
    tiles = slice(start, start + sum(len(matrix.codes) for matrix in matrices))
    return first.with_arrays((part[tiles] for part in array.arrays), (tiles.stop - tiles.start) * LANES)


def whole(matrix: TiledMatrix) -> tuple[TiledMatrix, int]:
    """Return all matrices that share a matrix's array as one matrix, and the index of the matrix's first tile in it."""
    arrays = [array.base for array in matrix.arrays if array.base is not None]
    start = (matrix.codes.ctypes.data - arrays[0].ctypes.data) // arrays[0][0].nbytes
    return matrix.with_arrays(arrays, len(arrays[0]) * LANES), start


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """Lay out [O, I] as [O/64, I/Q, Q, 64]: 64 rows become 64 lanes.

    Incomplete tiles and blocks are padded with zeros.
    """
    outputs, inputs = matrix.shape
    padding = (-outputs % LANES, -inputs % block_size)
    if any(padding):
        matrix = np.pad(matrix, ((0, padding[0]), (0, padding[1])))
    tiles, inputs = len(matrix) // LANES, matrix.shape[1]
    tiled = np.ascontiguousarray(matrix.reshape(tiles, LANES, inputs).transpose(0, 2, 1))
    return tiled.reshape(tiles, inputs // block_size, block_size, LANES)


ALL = slice(None)


def dequantize(matrix: TiledMatrix) -> np.ndarray:
    """Return a tiled matrix as a plain float32 matrix [O, I]."""
    tiles, blocks = matrix.codes.shape[:2]
    values = np.empty((tiles, blocks, matrix.block_size, LANES), np.float32)
    if numba.config.DISABLE_JIT:  # all tiles, blocks and lanes at once: interpreted loops would take minutes
        for step, j in np.ndindex(matrix.block_size // 8, 8):
            values[:, :, 8 * step + j] = weight(matrix.codes, matrix.zero, ALL, ALL, step, j, ALL)
    else:
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
