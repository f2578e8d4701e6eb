"""Float16 as bits: scales, keys and values in half the memory, widened when read and rounded when written.

A float16 has a sign bit, 5 bits of exponent and 10 of fraction; a float32 has 8 and 23. Numba has no float16 on CPUs,
so such arrays are passed to the kernels as uint16, and the bits are converted here.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from minillm.ops.reference import FLOAT16_LIMIT

# The exponents of the two types differ by 112 (127 - 15). After a float16's exponent and fraction have been shifted to
# their places in a float32, a multiplication by 2^112 gives the correct number, also for subnormal ones.
EXPONENTS_APART = np.float32(2.0**112)
INFINITY_16, INFINITY_32 = np.uint32(0x7C00), np.uint32(0x7F800000)  # the exponent bits of infinity and NaN
SIGN_AND_LOW_28 = np.uint32(0x8FFFFFFF)
NAN_16 = np.uint32(0x7E00)
SIGN_16, BELOW_SIGN_16, BELOW_SIGN_32 = np.uint32(0x8000), np.uint32(0x7FFF), np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = np.float32(2.0**-14)
HALF, HALF_BITS = np.float32(0.5), np.uint32(0x3F000000)


def as_stored(array: np.ndarray) -> np.ndarray:
    """Return an array as kernels take it: float16 as its bits in uint16, float32 unchanged."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def as_float16_bits(array: np.ndarray) -> np.ndarray:
    """Return a float32 array as float16 bits if all its numbers are finite and exact in float16, else unchanged."""
    with np.errstate(over="ignore"):
        rounded16 = array.astype(np.float16)
    return rounded16.view(np.uint16) if np.isfinite(rounded16).all() and (rounded16 == array).all() else array


def widen(number):
    """Return a stored number as float32. This version runs with the compiler off."""
    return _widen_float16(number) if isinstance(number, np.uint16) else number


def widen_finite(number):
    """Widen a finite number, in half as many operations as `widen`. This version runs with the compiler off."""
    return _widen_finite_float16(number) if isinstance(number, np.uint16) else number


def narrow(value, like):
    """Return a float32 in the type that the array `like` stores. This version runs with the compiler off."""
    return (_narrow_to_float16 if like.dtype == np.uint16 else _unchanged)(value, like)


@overload(widen, inline="always")
def _compiled_widen(number):
    return _widen_float16 if number == types.uint16 else lambda number: number


@overload(widen_finite, inline="always")
def _compiled_widen_finite(number):
    return _widen_finite_float16 if number == types.uint16 else lambda number: number


@overload(narrow)
def _compiled_narrow(value, like):
    return _narrow_to_float16 if like.dtype == types.uint16 else _unchanged


def _widen_float16(number):
    bits = np.uint32(number)
    sign = np.uint32(np.uint32(bits & SIGN_16) << np.uint32(16))
    magnitude = np.uint32(bits & BELOW_SIGN_16)
    wide = np.uint32(magnitude << np.uint32(13))
    wide = np.float32(wide.view(np.float32) * EXPONENTS_APART).view(np.uint32)
    missing = np.uint32(np.uint32(magnitude >= INFINITY_16) * INFINITY_32)  # for infinity and NaN: the full exponent
    return np.uint32(np.uint32(wide | missing) | sign).view(np.float32)


def _widen_finite_float16(number):
    # An arithmetic shift by three places puts exponent and fraction where a float32 has them, below the sign.
    moved = np.int32(np.int32(np.uint32(np.uint32(number) << np.uint32(16))) >> np.int32(3))
    return np.uint32(np.uint32(moved) & SIGN_AND_LOW_28).view(np.float32) * EXPONENTS_APART


def _narrow_to_float16(value, like):
    """Round to the nearest float16, ties to even, as NumPy's `astype` does."""
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & SIGN_16)
    magnitude = np.uint32(bits & BELOW_SIGN_32)
    size = magnitude.view(np.float32)
    if magnitude > INFINITY_32:
        narrowed = NAN_16
    elif size < SMALLEST_NORMAL:
        # The last bit of 1/2 is worth 2^-24, as in a subnormal float16, so adding 1/2 rounds correctly.
        narrowed = np.uint32(np.float32(size + HALF).view(np.uint32) - HALF_BITS)
    else:
        # Adding just under half of the last kept bit, or exactly half if that bit is odd, rounds to nearest, ties to
        # even.
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(0xFFF)) + odd)
        narrowed = min(np.uint32(np.uint32(rounded >> np.uint32(13)) - np.uint32(112 << 10)), INFINITY_16)
    return np.uint16(sign | narrowed)


def _unchanged(value, like):
    return value


def overflows(value, like):
    """Return whether a number is infinite in the type of `like`. This version runs with the compiler off."""
    return (_overflows_float16 if like.dtype == np.uint16 else _never)(value, like)


@overload(overflows)
def _compiled_overflows(value, like):
    return _overflows_float16 if like.dtype == types.uint16 else _never


def _overflows_float16(value, like):
    return abs(value) >= FLOAT16_LIMIT


def _never(value, like):
    return False
