"""QuantizedMatrix: integer codes, with a scale and perhaps a minimum for every small block of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class QuantizedScales:
    """Scales (or minimums) that are quantized themselves: a small integer a block, times a float for several of them.

    Attributes
    ----------
    parts : int8 [O, I/Q], a block's own
    shared : float32 [O, I/(Q*S)], of `S` neighbouring blocks
    """

    parts: np.ndarray
    shared: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What each block multiplies with: float32 [O, I/Q]."""
        outputs, blocks = self.parts.shape
        with np.errstate(invalid="ignore"):  # a damaged file's infinity times 0: `check_scales` will say where
            products = self.shared[:, :, None] * self.parts.reshape(*self.shared.shape, -1)  # float32 x int8 is float32
        return products.reshape(outputs, blocks)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Integer codes with a scale, and for some types a minimum, per block. Checked when made.

    Attributes
    ----------
    codes : int8 [O, I/Q rounded up, Q]; with minimums from 0 to 2^bits - 1 (of 8 bits: any), else half of it either way
    scales : float32 [O, I/Q rounded up]
    minimums : float32 [O, I/Q rounded up], or None where the type is symmetric around zero
    bits : 4, 5, 6 or 8, how many a code needs
    num_inputs : I; None for as many as the blocks hold. Codes of the last block from there on stand for nothing.
    scale_parts, minimum_parts : QuantizedScales that `scales` and `minimums` are the values of, where they are
        quantized themselves; a backend may keep those instead. Made by `of_parts`.

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
    scale_parts: QuantizedScales | None = None
    minimum_parts: QuantizedScales | None = None

    @classmethod
    def of_parts(
        cls, codes: np.ndarray, scales: QuantizedScales, minimums: QuantizedScales | None = None, *, bits: int
    ) -> QuantizedMatrix:
        """A matrix whose scales, and minimums if it has any, are quantized themselves."""
        values = None if minimums is None else minimums.values
        return cls(codes, scales.values, values, bits, scale_parts=scales, minimum_parts=minimums)

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
