"""Asking the memory for what will be needed soon.

A processor guesses what comes next and fetches it early, but its guesses end where a page of 4 KB does, and a tile of
weights is three to nine of those. Asked for 4 KB ahead, 4-bit weights arrive a sixth faster.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

LINE = 64  # bytes that memory delivers at once
AHEAD = 4096  # bytes


def prefetch(array, start, num_bytes):
    """Have `num_bytes` of a contiguous array, from byte `start` on, brought into the cache; nobody waits.

    Where the array ends before, no harm is done. With the compiler off, nothing happens.
    """


@overload(prefetch, inline="always")
def _compiled_prefetch(array, start, num_bytes):
    def ask(array, start, num_bytes):
        first = np.uint64(array.ctypes.data) + np.uint64(start)
        for line in range(0, num_bytes, LINE):
            _prefetch_line(first + np.uint64(line))

    return ask


@intrinsic
def _prefetch_line(typing_context, address):
    """LLVM's instruction for it, which every processor has or may ignore."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        to_read, to_keep, data = number(0), number(3), number(1)
        builder.call(instruction, [builder.inttoptr(arguments[0], pointer), to_read, to_keep, data])
        return context.get_dummy_value()

    return types.void(types.uint64), generate
