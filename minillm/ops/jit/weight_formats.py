"""The six formats that weights are stored in, and how each is written and read.

    float32     unchanged: [Q, 64], input within the block and lane
    bfloat16    the upper half of a float32, in uint16: [Q, 64]
    8 bits      codes from 0 to 255, four consecutive inputs per 32-bit word: [Q/4, 64]
    4 bits      codes from 0 to 15, eight consecutive inputs per word: [Q/8, 64]
    5 bits      codes from 0 to 31, 32 consecutive inputs in five words: [Q/32, 5, 64]
    6 bits      codes from 0 to 63, 16 consecutive inputs in three words: [Q/16, 3, 64]

Within a word, the first input has the lowest bits. Codes of 5 and 6 bits are split. The lower four bits of eight inputs
are packed into a word as 4-bit codes are; the upper one or two bits of all inputs of the group share its last word. To
read a code, the last word is shifted so that the upper bits of four of the eight inputs are just above their lower
bits, one in each byte, and the two words are joined by exclusive or.

No bits are masked before this exclusive or: `_pack_upper_bits` chooses the bits of each word so that they cancel what
the other word contributes to their places. An "or" of two masked words would be easier to understand, but the compiler
moves the masks to the single codes, each of which then takes six instructions instead of four. That made decode's
products 25 % slower with 5 bits, and 12 % slower with 6.

Decode is limited by memory bandwidth, so a product with half the bytes takes half the time. The packing matters too.
Two 4-bit codes per byte, as in files, ran at half the speed of packed words, because widening bytes to lanes is slow
with AVX-512; a word is loaded once and serves eight times.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype

from minillm.ops.jit.compiling import compiled, compiled_parallel

LANES = 64  # outputs per tile; measured to be clearly faster than 16 or 32

# Kernels distinguish the formats by type and number of axes, so words of 32 bits have different integer types.
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(np.uint16)
WORDS = {8: np.dtype(np.int32), 4: np.dtype(np.uint32), 6: np.dtype(np.int32), 5: np.dtype(np.uint32)}

# In a float32 between 2^23 and 2^24, the lowest bit of the fraction is worth 1. An integer becomes a float, exactly and
# faster than by the conversion instruction, if its bits are put into that fraction and 2^23 is subtracted. An integer
# that is `shift` bits further up in its word need not be moved: there, a bit is worth 1 if the float is near
# 2^(23 - shift).
EXPONENT = np.uint32(127 + 23)  # the exponent bits of 2^23 in a float32


PACKING_GROUPS = {5: 32, 6: 16}  # bits per code: inputs whose upper bits fill one word


def bits_stored(bits: int, block_size: int) -> int:
    """Return the bits used to store a code: 8 for 5- and 6-bit codes whose block size is not a multiple of a group."""
    return bits if block_size % PACKING_GROUPS.get(bits, 1) == 0 else 8


# --- writing


def pack(codes: np.ndarray, block_size: int, bits: int, zero: int) -> np.ndarray:
    """Pack codes [O, I] into words, tile by tile: uint32 or int32 `[O/64, I/Q, ...]` with the last axes of the format.

    Parameters
    ----------
    codes : int8 [O, I], in whole blocks
    block_size : Q
    bits : 4, 5, 6 or 8
    zero : added to every code, so that none is negative
    """
    outputs, inputs = codes.shape
    offset = np.int64(zero)  # with the compiler off, int8 plus a Python int would be int8
    start = -(-outputs // LANES), inputs // block_size
    if bits not in PACKING_GROUPS:
        words = np.zeros((*start, block_size * bits // 32, 1, LANES), np.uint32)
        _pack_all(codes, offset, 32 // bits, bits, words)
        return words[:, :, :, 0].view(WORDS[bits])
    group = PACKING_GROUPS[bits]
    words = np.zeros((*start, block_size // group, group // 8 + 1, LANES), np.uint32)
    _pack_all(codes, offset, group, bits, words)
    return words.view(WORDS[bits])


def _pack_all(codes: np.ndarray, zero: np.int64, group: int, bits: int, words: np.ndarray) -> None:
    """Pack every `group` consecutive codes of a row into `words` [O/64, I/Q, groups per block, words per group, 64]."""
    if not numba.config.DISABLE_JIT:
        _pack_rows(codes, zero, group, bits, words)
        return
    # The same arithmetic on arrays: interpreted loops would take minutes.
    outputs, (tiles, blocks, groups, words_per_group, _) = len(codes), words.shape
    packed = np.zeros((words_per_group, tiles * LANES, blocks, groups), np.uint32)
    pack_group = _pack_word if bits not in PACKING_GROUPS else _pack_upper_bits
    pack_group(np.moveaxis(codes.reshape(outputs, blocks, groups, group), 3, 0), zero, bits, packed[:, :outputs])
    words[:] = packed.reshape(words_per_group, tiles, LANES, blocks, groups).transpose(1, 3, 4, 0, 2)


@compiled_parallel
def _pack_rows(codes, zero, group, bits, words):
    outputs = codes.shape[0]
    tiles, blocks, groups, _, _ = words.shape
    for tile in prange(tiles):
        for lane in range(min(LANES, outputs - np.int64(tile) * LANES)):
            row = np.int64(tile) * LANES + lane
            for block in range(blocks):
                for n in range(groups):
                    first = (block * groups + n) * group
                    if bits == 4 or bits == 8:
                        _pack_word(codes[row, first : first + group], zero, bits, words[tile, block, n, :, lane])
                    else:
                        _pack_upper_bits(codes[row, first : first + group], zero, bits, words[tile, block, n, :, lane])


@compiled
def _pack_word(codes, zero, bits, words):
    """Pack the codes of consecutive inputs, `bits` each, into one word. The items of `codes` can be arrays."""
    word = np.uint32(0)
    for j in range(32 // bits):
        word |= np.uint32(codes[j] + zero) << np.uint32(bits * j)
    words[0] = word


@compiled
def _pack_upper_bits(codes, zero, bits, words):
    """Pack 5- or 6-bit codes: the lower four bits go into words of eight inputs, the upper bits into the last word.

    At the place of a code's upper bits, the other word has the lower bits of the neighbouring input. The bits written
    here cancel those, and also the changes made by upper bits that were written before: from the first of every second
    input to the last for even inputs, and in the opposite direction for odd ones. The items of `codes` can be arrays.
    """
    upper, steps = bits - 4, len(words) - 1
    upper_bits = np.uint32(2**upper - 1)
    last = np.uint32(0)
    for step in range(steps):
        word = np.uint32(0)
        for j in range(8):
            word |= (np.uint32(codes[8 * step + j] + zero) & np.uint32(15)) << np.uint32(4 * j)
        words[step] = word
        neighbours = word >> np.uint32(4)
        for odd in range(2):
            written = np.uint32(0)
            for turn in range(4):
                j = 7 - 2 * turn if odd else 2 * turn
                code = np.uint32(codes[8 * step + j] + zero)
                written ^= ((code >> np.uint32(4)) ^ (neighbours >> np.uint32(4 * j))) & upper_bits
                last |= written << np.uint32(4 * (j + 1 - 2 * odd) + upper * step)
    words[steps] = last
    for step in range(steps):
        even, odd_bits = last >> np.uint32(upper * step), (last << np.uint32(4)) >> np.uint32(upper * step)
        cancelling = (even & np.uint32(0x0F0F0F0F)) | ((odd_bits & np.uint32(0x0F0F0F0F)) << np.uint32(4))
        words[step] ^= cancelling


# --- reading: input `8 * step + j` of a block as float32, without scale and minimum


def _float32(codes, zero, tile, block, step, j, lane):
    return codes[tile, block, 8 * step + j, lane]


def _bfloat16(codes, zero, tile, block, step, j, lane):
    return np.uint32(np.uint32(codes[tile, block, 8 * step + j, lane]) << np.uint32(16)).view(np.float32)


def _four_bits(codes, zero, tile, block, step, j, lane):
    word = codes[tile, block, step, lane]
    down = np.uint32(12 * (j // 5))  # a float32's fraction has 23 bits: higher codes are shifted down into it
    shift = np.uint32(np.uint32(4 * j) - down)
    exponent = np.uint32(np.uint32(EXPONENT - shift) << np.uint32(23))
    code = np.uint32(np.uint32(word >> down) & np.uint32(np.uint32(15) << shift))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


def _eight_bits(codes, zero, tile, block, step, j, lane):
    word = np.uint32(codes[tile, block, 2 * step + j // 4, lane])
    down = np.uint32(16 * (j % 4 // 2))
    shift = np.uint32(8 * (j % 2))
    exponent = np.uint32(np.uint32(EXPONENT - shift) << np.uint32(23))
    code = np.uint32(np.uint32(word >> down) & np.uint32(np.uint32(255) << shift))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


def _with_upper_bits(upper, steps):
    """Return the function that reads codes of 4 + `upper` bits, with one word of upper bits per `steps` steps."""
    mask = np.uint32(2 ** (4 + upper) - 1)

    def read(codes, zero, tile, block, step, j, lane):
        odd = np.uint32(4 * (j % 2))
        lower = np.uint32(np.uint32(codes[tile, block, step // steps, step % steps, lane]) >> odd)
        last = np.uint32(np.uint32(codes[tile, block, step // steps, steps, lane]) << odd)
        word = np.uint32(lower ^ shift_right(last, upper * (step % steps)))
        down = np.uint32(16 * (j // 4))
        shift = np.uint32(8 * (j // 2 % 2))
        exponent = np.uint32(np.uint32(EXPONENT - shift) << np.uint32(23))
        code = np.uint32(np.uint32(word >> down) & np.uint32(mask << shift))
        return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)

    return read


FORMATS = {  # by type and number of axes of the whole array
    (FLOAT32, 4): ("float32", _float32),
    (BFLOAT16, 4): ("bfloat16", _bfloat16),
    (WORDS[8], 4): ("8 bits", _eight_bits),
    (WORDS[4], 4): ("4 bits", _four_bits),
    (WORDS[6], 5): ("6 bits", _with_upper_bits(2, steps=2)),
    (WORDS[5], 5): ("5 bits", _with_upper_bits(1, steps=4)),
}


def format_name(codes: np.ndarray) -> str:
    """Return the name of the format of packed codes."""
    return FORMATS[codes.dtype, codes.ndim][0]


def weight(codes, zero, tile, block, step, j, lane):
    """Return one weight of a tiled matrix in any format. This version runs with the compiler off."""
    return FORMATS[codes.dtype, codes.ndim][1](codes, zero, tile, block, step, j, lane)


@overload(weight, inline="always")
def _compiled_weight(codes, zero, tile, block, step, j, lane):
    """Return the function that the compiler inlines for `weight`: the reader of the codes' format."""
    return FORMATS[as_dtype(codes.dtype), codes.ndim][1]


def shift_right(word, count):
    """Shift a uint32 right by up to 31 bits. This version runs with the compiler off.

    The compiled version is a 32-bit shift. For a variable count, Numba's own would be a 64-bit shift, which handles
    half as many lanes at once.
    """
    return np.uint32(word >> np.uint32(count))


@overload(shift_right, inline="always")
def _compiled_shift_right(word, count):
    return lambda word, count: _shift_right(word, count)


@intrinsic
def _shift_right(typing_context, word, count):
    def generate(context, builder, signature, arguments):
        return builder.lshr(arguments[0], builder.trunc(arguments[1], ir.IntType(32)))

    return types.uint32(types.uint32, types.int64), generate
