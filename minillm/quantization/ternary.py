"""TQ1_0 and TQ2_0: weights that are -1, 0 or 1 times a float16 scale per 256 weights, as in BitNet models.

The codes 0, 1 and 2 mean -1, 0 and 1. The fields of a block, with their sizes in bytes:

    TQ2_0  | codes 2 x 32: 4 planes of 2 bits | scale 2 |                        66 bytes, 2.0625 bits per weight
    TQ1_0  | codes 32 | codes 16 | codes 4 | scale 2 |                           54 bytes, 1.6875

TQ1_0 packs codes more tightly: 3^5 = 243 fits in a byte, so a byte holds five codes, as the digits of a base-3 number.
The byte stores the number as a fraction, scaled from 243 to 256 and rounded up. Multiplying it by three then makes the
first digit overflow, multiplying the remainder yields the next digit, and so on. Codes are ordered as in `planes.py`:
the first digits of 32 bytes, then their second digits, and so on; next come 16 bytes with five digits each, and last 4
bytes with four digits each.
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix
from minillm.quantization.planes import unpack_planes
from minillm.quantization.storage import StorageType

DIGIT_GROUPS = ((32, 5), (16, 5), (4, 4))  # (number of bytes, digits per byte)


def _unpack_tq2_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_planes(blocks["codes"], 2).reshape(*blocks.shape, 256)
    codes -= 1
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


def _unpack_tq1_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = np.empty((*blocks.shape, 256), np.int8)
    first_byte = first_code = 0
    for num_bytes, num_digits in DIGIT_GROUPS:
        rest = blocks["codes"][..., first_byte : first_byte + num_bytes]
        first_byte += num_bytes
        for _ in range(num_digits):
            tripled = rest.astype(np.uint16) * 3
            codes[..., first_code : first_code + num_bytes] = tripled >> 8
            rest = tripled.astype(np.uint8)  # the remainder below 256
            first_code += num_bytes
    codes -= 1
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


_SCALE = ("scale", "<f2")

TYPES = (
    StorageType("TQ1_0", 256, np.dtype([("codes", "u1", 52), _SCALE]), _unpack_tq1_0, bits=4),
    StorageType("TQ2_0", 256, np.dtype([("codes", "u1", (2, 32)), _SCALE]), _unpack_tq2_0, bits=4),
)
