"""QuantizedMatrix: integer codes, with one scale and in some types one minimum per block of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class QuantizedScales:
    """Scales (or minimums) that are themselves quantized: one integer per block, one float per super-block.

    Attributes
    ----------
    sub_scales : int8 [O, I/Q], one per block
    super_scales : float32 [O, I/(Q*S)], one per super-block of `S` consecutive blocks
    """

    sub_scales: np.ndarray
    super_scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The scale of each block: float32 [O, I/Q]."""
        outputs, blocks = self.sub_scales.shape
        sub_scales = self.sub_scales.reshape(*self.super_scales.shape, -1)
        with np.errstate(invalid="ignore"):  # a damaged file may hold infinity; `check_scales` reports it
            products = self.super_scales[:, :, None] * sub_scales  # float32 x int8 is float32
        return products.reshape(outputs, blocks)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Integer codes with one scale per block, and in some types one minimum per block.

    Attributes
    ----------
    codes : int8 [O, I/Q rounded up, Q]. Codes of 4, 5 or 6 bits are 0 to 2^bits - 1 if there are minimums, and
        -2^(bits - 1) to 2^(bits - 1) - 1 if not. Codes of 8 bits are any int8
    scales : float32 [O, I/Q rounded up]
    minimums : float32 [O, I/Q rounded up], or None if the type has no minimums
    bits : the width of a code: 4, 5, 6 or 8
    num_inputs : I; None means that the last block is full. Otherwise the codes after the last input are padding
    quantized_scales, quantized_minimums : the quantized form of `scales` and `minimums`, if the type has one. A backend
        may use it in place of the float32 values. Set by `from_quantized_scales`

    Raises
    ------
    ValueError
        `num_inputs` does not fall in the last block.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None
    bits: int = 8
    num_inputs: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    quantized_scales: QuantizedScales | None = None
    quantized_minimums: QuantizedScales | None = None

    @classmethod
    def from_quantized_scales(
        cls, codes: np.ndarray, scales: QuantizedScales, minimums: QuantizedScales | None = None, *, bits: int
    ) -> QuantizedMatrix:
        """Create a matrix whose scales, and minimums if it has any, are themselves quantized."""
        values = None if minimums is None else minimums.values
        return cls(codes, scales.values, values, bits, quantized_scales=scales, quantized_minimums=minimums)

    def __post_init__(self) -> None:
        _, blocks, block_size = self.codes.shape
        if self.num_inputs is None:
            object.__setattr__(self, "num_inputs", blocks * block_size)  # the dataclass is frozen
        if -(-self.num_inputs // block_size) != blocks:
            raise ValueError(f"{self.num_inputs} inputs do not fill {blocks} blocks of {block_size}")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape `(O, I)` of the matrix."""
        return self.codes.shape[0], self.num_inputs

    @property
    def block_size(self) -> int:
        """The number `Q` of consecutive inputs that share a scale."""
        return self.codes.shape[2]

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and minimums in bytes."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    def dequantize(self) -> np.ndarray:
        """Return the matrix as float32 [O, I]."""
        weights = self.codes * self.scales[:, :, None]  # int8 x float32 is float32
        if self.minimums is not None:
            weights += self.minimums[:, :, None]
        outputs, blocks, block_size = self.codes.shape
        return weights.reshape(outputs, blocks * block_size)[:, : self.num_inputs]

    def check_scales(self) -> None:
        """Raise ValueError if a scale or minimum is NaN or infinite, as may happen in a damaged file."""
        for kind, values in ("scale", self.scales), ("minimum", self.minimums):
            if values is not None and not np.isfinite(values).all():
                row, block = np.argwhere(~np.isfinite(values))[0]
                raise ValueError(
                    f"the {kind} of row {row}, block {block} is {values[row, block]}, expected a finite number"
                )

    def __repr__(self) -> str:
        outputs, inputs = self.shape
        kind = "scale" if self.minimums is None else "scale and minimum"
        return (
            f"QuantizedMatrix({outputs} x {inputs}, {self.bits} bits, one {kind} per {self.block_size} inputs, "
            f"{self.num_bytes / 1e6:.1f} MB)"
        )
