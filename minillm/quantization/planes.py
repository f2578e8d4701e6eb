"""How small codes share bytes: in planes.

A byte has room for two codes of 4 bits, for four of 2, or for eight of 1. The codes that share one are no neighbours.
ggml takes a stretch of `W` bytes, and puts the first `W` codes into their lowest bits, the next `W` into the bits
above those, and so on, so that one shift and one mask of a whole register of bytes brings out `W` codes in order:

    byte             0           1          2        ...     W-1
                +-----------+-----------+-----------+---+-----------+
    high 4 bits | code W    | code W+1  | code W+2  |...| code 2W-1 |   plane 1
    low 4 bits  | code 0    | code 1    | code 2    |...| code W-1  |   plane 0
                +-----------+-----------+-----------+---+-----------+

Codes of 3, 5 or 6 bits are kept in two pieces, the low bits in one stretch of planes and the high bits in another.
"""

from __future__ import annotations

import numpy as np


def unpack_planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., W] -> int8 [..., 8/bits, W]: plane j is made of the bits from `bits * j` on, of every byte."""
    planes = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for j in range(8 // bits):
        np.right_shift(packed, bits * j, out=planes[..., j, :])
    planes &= 2**bits - 1
    return planes.view(np.int8)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., Q/2] -> int8 [..., Q]: low halves hold the block's first Q/2 codes, high halves the rest."""
    return unpack_planes(packed, 4).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def add_high_bits(codes: np.ndarray, packed: np.ndarray, bits: int, place: int) -> None:
    """Set the bits from `place` on of codes whose low bits are there already.

    Parameters
    ----------
    codes : int8 [..., 8/bits, W], changed in place
    packed : uint8 [..., W], planes of `bits` each
    """
    for j in range(8 // bits):  # a plane at a time: all at once would take as much memory again as the codes
        plane = np.right_shift(packed, bits * j)
        plane &= 2**bits - 1
        plane <<= place
        codes[..., j, :] |= plane.view(np.int8)
