"""The forms that weights come in, and how each is written and read.

    float32     as they are: [Q, 64], input within the block and lane
    bfloat16    the upper half of a float32, in uint16: [Q, 64]
    8 bits      codes from 0 to 255, those of four neighbouring inputs in a word of 32 bits: [Q/4, 64]
    4 bits      codes from 0 to 15, those of eight neighbouring inputs in a word: [Q/8, 64]
    5 bits      codes from 0 to 31, those of 32 neighbouring inputs in five words: [Q/32, 5, 64]
    6 bits      codes from 0 to 63, those of 16 neighbouring inputs in three words: [Q/16, 3, 64]

Within a word, the first input lies lowest. Of 5 or 6 bits, the lower four are kept as 4-bit codes are, in all words of
the group but its last, which holds the upper one or two of all. Where those of the eight inputs of a step lie, shifts
tell that bring them above the lower bits of the first, third, fifth and seventh, one in each byte, or of the others.

The two words are then joined by exclusive or, and nothing is masked before: each is written so that it also undoes what
the other brings to its bits (`_pack_groups` works it out). An "or" of two masked words says more plainly what is meant,
but a compiler moves its masks to the codes, each of which then takes six instructions instead of four: it made decode's
products with 5 bits 25 % slower, those with 6 bits 12 %.

Few bits stay few: decode waits for memory, and a product with half the bytes takes half the time. The form matters. Two
codes a byte, as files have it, came to half the speed of words, for widening a byte to a lane is what a processor with
AVX-512 is slowest at; a word is loaded once and serves eight times.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype

from minillm.ops.jit.compiling import compiled_parallel

LANES = 64  # outputs a tile holds; measured: clearly faster than 16 or 32

# Types and numbers of axes are how kernels tell the forms apart: the 32 bits are the same, whatever they are called.
FLOATS = np.dtype(np.float32)
HALVES = np.dtype(np.uint16)
WORDS = {8: np.dtype(np.int32), 4: np.dtype(np.uint32), 6: np.dtype(np.int32), 5: np.dtype(np.uint32)}

# Of a float32 of 2^23 or a little more, the fraction's lowest bit counts one. So an integer's bits put there, and 2^23
# taken off again, make the integer a float, exactly, and faster than the conversion instruction. Where the integer lies
# `place` bits further up in its word it need not be moved: then it is 2^(23 - place) whose bit there counts one.
EXPONENT = np.uint32(127 + 23)  # of 2^23, as float32 writes exponents


GROUPS = {5: 32, 6: 16}  # codes of so many bits: inputs whose upper ones fill a word


def bits_kept(bits: int, block_size: int) -> int:
    """How many bits codes of so many are kept in: those of 5 or 6 in 8, where a block is of no whole groups."""
    return bits if block_size % GROUPS.get(bits, 1) == 0 else 8


# --- writing


def pack(codes: np.ndarray, block_size: int, bits: int, zero: int) -> np.ndarray:
    """Codes [O, I] in words, by tiles: uint32 or int32 `[O/64, I/Q, ...]`, ending as the form says.

    Parameters
    ----------
    codes : int8 [O, I], whole blocks
    block_size : Q
    bits : 4, 5, 6 or 8
    zero : what is added to codes, so that none is negative
    """
    outputs, inputs = codes.shape
    zero = np.int64(zero)  # with the compiler off, the sum of an int8 and a Python int would be an int8
    start = -(-outputs // LANES), inputs // block_size
    if bits not in GROUPS:
        words = np.zeros((*start, block_size * bits // 32, LANES), np.uint32)
        _pack_words(codes, zero, bits, words)
    else:
        group = GROUPS[bits]
        words = np.zeros((*start, block_size // group, group // 8 + 1, LANES), np.uint32)
        _pack_groups(codes, zero, bits - 4, words)
    return words.view(WORDS[bits])


@compiled_parallel
def _pack_words(codes, zero, bits, words):
    """Neighbouring inputs' codes, `bits` each, into one word of 32 bits."""
    outputs = codes.shape[0]
    tiles, blocks, steps, _ = words.shape
    together = 32 // bits
    for tile in prange(tiles):
        for lane in range(min(LANES, outputs - np.int64(tile) * LANES)):
            row = np.int64(tile) * LANES + lane
            for block in range(blocks):
                for step in range(steps):
                    first = (block * steps + step) * together
                    word = np.uint32(0)
                    for j in range(together):
                        word |= np.uint32(codes[row, first + j] + zero) << np.uint32(bits * j)
                    words[tile, block, step, lane] = word


@compiled_parallel
def _pack_groups(codes, zero, upper, words):
    """Codes of 5 or 6 bits: the lower four of eight inputs in a word, the `upper` one or two of a group in the last.

    Where a code's upper bits are wanted, the other word has the neighbour's lower ones, and those in turn have been
    changed by upper bits written before: from the first of every second input to the last, or the other way round.
    """
    outputs = codes.shape[0]
    tiles, blocks, groups, steps, _ = words.shape
    upper_bits = np.uint32(2**upper - 1)
    for tile in prange(tiles):
        for lane in range(min(LANES, outputs - np.int64(tile) * LANES)):
            row = np.int64(tile) * LANES + lane
            for block in range(blocks):
                for group in range(groups):
                    last = np.uint32(0)
                    for step in range(steps - 1):
                        first = ((block * groups + group) * (steps - 1) + step) * 8
                        word = np.uint32(0)
                        for j in range(8):
                            word |= (np.uint32(codes[row, first + j] + zero) & np.uint32(15)) << np.uint32(4 * j)
                        words[tile, block, group, step, lane] = word
                        neighbours = word >> np.uint32(4)
                        for odd in range(2):
                            written = np.uint32(0)
                            for turn in range(4):
                                j = 7 - 2 * turn if odd else 2 * turn
                                code = np.uint32(codes[row, first + j] + zero)
                                written ^= ((code >> np.uint32(4)) ^ (neighbours >> np.uint32(4 * j))) & upper_bits
                                last |= written << np.uint32(4 * (j + 1 - 2 * odd) + upper * step)
                    words[tile, block, group, steps - 1, lane] = last
                    for step in range(steps - 1):
                        even, odd = last >> np.uint32(upper * step), (last << np.uint32(4)) >> np.uint32(upper * step)
                        undone = (even & np.uint32(0x0F0F0F0F)) | ((odd & np.uint32(0x0F0F0F0F)) << np.uint32(4))
                        words[tile, block, group, step, lane] ^= undone


# --- reading: input `8 * step + j` of a block, without its scale and minimum, as float32


def _float32(codes, zero, tile, block, step, j, lane):
    return codes[tile, block, 8 * step + j, lane]


def _bfloat16(codes, zero, tile, block, step, j, lane):
    return np.uint32(np.uint32(codes[tile, block, 8 * step + j, lane]) << np.uint32(16)).view(np.float32)


def _four_bits(codes, zero, tile, block, step, j, lane):
    word = codes[tile, block, step, lane]
    far = np.uint32(12 * (j // 5))  # a float32's fraction has 23 bits: codes beyond are brought into its reach
    place = np.uint32(np.uint32(4 * j) - far)
    exponent = np.uint32(np.uint32(EXPONENT - place) << np.uint32(23))
    code = np.uint32(np.uint32(word >> far) & np.uint32(np.uint32(15) << place))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


def _eight_bits(codes, zero, tile, block, step, j, lane):
    word = np.uint32(codes[tile, block, 2 * step + j // 4, lane])
    far = np.uint32(16 * (j % 4 // 2))
    place = np.uint32(8 * (j % 2))
    exponent = np.uint32(np.uint32(EXPONENT - place) << np.uint32(23))
    code = np.uint32(np.uint32(word >> far) & np.uint32(np.uint32(255) << place))
    return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)


def _with_upper_bits(upper, steps):
    """How codes of four bits and `upper` more are read, which `steps` steps have in a word of their own."""
    mask = np.uint32(2 ** (4 + upper) - 1)

    def read(codes, zero, tile, block, step, j, lane):
        odd = np.uint32(4 * (j % 2))
        lower = np.uint32(np.uint32(codes[tile, block, step // steps, step % steps, lane]) >> odd)
        last = np.uint32(np.uint32(codes[tile, block, step // steps, steps, lane]) << odd)
        word = np.uint32(lower ^ shift_right(last, upper * (step % steps)))
        far = np.uint32(16 * (j // 4))
        place = np.uint32(8 * (j // 2 % 2))
        exponent = np.uint32(np.uint32(EXPONENT - place) << np.uint32(23))
        code = np.uint32(np.uint32(word >> far) & np.uint32(mask << place))
        return np.uint32(exponent | code).view(np.float32) - (exponent.view(np.float32) + zero)

    return read


FORMS = {  # by type and number of axes of the whole array
    (FLOATS, 4): ("float32", _float32),
    (HALVES, 4): ("bfloat16", _bfloat16),
    (WORDS[8], 4): ("8 bits", _eight_bits),
    (WORDS[4], 4): ("4 bits", _four_bits),
    (WORDS[6], 5): ("6 bits", _with_upper_bits(2, steps=2)),
    (WORDS[5], 5): ("5 bits", _with_upper_bits(1, steps=4)),
}


def form_of(codes: np.ndarray) -> str:
    """The name of the form, for people."""
    return FORMS[codes.dtype, codes.ndim][0]


def weight(codes, zero, tile, block, step, j, lane):
    """One weight of a matrix in tiles, of whichever form: what runs when the compiler is off."""
    return FORMS[codes.dtype, codes.ndim][1](codes, zero, tile, block, step, j, lane)


@overload(weight, inline="always")
def _compiled_weight(codes, zero, tile, block, step, j, lane):
    """What the compiler puts in place of `weight`: the one form that the codes have."""
    return FORMS[as_dtype(codes.dtype), codes.ndim][1]


def shift_right(word, count):
    """A uint32 shifted by up to 31 bits: what runs when the compiler is off.

    Compiled, it stays a shift of 32 bits. Numba's own would be one of 64, half as many lanes at once, where the count
    is no constant.
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
