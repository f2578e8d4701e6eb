"""Scales and minimums, and how each is read: what a block's sum is multiplied with, and what is added for its inputs.

They come in three forms, [tile, block, lane]:

    float32     as they are
    float16     its bits, in uint16
    int8        parts, of scales that are quantized themselves: times a float that a group of blocks shares, which is in
                `shared` [tile, group, 1 or 2, lane], of scales first, of minimums second

A product of the two parts is exact, so no bit depends on the form.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from minillm.ops.jit.float16 import widen_finite


def group_of(values, shared, block):
    """Which of the groups of blocks that share a float a block is in; 0 where none do. Of unsigned numbers."""
    return np.uint64(block) // np.uint64(max(1, values.shape[1] // max(1, shared.shape[1])))


def scale(values, shared, tile, block, group, lane):
    """A block's scale, whatever the form; `group` is from `group_of`. What runs when the compiler is off."""
    return (_scale_of_parts if values.dtype == np.int8 else _plain)(values, shared, tile, block, group, lane)


def minimum(values, shared, tile, block, group, lane):
    """A block's minimum, whatever the form; `group` is from `group_of`. What runs when the compiler is off."""
    return (_minimum_of_parts if values.dtype == np.int8 else _plain)(values, shared, tile, block, group, lane)


@overload(group_of, inline="always")
def _compiled_group_of(values, shared, block):
    if values.dtype == types.int8:
        return lambda values, shared, block: np.uint64(block) // np.uint64(values.shape[1] // shared.shape[1])
    return lambda values, shared, block: np.uint64(0)


@overload(scale, inline="always")
def _compiled_scale(values, shared, tile, block, group, lane):
    return _scale_of_parts if values.dtype == types.int8 else _plain


@overload(minimum, inline="always")
def _compiled_minimum(values, shared, tile, block, group, lane):
    return _minimum_of_parts if values.dtype == types.int8 else _plain


def _plain(values, shared, tile, block, group, lane):
    return widen_finite(values[tile, block, lane])


def _scale_of_parts(values, shared, tile, block, group, lane):
    return np.float32(values[tile, block, lane]) * widen_finite(shared[tile, group, np.uint64(0), lane])


def _minimum_of_parts(values, shared, tile, block, group, lane):
    return np.float32(values[tile, block, lane]) * widen_finite(shared[tile, group, np.uint64(1), lane])


def widened(values: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """All of a matrix's scales or minimums as float32 [tile, block, lane]; `shared` is their part of it."""
    if values.dtype != np.int8:
        return values if values.dtype == np.float32 else values.view(np.float16).astype(np.float32)
    rest = shared if shared.dtype == np.float32 else shared.view(np.float16).astype(np.float32)
    return values * np.repeat(rest, values.shape[1] // rest.shape[1], axis=1)
