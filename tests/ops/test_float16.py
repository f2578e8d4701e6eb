"""Converting between float16 and float32 by their bits: compiled and interpreted, against NumPy."""

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minillm.ops.jit import float16


def bit_patterns(bits):
    """Return random bit patterns: every exponent is equally likely, including the one of infinity and NaN."""
    return st.integers(0, 2**bits - 1)


@numba.njit
def widened(bits):
    wide, finite = np.empty(len(bits), np.float32), np.empty(len(bits), np.float32)
    for i in range(len(bits)):
        wide[i], finite[i] = float16.widen(bits[i]), float16.widen_finite(bits[i])
    return wide, finite


@numba.njit
def narrowed(value, like):
    return float16.narrow(value, like)


def test_every_float16_widens_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    interpreted = np.array([float16.widen(number) for number in bits])
    wide, finite = widened(bits)
    for ours in wide, interpreted, np.where(np.isfinite(expected), finite, expected):
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(expected))


@given(bits=bit_patterns(32))
def test_float32_is_rounded_to_float16_as_in_numpy(bits):
    value, like = np.uint32(bits).view(np.float32), np.empty(0, np.uint16)
    with np.errstate(over="ignore"):
        expected = value.astype(np.float16)
    for narrow in (narrowed, float16.narrow):
        ours = np.uint16(narrow(value, like)).view(np.float16)
        assert ours.view(np.uint16) == expected.view(np.uint16) or (np.isnan(ours) and np.isnan(expected))


@given(sign=st.booleans(), bits=bit_patterns(15), step=st.integers(-1, 1))
def test_ties_between_two_float16_numbers_round_to_even(sign, bits, step):
    low, high = (np.uint16(min(b, 0x7BFF)).view(np.float16).astype(np.float32) for b in (bits, bits + 1))
    nearby = int(((low + high) / 2).view(np.uint32)) + step
    between = np.uint32(nearby % 2**31).view(np.float32)
    value = np.float32(-between if sign else between)
    ours = np.uint16(narrowed(value, np.empty(0, np.uint16)))
    with np.errstate(over="ignore"):
        assert ours == value.astype(np.float16).view(np.uint16) or np.isnan(value)
