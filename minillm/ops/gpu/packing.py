"""Weights as the GPU kernels read them: consecutive inputs of one output in a 32-bit word, outputs side by side.

A thread computes one output, and the 31 threads in step with it compute the next outputs. They should read neighbouring
words, so a matrix [O, I] is stored with outputs innermost, `[I/Q, words per block, O]`: block of Q inputs, word within
the block, output. A word holds

    32 bits     one float32
    16 bits     two bfloat16, the upper halves of float32
     8 bits     four codes from 0 to 255
     4 bits     eight codes from 0 to 15

with the first input in the lowest bits. Integer codes have a scale, and some types a minimum, per block and output,
`[I/Q, O]`. They stay integer codes on the GPU, which makes decode faster, because it is limited by memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minillm.ops.gpu import device
from minillm.quantization import QuantizedMatrix

Array = Any  # a CuPy array

FLOAT_BLOCK = 32  # inputs per block of float weights, which have no scales


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix [O, I] in words. Codes in the padding of an incomplete last block have no effect."""

    words: Array  # uint32 [I/Q, words per block, O]
    scales: Array  # float32 [I/Q, O]; of size 0 for float weights
    minimums: Array  # the same, or of size 0 if the type has none
    bits: int  # per weight: 32, 16, 8 or 4
    zero: int  # the code that represents 0
    block_size: int  # Q
    num_inputs: int  # I

    @property
    def num_outputs(self) -> int:
        """`O`."""
        return self.words.shape[2]

    @property
    def settings(self) -> dict[str, int]:
        """The constants that a kernel for this matrix is compiled with."""
        return {
            "BITS": self.bits,
            "ZERO": self.zero,
            "BLOCK": self.block_size,
            "HAS_MINIMUMS": int(self.minimums.size > 0),
        }


def as_matrix(weights: np.ndarray | QuantizedMatrix, xp: ModuleType | None = None) -> PackedMatrix:
    """Pack a weight matrix [O, I]. Integer codes stay integer codes, and bfloat16 stays bfloat16.

    Raises
    ------
    ValueError
        Codes of 4 bits are out of range.
    """
    xp = xp or device.array_library()
    none = xp.zeros((0, 0), dtype=xp.float32)
    if not isinstance(weights, QuantizedMatrix):
        # Required to be writable, so that memory-mapped pages are copied.
        floats = xp.asarray(np.require(weights, np.float32, ["C", "W"]))
        bits, patterns = 32, floats.view(xp.uint32)
        if not (patterns & 0xFFFF).any():  # the lower halves are all zero: bfloat16 is exact
            bits, patterns = 16, patterns >> 16
        return PackedMatrix(
            _pack(_in_blocks(patterns, xp), bits, xp), none, none, bits, 0, FLOAT_BLOCK, floats.shape[1]
        )
    bits = 4 if weights.bits == 4 else 8  # 5- and 6-bit codes have no separate packing
    # The words hold code + zero, which is never negative.
    zero = 128 if bits == 8 else 0 if weights.minimums is not None else 8
    if bits == 4 and (weights.codes.min(initial=-zero) < -zero or weights.codes.max(initial=-zero) > 15 - zero):
        raise ValueError(f"codes from {weights.codes.min()} to {weights.codes.max()} do not fit 4 bits")
    codes = xp.asarray(weights.codes)
    return PackedMatrix(
        words=_pack(codes + xp.int16(zero), bits, xp),
        scales=xp.ascontiguousarray(xp.asarray(weights.scales).T),
        minimums=none if weights.minimums is None else xp.ascontiguousarray(xp.asarray(weights.minimums).T),
        bits=bits,
        zero=zero,
        block_size=weights.block_size,
        num_inputs=weights.num_inputs,
    )


def as_matrices(weights: Iterable[np.ndarray | QuantizedMatrix], xp: ModuleType | None = None) -> list[PackedMatrix]:
    """Apply `as_matrix` to several matrices."""
    return [as_matrix(matrix, xp) for matrix in weights]


def num_bytes(matrix: PackedMatrix) -> int:
    """Return the bytes read when the whole matrix is read."""
    return matrix.words.nbytes + matrix.scales.nbytes + matrix.minimums.nbytes


def _in_blocks(patterns: Array, xp: ModuleType) -> Array:
    """Reshape bit patterns [O, I] to [O, I/Q, Q], padded with zeros to whole blocks."""
    outputs, inputs = patterns.shape
    blocks = -(-inputs // FLOAT_BLOCK)
    padded = xp.zeros((outputs, blocks * FLOAT_BLOCK), dtype=xp.uint32)
    padded[:, :inputs] = patterns
    return padded.reshape(outputs, blocks, FLOAT_BLOCK)


def _pack(codes: Array, bits: int, xp: ModuleType) -> Array:
    """Pack non-negative codes [O, I/Q, Q] of `bits` bits into words: uint32 [I/Q, words per block, O]."""
    outputs, blocks, block_size = codes.shape
    codes_per_word = 32 // bits
    words = xp.zeros((outputs, blocks, -(-block_size // codes_per_word)), dtype=xp.uint32)
    for index in range(codes_per_word):
        neighbours = codes[:, :, index::codes_per_word].astype(xp.uint32)
        words[:, :, : neighbours.shape[2]] |= neighbours << xp.uint32(bits * index)
    return xp.ascontiguousarray(words.transpose(1, 2, 0))
