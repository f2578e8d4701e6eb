"""IQ4_NL, IQ4_XS and MXFP4: codes that number the entries of a table.

Weights crowd around zero, so 16 values at equal distances are not the best 16. These types keep the number of one of
16 integers that lie closer together near zero, and multiply that integer with the block's scale. It fits a byte, so it
is what stands in the QuantizedMatrix. The bytes of a block, each box with its number of bytes:

    IQ4_NL  | scale 2 | codes 16, planes of 4 bits |                                      32 weights, 4.5 bits each
    IQ4_XS  | scale 2 | sub-scales, high 2 | low 4 | codes 8 x 16, planes of 4 bits |     256 weights, 4.25
    MXFP4   | exponent 1 | codes 16, planes of 4 bits |                                   32 weights, 4.25

IQ4_XS has super-blocks, as the K types have: its 8 blocks' scales are 6 bits each, -32 to 31, and multiply the
super-block's. Block i's low four bits are half i % 2 of byte i // 2; its high two are bits 2i and 2i + 1 of one number
of 16 bits.

MXFP4 is the Open Compute Project's (Microscaling Formats specification, 2023): its codes are floats of 4 bits, its
scales powers of two. ggml keeps the table doubled, to have integers, and so halves the scale: 2^(exponent - 128).
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.k_types import in_blocks, sub_block_values
from minillm.quantization.matrix import QuantizedMatrix
from minillm.quantization.planes import add_high_bits, unpack_nibbles, unpack_planes
from minillm.quantization.storage import StorageType

NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FLOATS_OF_4_BITS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled


def _unpack_iq4_nl(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(NONLINEAR[unpack_nibbles(blocks["codes"])], blocks["scale"].astype(np.float32))


def _unpack_iq4_xs(blocks: np.ndarray) -> QuantizedMatrix:
    codes = NONLINEAR[in_blocks(unpack_planes(blocks["codes"], 4), 32)]
    sub_scales = unpack_planes(blocks["sub_scales_low"], 4).reshape(*blocks.shape, 2, 4, 1)
    add_high_bits(sub_scales, blocks["sub_scales_high"], bits=2, place=4)
    sub_scales = sub_scales.reshape(*blocks.shape, 8) - np.int8(32)
    return QuantizedMatrix.of_parts(codes, sub_block_values(blocks["scale"], sub_scales), bits=8)


def _unpack_mxfp4(blocks: np.ndarray) -> QuantizedMatrix:
    codes = FLOATS_OF_4_BITS[unpack_nibbles(blocks["codes"])]
    return QuantizedMatrix(codes, np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128), bits=5)


_NIBBLES = ("codes", "u1", 16)
# The parts of sub-scales with an axis of one more: planes of a single byte.
_IQ4_XS = [
    ("scale", "<f2"),
    ("sub_scales_high", "u1", (2, 1)),
    ("sub_scales_low", "u1", (4, 1)),
    ("codes", "u1", (8, 16)),
]

TYPES = (
    StorageType("IQ4_NL", 32, np.dtype([("scale", "<f2"), _NIBBLES]), _unpack_iq4_nl, bits=8),
    StorageType("IQ4_XS", 256, np.dtype(_IQ4_XS), _unpack_iq4_xs, bits=8),
    StorageType("MXFP4", 32, np.dtype([("exponent", "u1"), _NIBBLES]), _unpack_mxfp4, bits=5),
)
