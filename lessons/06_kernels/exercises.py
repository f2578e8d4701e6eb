"""Lesson 6's exercises. `pytest lessons/06_kernels` tells you whether they are right."""

import numpy as np

ANSWERS = {
    "tile_rows": "minillm.ops.jit.tiles.tile_rows",
    "unpack_nibbles": "minillm.quantization.unpack_nibbles",
    "widen_bfloat16": "minillm.quantization.widen_bfloat16",
}


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """Lay a matrix [O, I] out in tiles of 64 rows: [O/64, I/Q, Q, 64], where Q is `block_size`.

    `tile_rows(matrix, Q)[t, b, q, lane]` is `matrix[64 * t + lane, Q * b + q]`. Where O is no multiple of 64, or I none
    of Q, the last tile and the last block are filled up with zeros. The result is contiguous in memory (C order), since
    SIMD loads what lies side by side; its dtype is the matrix's.
    """
    raise NotImplementedError("your turn")


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """The codes, int8 from 0 to 15, in bytes that hold two each: uint8 [..., Q/2] -> int8 [..., Q].

    GGUF does not put neighbours into one byte: the low halves of a block's bytes hold its first Q/2 codes, in order,
    and the high halves the other Q/2.
    """
    raise NotImplementedError("your turn")


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper 16 bits are `bits` (uint16, of any shape), and whose lower 16 are zero.

    Hint: 1.0 is 0x3F80 as bfloat16 and 0x3F800000 as float32. What happens to a uint16 that is shifted by 16 bits?
    """
    raise NotImplementedError("your turn")
