"""TQ1_0 and TQ2_0: nothing but -1, 0 and 1, with a float16 scale for every 256 weights, as BitNet's models have them.

The codes 0, 1 and 2 stand for -1, 0 and 1. The bytes of a block, each box with its number of bytes:

    TQ2_0  | codes 2 x 32: 4 planes of 2 bits | scale 2 |                        66 bytes, 2.0625 bits a weight
    TQ1_0  | codes 32 | codes 16 | codes 4 | scale 2 |                           54 bytes, 1.6875

TQ1_0 makes use of what 2 bits waste: 3^5 = 243 fits a byte, so a byte holds five codes, as digits of a number in base
three. It is kept as a fraction, digits / 243 scaled to 256 and rounded up, for then the first digit is what goes over
when the byte is multiplied by three, and multiplying what stays gives the next. Bytes are in stretches as in
`planes.py`: the first digits of 32 bytes, their second, ...; then of 16 bytes; then four digits of the last 4.
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix
from minillm.quantization.planes import unpack_planes
from minillm.quantization.storage import StorageType

STRETCHES = ((32, 5), (16, 5), (4, 4))  # bytes, and the digits each of them holds


def _unpack_tq2_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_planes(blocks["codes"], 2).reshape(*blocks.shape, 256)
    codes -= 1
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


def _unpack_tq1_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = np.empty((*blocks.shape, 256), np.int8)
    first_byte = first_code = 0
    for num_bytes, num_digits in STRETCHES:
        rest = blocks["codes"][..., first_byte : first_byte + num_bytes]
        first_byte += num_bytes
        for _ in range(num_digits):
            tripled = rest.astype(np.uint16) * 3
            codes[..., first_code : first_code + num_bytes] = tripled >> 8
            rest = tripled.astype(np.uint8)  # what stays of it below 256
            first_code += num_bytes
    codes -= 1
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


_SCALE = ("scale", "<f2")

TYPES = (
    StorageType("TQ1_0", 256, np.dtype([("codes", "u1", 52), _SCALE]), _unpack_tq1_0, bits=4),
    StorageType("TQ2_0", 256, np.dtype([("codes", "u1", (2, 32)), _SCALE]), _unpack_tq2_0, bits=4),
)
