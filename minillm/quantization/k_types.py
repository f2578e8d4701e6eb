"""Q2_K to Q6_K: the scales are themselves quantized, so that small blocks take few bits.

256 weights form a *super-block* of 16 blocks of 16, or of 8 blocks of 32. The scale of each block is a small integer
times one float16 that the super-block shares. The minimums, which these types subtract, work the same way:

    weight  =  code * (scale * sub_scale)  -  minimum * sub_minimum

    type   blocks    codes           sub-scales, sub-minimums    bytes   bits per weight
    Q2_K   16 x 16   0 to 3          4 bits, 4 bits                 84   2.625
    Q3_K   16 x 16   -4 to 3         -32 to 31                     110   3.4375
    Q4_K    8 x 32   0 to 15         6 bits, 6 bits                144   4.5
    Q5_K    8 x 32   0 to 31         6 bits, 6 bits                176   5.5
    Q6_K   16 x 16   -32 to 31       -128 to 127                   210   6.5625

`scale * sub_scale` is exact in float32: the 11-bit significand of a float16 times at most 8 bits fits the 24 bits of
float32. The scale of a block is therefore the same float32, whether it is computed on loading or on use. In all five
types, its product with a code is exact as well, so that only subtracting the minimum rounds, as in ggml.

The fields of a super-block, with their sizes in bytes:

    Q2_K   | sub-scales 16 | codes 2 x 32: 4 planes of 2 bits | scale 2 | minimum 2 |
               byte i: the scale of block i in the low half, its minimum in the high half

    Q3_K   | third bits 32: 8 planes of 1 bit | codes 2 x 32: 4 planes of 2 bits | sub-scales 12 | scale 2 |
               third bit 1: the code is the low bits; 0: the low bits minus four

    Q4_K   | scale 2 | minimum 2 | sub-scales 12 | codes 4 x 32: 2 planes of 4 bits |

    Q5_K   | scale 2 | minimum 2 | sub-scales 12 | fifth bits 32: 8 planes of 1 bit | codes 4 x 32: 2 planes of 4 bits |

    Q6_K   | low codes 2 x 64: 2 planes of 4 bits | high codes 2 x 32: 4 planes of 2 bits | sub-scales 16 | scale 2 |

A field "4 x 32" holds four groups of 32 bytes, one after another. `planes.py` explains planes.
"""

from __future__ import annotations

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix, QuantizedScales
from minillm.quantization.planes import add_high_bits, unpack_planes
from minillm.quantization.storage import StorageType


def quantized_scales(super_scales: np.ndarray, sub_scales: np.ndarray) -> QuantizedScales:
    """Combine the scales of super-blocks (float16 [O, B]) with integer factors per block ([O, B, S], -128 to 127)."""
    return QuantizedScales(sub_scales.reshape(len(sub_scales), -1).view(np.int8), super_scales.astype(np.float32))


def split_into_blocks(codes: np.ndarray, block_size: int) -> np.ndarray:
    """Reshape codes [O, ...] to blocks [O, I/Q, Q]."""
    return codes.reshape(len(codes), -1, block_size)


def _unpack_q2_k(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix.from_quantized_scales(
        split_into_blocks(unpack_planes(blocks["codes"], 2), 16),
        quantized_scales(blocks["scale"], blocks["sub_scales"] & 15),
        quantized_scales(-blocks["minimum"], blocks["sub_scales"] >> 4),
        bits=4,
    )


def _unpack_q3_k(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_planes(blocks["codes"], 2).reshape(*blocks.shape, 8, 32)
    add_high_bits(codes, blocks["third_bits"], bits=1, shift=2)
    codes -= 4
    # The low half of sub-scale i is in byte i % 8, plane i // 8; its two high bits are in byte 8 + i % 4, plane i // 4.
    sub_scales = unpack_planes(blocks["sub_scales"][..., :8], 4).reshape(*blocks.shape, 4, 4)
    add_high_bits(sub_scales, blocks["sub_scales"][..., 8:], bits=2, shift=4)
    sub_scales = sub_scales.reshape(*blocks.shape, 16) - np.int8(32)
    return QuantizedMatrix.from_quantized_scales(
        split_into_blocks(codes, 16), quantized_scales(blocks["scale"], sub_scales), bits=4
    )


def _unpack_q4_k(blocks: np.ndarray) -> QuantizedMatrix:
    codes = split_into_blocks(unpack_planes(blocks["codes"], 4), 32)
    return QuantizedMatrix.from_quantized_scales(codes, *_scales_and_minimums(blocks), bits=4)


def _unpack_q5_k(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_planes(blocks["codes"], 4).reshape(*blocks.shape, 8, 32)
    add_high_bits(codes, blocks["fifth_bits"], bits=1, shift=4)
    return QuantizedMatrix.from_quantized_scales(split_into_blocks(codes, 32), *_scales_and_minimums(blocks), bits=5)


def _scales_and_minimums(blocks: np.ndarray) -> tuple[QuantizedScales, QuantizedScales]:
    """Unpack the scales and minimums of Q4_K and Q5_K: eight of each per super-block, with 6 bits each, in 12 bytes.

        byte       0  1  2  3         4  5  6  7           8     9     10    11
        bits 6, 7  of scales 4..7     of minimums 4..7     low 4 bits of minimums 4..7    (bits 4 to 7)
        bits 0..5  scales 0..3        minimums 0..3        low 4 bits of scales 4..7      (bits 0 to 3)

    Bits 6 and 7 of the first eight bytes are the upper two bits of scales and minimums 4 to 7.
    """
    first, last = blocks["sub_scales"][..., :8].reshape(*blocks.shape, 2, 4), blocks["sub_scales"][..., 8:]
    values = np.empty((*blocks.shape, 2, 8), np.uint8)  # scales, then minimums
    values[..., :4] = first & 63
    values[..., 4:] = unpack_planes(last, 4).view(np.uint8) | (first >> 6 << 4)
    scales, minimums = values[:, :, 0], values[:, :, 1]
    return quantized_scales(blocks["scale"], scales), quantized_scales(-blocks["minimum"], minimums)


def _unpack_q6_k(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_planes(blocks["low_codes"], 4).reshape(*blocks.shape, 2, 4, 32)
    add_high_bits(codes, blocks["high_codes"], bits=2, shift=4)
    codes -= 32
    scales = quantized_scales(blocks["scale"], blocks["sub_scales"])
    return QuantizedMatrix.from_quantized_scales(split_into_blocks(codes, 16), scales, bits=6)


_SCALE, _MINIMUM, _SUB_SCALES = ("scale", "<f2"), ("minimum", "<f2"), ("sub_scales", "u1", 12)
_Q2_K = [("sub_scales", "u1", 16), ("codes", "u1", (2, 32)), _SCALE, _MINIMUM]
_Q3_K = [("third_bits", "u1", 32), ("codes", "u1", (2, 32)), _SUB_SCALES, _SCALE]
_Q4_K = [_SCALE, _MINIMUM, _SUB_SCALES, ("codes", "u1", (4, 32))]
_Q5_K = [_SCALE, _MINIMUM, _SUB_SCALES, ("fifth_bits", "u1", 32), ("codes", "u1", (4, 32))]
_Q6_K = [("low_codes", "u1", (2, 64)), ("high_codes", "u1", (2, 32)), ("sub_scales", "i1", 16), _SCALE]

TYPES = (
    StorageType("Q2_K", 256, np.dtype(_Q2_K), _unpack_q2_k, bits=4),
    StorageType("Q3_K", 256, np.dtype(_Q3_K), _unpack_q3_k, bits=4),
    StorageType("Q4_K", 256, np.dtype(_Q4_K), _unpack_q4_k, bits=4),
    StorageType("Q5_K", 256, np.dtype(_Q5_K), _unpack_q5_k, bits=5),
    StorageType("Q6_K", 256, np.dtype(_Q6_K), _unpack_q6_k, bits=6),
)
