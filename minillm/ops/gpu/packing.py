"""Weights as the kernels read them: neighbouring inputs of one output in a word of 32 bits, outputs side by side.

A thread computes one output, and its 31 neighbours in step with it compute the next outputs. So that they read
neighbouring words, a matrix [O, I] lies outputs innermost, `[I/Q, words a block, O]`: block of Q inputs, word within
the block, output. A word holds

    32 bits     one float32
    16 bits     two bfloat16, the upper halves of float32
     8 bits     four codes from 0 to 255
     4 bits     eight codes from 0 to 15

the first input lowest. Integer codes have a scale, and perhaps a minimum, per block and output, `[I/Q, O]`; they stay
integer codes on the GPU, and decode, which waits for memory, is the faster for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minillm.ops.gpu import device
from minillm.quantization import QuantizedMatrix

Array = Any  # CuPy's

FLOAT_BLOCK = 32  # inputs a block holds where the weights are floats and no scale says how many


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix [O, I] in words. Where a row does not fill its last block, codes there stand for nothing."""

    words: Array  # uint32 [I/Q, words a block, O]
    scales: Array  # float32 [I/Q, O]; of size 0 for floats
    minimums: Array  # the same, or of size 0 where the type has none
    bits: int  # of a weight: 32, 16, 8 or 4
    zero: int  # the code that means 0
    block_size: int  # Q
    num_inputs: int  # I

    @property
    def num_outputs(self) -> int:
        """`O`."""
        return self.words.shape[2]

    @property
    def settings(self) -> dict[str, int]:
        """What a kernel that reads such a matrix must be compiled with."""
        return {
            "BITS": self.bits,
            "ZERO": self.zero,
            "BLOCK": self.block_size,
            "HAS_MINIMUMS": int(self.minimums.size > 0),
        }


def as_matrix(weights: np.ndarray | QuantizedMatrix, xp: ModuleType | None = None) -> PackedMatrix:
    """Pack a weight matrix [O, I]; integer codes stay integer codes, bfloat16 stays bfloat16.

    Raises
    ------
    ValueError
        Codes of 4 bits are out of range.
    """
    xp = xp or device.array_library()
    none = xp.zeros((0, 0), dtype=xp.float32)
    if not isinstance(weights, QuantizedMatrix):
        floats = xp.asarray(np.require(weights, np.float32, ["C", "W"]))  # writable: a file's own pages are copied
        bits, patterns = 32, floats.view(xp.uint32)
        if not (patterns & 0xFFFF).any():  # nothing below bfloat16's precision
            bits, patterns = 16, patterns >> 16
        return PackedMatrix(
            _pack(_in_blocks(patterns, xp), bits, xp), none, none, bits, 0, FLOAT_BLOCK, floats.shape[1]
        )
    bits = 4 if weights.bits == 4 else 8  # no form of its own for 5 and 6
    zero = 128 if bits == 8 else 0 if weights.minimums is not None else 8  # packed is code + zero, never negative
    if bits == 4 and (weights.codes.min(initial=-zero) < -zero or weights.codes.max(initial=-zero) > 15 - zero):
        raise ValueError(f"codes from {weights.codes.min()} to {weights.codes.max()} are not of 4 bits")
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
    """`as_matrix` of several."""
    return [as_matrix(matrix, xp) for matrix in weights]


def num_bytes(matrix: PackedMatrix) -> int:
    """Bytes that reading the whole matrix moves."""
    return matrix.words.nbytes + matrix.scales.nbytes + matrix.minimums.nbytes


def _in_blocks(patterns: Array, xp: ModuleType) -> Array:
    """Bit patterns [O, I] as [O, I/Q, Q], with zeros up to whole blocks."""
    outputs, inputs = patterns.shape
    blocks = -(-inputs // FLOAT_BLOCK)
    padded = xp.zeros((outputs, blocks * FLOAT_BLOCK), dtype=xp.uint32)
    padded[:, :inputs] = patterns
    return padded.reshape(outputs, blocks, FLOAT_BLOCK)


def _pack(codes: Array, bits: int, xp: ModuleType) -> Array:
    """Codes that are not negative [O, I/Q, Q], `bits` of each, into words: uint32 [I/Q, words a block, O]."""
    outputs, blocks, block_size = codes.shape
    together = 32 // bits
    words = xp.zeros((outputs, blocks, -(-block_size // together)), dtype=xp.uint32)
    for place in range(together):
        neighbours = codes[:, :, place::together].astype(xp.uint32)
        words[:, :, : neighbours.shape[2]] |= neighbours << xp.uint32(bits * place)
    return xp.ascontiguousarray(words.transpose(1, 2, 0))
