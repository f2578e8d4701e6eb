"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: one float16 scale per 32 weights, and in Q4_1 and Q5_1 a minimum.

A weight is `code * scale` if the name of the type ends in _0, and `code * scale + minimum` if it ends in _1. The
fields of a block, with their sizes in bytes:

    Q8_0    | scale 2 | codes 32, one int8 each                   |   34 bytes, 8.5 bits per weight
    Q4_0    | scale 2 | codes 16, planes of 4 bits |                  18 bytes, 4.5
    Q4_1    | scale 2 | minimum 2 | codes 16       |                  20 bytes, 5.0
    Q5_0    | scale 2 | fifth bits 4 | codes 16    |                  22 bytes, 5.5
    Q5_1    | scale 2 | minimum 2 | fifth bits 4 | codes 16 |         24 bytes, 6.0

The fifth bits form a 32-bit integer, in which bit i belongs to weight i.
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix
from minillm.quantization.planes import unpack_nibbles
from minillm.quantization.storage import StorageType


def _unpack_q8_0(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(blocks["codes"], blocks["scale"].astype(np.float32))


def _unpack_q4_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_nibbles(blocks["codes"])
    codes -= 8  # stored as 0..15, meaning -8..7
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


def _unpack_q4_1(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(
        unpack_nibbles(blocks["codes"]),
        blocks["scale"].astype(np.float32),
        blocks["minimum"].astype(np.float32),
        bits=4,
    )


def _unpack_q5_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = _five_bits(blocks)
    codes -= 16  # stored as 0..31, meaning -16..15
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=5)


def _unpack_q5_1(blocks: np.ndarray) -> QuantizedMatrix:
    scales, minimums = blocks["scale"].astype(np.float32), blocks["minimum"].astype(np.float32)
    return QuantizedMatrix(_five_bits(blocks), scales, minimums, bits=5)


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """Return the 5-bit codes of Q5_0 or Q5_1: int8 [O, I/32, 32], from 0 to 31."""
    codes = unpack_nibbles(blocks["codes"])
    fifth = np.unpackbits(blocks["fifth_bits"], axis=-1, bitorder="little")
    fifth <<= 4
    codes |= fifth.view(np.int8)
    return codes


_SCALE, _MINIMUM, _FIFTH_BITS = ("scale", "<f2"), ("minimum", "<f2"), ("fifth_bits", "u1", 4)
_NIBBLES = ("codes", "u1", 16)

TYPES = (
    StorageType("Q8_0", 32, np.dtype([_SCALE, ("codes", "i1", 32)]), _unpack_q8_0, bits=8),
    StorageType("Q4_0", 32, np.dtype([_SCALE, _NIBBLES]), _unpack_q4_0, bits=4),
    StorageType("Q4_1", 32, np.dtype([_SCALE, _MINIMUM, _NIBBLES]), _unpack_q4_1, bits=4),
    StorageType("Q5_0", 32, np.dtype([_SCALE, _FIFTH_BITS, _NIBBLES]), _unpack_q5_0, bits=5),
    StorageType("Q5_1", 32, np.dtype([_SCALE, _MINIMUM, _FIFTH_BITS, _NIBBLES]), _unpack_q5_1, bits=5),
)
