"""IQ4_NL, IQ4_XS and MXFP4: codes that index a table.

Most weights are close to zero, so that 16 equally spaced values do not fit them best. These types store an index into a
table of 16 integers that are denser near zero, and multiply the integer by the scale of the block. The integer fits in
a byte, and the QuantizedMatrix holds it as the code. The fields of a block, with their sizes in bytes:

    IQ4_NL  | scale 2 | codes 16, planes of 4 bits |                                      32 weights, 4.5 bits each
    IQ4_XS  | scale 2 | sub-scales, high 2 | low 4 | codes 8 x 16, planes of 4 bits |     256 weights, 4.25
    MXFP4   | exponent 1 | codes 16, planes of 4 bits |                                   32 weights, 4.25

IQ4_XS has super-blocks, like the K types: the scale of a block is the scale of its super-block times a 6-bit integer
from -32 to 31. The low four bits of integer i are half i % 2 of byte i // 2. Its high two bits are bits 2i and 2i + 1
of a 16-bit integer.

MXFP4 comes from the Open Compute Project (Microscaling Formats specification, 2023): its codes are 4-bit floats, and
its scales are powers of two. ggml doubles the table, to have integers, and halves the scale: 2^(exponent - 128).
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.k_types import quantized_scales, split_into_blocks
from minillm.quantization.matrix import QuantizedMatrix
from minillm.quantization.planes import add_high_bits, unpack_nibbles, unpack_planes
from minillm.quantization.storage import StorageType

NONLINEAR_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FLOAT4_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled values


def _unpack_iq4_nl(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(NONLINEAR_TABLE[unpack_nibbles(blocks["codes"])], blocks["scale"].astype(np.float32))


def _unpack_iq4_xs(blocks: np.ndarray) -> QuantizedMatrix:
    codes = NONLINEAR_TABLE[split_into_blocks(unpack_planes(blocks["codes"], 4), 32)]
    sub_scales = unpack_planes(blocks["sub_scales_low"], 4).reshape(*blocks.shape, 2, 4, 1)
    add_high_bits(sub_scales, blocks["sub_scales_high"], bits=2, shift=4)
    sub_scales = sub_scales.reshape(*blocks.shape, 8) - np.int8(32)
    return QuantizedMatrix.from_quantized_scales(codes, quantized_scales(blocks["scale"], sub_scales), bits=8)


def _unpack_mxfp4(blocks: np.ndarray) -> QuantizedMatrix:
    codes = FLOAT4_TABLE[unpack_nibbles(blocks["codes"])]
    return QuantizedMatrix(codes, np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128), bits=5)


_NIBBLES = ("codes", "u1", 16)
# The sub-scales have a last axis of size 1, because each of their planes is a single byte.
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
