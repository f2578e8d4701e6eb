"""Weights stored in few bits: integer codes times a scale for every small block of inputs.

A matrix of outputs x inputs (`[O, I]`) is cut along its inputs into blocks of `Q` neighbours (32 for the types
below). A block keeps one small integer a weight and one or two floats for all of them:

    weight[o, b*Q + q]  =  codes[o, b, q] * scales[o, b]  (+ minimums[o, b])

Where a row does not divide into blocks, its last block is full in memory, and what stands past the row is not read.

Nothing is lost on the way from a GGUF file to a `QuantizedMatrix`: the codes are the file's own, and its
float16 scales are exact in float32. The layouts are ggml's (`ggml-common.h` in ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CHUNK = 65_536  # weights that `quantize` rounds at a time, so that what it works on stays in the processor's cache


@dataclass(frozen=True)
class QuantizedMatrix:
    """Integer codes with a scale, and for some types a minimum, per block. Checked when made.

    Attributes
    ----------
    codes : int8 [O, I/Q rounded up, Q]; of four bits: -8 to 7, or with minimums 0 to 15
    scales : float32 [O, I/Q rounded up]
    minimums : float32 [O, I/Q rounded up], or None where the type is symmetric around zero
    bits : 4 or 8, how many a code needs
    num_inputs : I; None for as many as the blocks hold. Codes of the last block from there on stand for nothing.

    Raises
    ------
    ValueError
        `num_inputs` does not end in the last block.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None
    bits: int = 8
    num_inputs: int | None = None

    def __post_init__(self):
        _, blocks, block_size = self.codes.shape
        if self.num_inputs is None:
            object.__setattr__(self, "num_inputs", blocks * block_size)  # how a frozen dataclass tidies its own fields
        if -(-self.num_inputs // block_size) != blocks:
            raise ValueError(f"{self.num_inputs} inputs do not fill {blocks} blocks of {block_size}")

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, I)`, the shape of the matrix it stands for."""
        return self.codes.shape[0], self.num_inputs

    @property
    def block_size(self) -> int:
        """`Q`: how many neighbouring inputs share a scale."""
        return self.codes.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes held by codes, scales and minimums."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    def dequantize(self) -> np.ndarray:
        """The matrix as float32 [O, I]."""
        weights = self.codes * self.scales[:, :, None]  # int8 x float32 is float32
        if self.minimums is not None:
            weights += self.minimums[:, :, None]
        outputs, blocks, block_size = self.codes.shape
        return weights.reshape(outputs, blocks * block_size)[:, : self.num_inputs]

    def check_scales(self) -> None:
        """Raise ValueError if a scale or minimum is NaN or infinite, as in a damaged file: no weight came of it."""
        for kind, values in ("scale", self.scales), ("minimum", self.minimums):
            if values is not None and not np.isfinite(values).all():
                row, block = np.argwhere(~np.isfinite(values))[0]
                raise ValueError(f"the {kind} of row {row}, block {block} is {values[row, block]}, wanted finite ones")

    def __repr__(self):
        outputs, inputs = self.shape
        kind = "scale" if self.minimums is None else "scale and minimum"
        return (
            f"QuantizedMatrix({outputs} x {inputs}, {self.bits} bits, a {kind} per {self.block_size} inputs, "
            f"{self.num_bytes / 1e6:.1f} MB)"
        )


def quantize(matrix: np.ndarray, bits: int, block_size: int = 32) -> QuantizedMatrix:
    """Round a float matrix to 8 or 4 bits a weight, a block of neighbouring inputs at a time (see `round_blocks`).

    Parameters
    ----------
    matrix : float32 [O, I]; a last block that is not full has the scale and minimum of the weights it has
    bits : 8 or 4
    block_size : Q, how many inputs share a scale

    Raises
    ------
    ValueError
        `bits` or `block_size` is none that there is, or a weight (or the span of a block) is not finite.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; weights are quantized to 4 or 8")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block holds at least one weight")
    outputs, inputs = matrix.shape
    blocks, missing = -(-inputs // block_size), -inputs % block_size
    codes = np.empty((outputs, blocks, block_size), np.int8)
    scales, minimums = np.empty((2, outputs, blocks), np.float32)
    rows = max(1, CHUNK // max(1, inputs))
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        weights = np.asarray(matrix[part], np.float32)
        if missing:  # repeating the last weight moves neither the largest nor the smallest
            weights = np.pad(weights, ((0, 0), (0, missing)), mode="edge")
        rounded = round_blocks(weights.reshape(-1, block_size), bits)
        codes[part], scales[part], minimums[part] = (
            values.reshape(whole[part].shape) for values, whole in zip(rounded, (codes, scales, minimums), strict=True)
        )
        if not np.isfinite(scales[part]).all():
            row, block = np.argwhere(~np.isfinite(scales[part]))[0]
            why = _why_not(weights[row, block * block_size : (block + 1) * block_size])
            raise ValueError(f"row {first + row}, block {block} {why}")
    return QuantizedMatrix(codes, scales, minimums if bits == 4 else None, bits, inputs)


def round_blocks(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minimums of blocks of weights: float32 [n, Q] -> int8 [n, Q], float32 [n], float32 [n].

    8 bits are symmetric: the largest weight of a block, by magnitude, becomes 127 or -127, and the minimum stays 0.
    4 bits need all they have: the block's smallest weight becomes 0 and its largest 15. No weight is off by more than
    half a scale (but for blocks of nothing but numbers under 1e-36, whose scale is itself rounded). A block whose
    weights, or the span from smallest to largest, are no finite numbers has a scale that is none either.
    """
    # [Q, n], a copy: SIMD then runs over many blocks instead of along the few weights of one
    columns = np.array(blocks.T, order="C")
    smallest, largest = columns.min(axis=0), columns.max(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        if bits == 4:
            lowest, highest, minimums = 0, 15, smallest
            columns -= minimums
            scales = (largest - smallest) / np.float32(15)
        else:
            lowest, highest, minimums = -127, 127, np.zeros_like(smallest)
            scales = np.maximum(largest, -smallest) / np.float32(127)
        columns /= np.where(scales == 0, np.float32(1), scales)  # a block of equal weights has nothing to scale
        codes = np.clip(np.rint(columns, out=columns), lowest, highest, out=columns).astype(np.int8)
    return codes.T, scales, minimums


def _why_not(weights: np.ndarray) -> str:
    if np.isfinite(weights).all():
        return f"spans {weights.min()} to {weights.max()}, more than float32 can hold"
    return "holds NaN or infinity, which no code stands for"


@dataclass(frozen=True)
class StorageType:
    """How one of GGUF's types lays values out: `block` describes the bytes of `block_size` neighbouring values."""

    name: str
    block_size: int
    block: np.dtype
    unpack: Callable[[np.ndarray], QuantizedMatrix | np.ndarray]

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale, so that `unpack` gives a QuantizedMatrix."""
        return self.block_size > 1

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` take; they must be whole blocks."""
        return num_values // self.block_size * self.block.itemsize

    def read(self, data: np.ndarray, shape: tuple[int, ...]) -> QuantizedMatrix | np.ndarray:
        """Turn a tensor's bytes into numbers.

        Parameters
        ----------
        data : uint8 [num_bytes], contiguous; usually a view into a mapped file
        shape : the tensor's shape, outputs first; the last axis holds whole blocks

        Returns
        -------
        float32 array of `shape` for the float types (F32 is a view, nothing is copied), else a QuantizedMatrix.
        """
        return self.unpack(data.view(self.block).reshape(*shape[:-1], shape[-1] // self.block_size))


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) -> float32: bfloat16 is a float32 cut off after 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., Q/2] -> int8 [..., Q]: low halves hold the block's first Q/2 codes, high halves the rest."""
    half = packed.shape[-1]
    codes = np.empty((*packed.shape[:-1], 2 * half), np.int8)
    np.bitwise_and(packed, 15, out=codes[..., :half].view(np.uint8))
    np.right_shift(packed, 4, out=codes[..., half:].view(np.uint8))
    return codes


def _unpack_q8_0(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(blocks["codes"], blocks["scale"].astype(np.float32))


def _unpack_q4_0(blocks: np.ndarray) -> QuantizedMatrix:
    codes = unpack_nibbles(blocks["codes"])
    codes -= 8  # stored 0..15, meant -8..7
    return QuantizedMatrix(codes, blocks["scale"].astype(np.float32), bits=4)


def _unpack_q4_1(blocks: np.ndarray) -> QuantizedMatrix:
    return QuantizedMatrix(
        unpack_nibbles(blocks["codes"]),
        blocks["scale"].astype(np.float32),
        blocks["minimum"].astype(np.float32),
        bits=4,
    )


STORAGE_TYPES: dict[str, StorageType] = {
    kind.name: kind
    for kind in (
        StorageType("F32", 1, np.dtype("<f4"), lambda values: values),
        StorageType("F16", 1, np.dtype("<f2"), lambda values: values.astype(np.float32)),
        StorageType("BF16", 1, np.dtype("<u2"), widen_bfloat16),
        StorageType("Q8_0", 32, np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), _unpack_q8_0),
        StorageType("Q4_0", 32, np.dtype([("scale", "<f2"), ("codes", "u1", 16)]), _unpack_q4_0),
        StorageType("Q4_1", 32, np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)]), _unpack_q4_1),
    )
}
