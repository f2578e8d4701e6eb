"""Float16 as bits, for scales, keys and values in half the memory: widened as they are read, rounded as they are kept.

A float16 has a sign, 5 bits of exponent and 10 of fraction; a float32 has 8 and 23. Numba's compiler for CPUs knows no
float16, so arrays of it reach the kernels as uint16, and the bits are moved by hand.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

# The exponents of the two are 112 apart (127 - 15): after a float16's exponent and fraction have been moved to where a
# float32 has them, a multiplication by 2^112 makes the number right, be it as small as it may.
EXPONENTS_APART = np.float32(2.0**112)
INFINITY_16, INFINITY_32 = np.uint32(0x7C00), np.uint32(0x7F800000)  # the exponent bits of infinity and NaN
SIGN_AND_LOW_28 = np.uint32(0x8FFFFFFF)
NAN_16 = np.uint32(0x7E00)
SIGN_16, BELOW_SIGN_16, BELOW_SIGN_32 = np.uint32(0x8000), np.uint32(0x7FFF), np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = np.float32(2.0**-14)
HALF, HALF_BITS = np.float32(0.5), np.uint32(0x3F000000)


def stored(array: np.ndarray) -> np.ndarray:
    """What a kernel is given of an array: float16 as its bits, float32 as it is."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def as_halves(array: np.ndarray) -> np.ndarray:
    """A float32 array as the bits of float16, if all its numbers are finite and none loses anything; else as it is."""
    with np.errstate(over="ignore"):
        halves = array.astype(np.float16)
    return halves.view(np.uint16) if np.isfinite(halves).all() and (halves == array).all() else array


def widen(number):
    """A stored number as float32: what runs when the compiler is off."""
    return _widen_half(number) if isinstance(number, np.uint16) else number


def widen_finite(number):
    """The same of a number that is neither infinite nor NaN, in half the steps: what runs when the compiler is off."""
    return _widen_finite_half(number) if isinstance(number, np.uint16) else number


def narrow(value, like):
    """A float32 in the form in which the array `like` stores numbers: what runs when the compiler is off."""
    return (_narrow_to_half if like.dtype == np.uint16 else _as_it_is)(value, like)


@overload(widen, inline="always")
def _compiled_widen(number):
    return _widen_half if number == types.uint16 else lambda number: number


@overload(widen_finite, inline="always")
def _compiled_widen_finite(number):
    return _widen_finite_half if number == types.uint16 else lambda number: number


@overload(narrow)
def _compiled_narrow(value, like):
    return _narrow_to_half if like.dtype == types.uint16 else _as_it_is


def _widen_half(number):
    bits = np.uint32(number)
    sign = np.uint32(np.uint32(bits & SIGN_16) << np.uint32(16))
    magnitude = np.uint32(bits & BELOW_SIGN_16)
    wide = np.uint32(magnitude << np.uint32(13))
    wide = np.float32(wide.view(np.float32) * EXPONENTS_APART).view(np.uint32)
    missing = np.uint32(np.uint32(magnitude >= INFINITY_16) * INFINITY_32)  # infinity, NaN: all the exponent's bits
    return np.uint32(np.uint32(wide | missing) | sign).view(np.float32)


def _widen_finite_half(number):
    # Three places down from the top, the sign drawn along, exponent and fraction lie as a float32 has them.
    moved = np.int32(np.int32(np.uint32(np.uint32(number) << np.uint32(16))) >> np.int32(3))
    return np.uint32(np.uint32(moved) & SIGN_AND_LOW_28).view(np.float32) * EXPONENTS_APART


def _narrow_to_half(value, like):
    """The nearest float16, ties to even, as NumPy's `astype` rounds."""
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & SIGN_16)
    magnitude = np.uint32(bits & BELOW_SIGN_32)
    size = magnitude.view(np.float32)
    if magnitude > INFINITY_32:
        narrowed = NAN_16
    elif size < SMALLEST_NORMAL:
        # The last bit of 1/2 counts 2^-24, as a float16's does down here: adding it leaves rounding to the addition.
        narrowed = np.uint32(np.float32(size + HALF).view(np.uint32) - HALF_BITS)
    else:
        # Adding just under half of the last bit that stays, or just half where that bit is odd, rounds what is cut off.
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(0xFFF)) + odd)
        narrowed = min(np.uint32(np.uint32(rounded >> np.uint32(13)) - np.uint32(112 << 10)), INFINITY_16)
    return np.uint16(sign | narrowed)


def _as_it_is(value, like):
    return value
