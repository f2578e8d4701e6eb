"""Scales and minimums: the factor of a block's sum, and the number added per input of the block.

They are stored in three formats, [tile, block, lane]:

    float32     unchanged
    float16     its bits, in uint16
    int8        for scales that are quantized themselves: an integer per block, and a float per group of blocks, which
                is in `shared` [tile, group, 1 or 2, lane]: for scales first, for minimums second

The product of the integer and the float is exact, so the bits do not depend on the format.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from minillm.ops.jit.float16 import widen_finite


def scale_group(values, shared, block):
    """Return the index of the group of blocks that share a float with this block, or 0 if there are no groups."""
    return np.uint64(block) // np.uint64(max(1, values.shape[1] // max(1, shared.shape[1])))


def scale(values, shared, tile, block, group, lane):
    """Return a block's scale in any format; `group` is from `scale_group`. This version runs with the compiler off."""
    return (_quantized_scale if values.dtype == np.int8 else _plain)(values, shared, tile, block, group, lane)


def minimum(values, shared, tile, block, group, lane):
    """Return a block's minimum; the counterpart of `scale`. This version runs with the compiler off."""
    return (_quantized_minimum if values.dtype == np.int8 else _plain)(values, shared, tile, block, group, lane)


@overload(scale_group, inline="always")
def _compiled_scale_group(values, shared, block):
    if values.dtype == types.int8:
        return lambda values, shared, block: np.uint64(block) // np.uint64(values.shape[1] // shared.shape[1])
    return lambda values, shared, block: np.uint64(0)


@overload(scale, inline="always")
def _compiled_scale(values, shared, tile, block, group, lane):
    return _quantized_scale if values.dtype == types.int8 else _plain


@overload(minimum, inline="always")
def _compiled_minimum(values, shared, tile, block, group, lane):
    return _quantized_minimum if values.dtype == types.int8 else _plain


def _plain(values, shared, tile, block, group, lane):
    return widen_finite(values[tile, block, lane])


def _quantized_scale(values, shared, tile, block, group, lane):
    return np.float32(values[tile, block, lane]) * widen_finite(shared[tile, group, np.uint64(0), lane])


def _quantized_minimum(values, shared, tile, block, group, lane):
    return np.float32(values[tile, block, lane]) * widen_finite(shared[tile, group, np.uint64(1), lane])


def widened(values: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return all scales or minimums as float32 [tile, block, lane]; `shared` has the floats of their groups."""
    if values.dtype != np.int8:
        return values if values.dtype == np.float32 else values.view(np.float16).astype(np.float32)
    floats = shared if shared.dtype == np.float32 else shared.view(np.float16).astype(np.float32)
    return values * np.repeat(floats, values.shape[1] // floats.shape[1], axis=1)
