"""Unpack bit planes, in which several small codes share a byte.

A byte holds two codes of 4 bits, four of 2 bits, or eight of 1 bit. The codes in one byte are not neighbours: ggml
stores the first `W` codes in the lowest bits of `W` bytes, the next `W` codes in the bits above, and so on. One shift
and one mask of a SIMD register then yield codes in order:

    byte             0           1          2        ...     W-1
                +-----------+-----------+-----------+---+-----------+
    high 4 bits | code W    | code W+1  | code W+2  |...| code 2W-1 |   plane 1
    low 4 bits  | code 0    | code 1    | code 2    |...| code W-1  |   plane 0
                +-----------+-----------+-----------+---+-----------+

Codes of 3, 5 or 6 bits are divided: one group of planes holds the low bits, another the high bits.
"""

from __future__ import annotations

import numpy as np


def unpack_planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack uint8 [..., W] to int8 [..., 8/bits, W]. Plane j consists of bits `bits * j` and up of every byte."""
    planes = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for j in range(8 // bits):
        np.right_shift(packed, bits * j, out=planes[..., j, :])
    planes &= 2**bits - 1
    return planes.view(np.int8)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [..., Q/2] to int8 [..., Q]. The low halves hold the first Q/2 codes, the high halves the rest."""
    return unpack_planes(packed, 4).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def add_high_bits(codes: np.ndarray, packed: np.ndarray, bits: int, shift: int) -> None:
    """Add high bits, shifted left by `shift`, to codes that already hold their low bits.

    Parameters
    ----------
    codes : int8 [..., 8/bits, W], changed in place
    packed : uint8 [..., W], planes of `bits` bits
    """
    for j in range(8 // bits):  # one plane at a time, because all planes would take as much memory as the codes
        plane = np.right_shift(packed, bits * j)
        plane &= 2**bits - 1
        plane <<= shift
        codes[..., j, :] |= plane.view(np.int8)
