"""The exercises of lesson 6. Run `pytest lessons/06_kernels` to test your solutions."""

import numpy as np

ANSWERS = {
    "tile_rows": "minillm.ops.jit.tiles.tile_rows",
    "unpack_nibbles": "minillm.quantization.unpack_nibbles",
    "widen_bfloat16": "minillm.quantization.widen_bfloat16",
}


def tile_rows(matrix: np.ndarray, block_size: int) -> np.ndarray:
    """Arrange a matrix [O, I] in tiles of 64 rows: [O/64, I/Q, Q, 64], where Q is `block_size`.

    `tile_rows(matrix, Q)[t, b, q, lane]` is `matrix[64 * t + lane, Q * b + q]`. If O is not a multiple of 64, or I is
    not a multiple of Q, pad the last tile and the last block with zeros. The result has the dtype of the matrix and is
    contiguous in memory (C order), because a SIMD load reads adjacent numbers.
    """
    raise NotImplementedError("your turn")


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Extract two 4-bit codes from each byte: uint8 [..., Q/2] -> int8 [..., Q], from 0 to 15.

    GGUF does not pack neighbouring codes into the same byte. The low halves of a block's bytes hold its first Q/2
    codes, in order, and the high halves hold the other Q/2.
    """
    raise NotImplementedError("your turn")


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 numbers whose upper 16 bits are `bits` (uint16, any shape) and whose lower 16 bits are zero.

    Hint: 1.0 is 0x3F80 as bfloat16 and 0x3F800000 as float32. What happens when you shift a uint16 by 16 bits?
    """
    raise NotImplementedError("your turn")
