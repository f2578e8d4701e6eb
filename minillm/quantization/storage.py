"""StorageType: how one of the types of tensors in a file lays its values out in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix


@dataclass(frozen=True)
class StorageType:
    """A type of GGUF's, or of safetensors'.

    Attributes
    ----------
    name : what ggml calls it
    block_size : how many neighbouring values share a block of bytes; 1 for floats
    block : those bytes, field by field
    unpack : from blocks [O, I / block_size] to numbers
    bits : 4, 5, 6 or 8, what a code takes in the QuantizedMatrix that the type becomes; 32 for floats
    """

    name: str
    block_size: int
    block: np.dtype
    unpack: Callable[[np.ndarray], QuantizedMatrix | np.ndarray]
    bits: int = 32

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale, so that `unpack` gives a QuantizedMatrix."""
        return self.block_size > 1

    @property
    def bits_stored(self) -> float:
        """Bits a value takes in the file, its share of the scales counted."""
        return 8 * self.block.itemsize / self.block_size

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

    def __str__(self):
        """The name, and what becomes of it: `"Q6_K as 8-bit codes"`, `"F16 as float32"`."""
        return f"{self.name} as {f'{self.bits}-bit codes' if self.is_quantized else 'float32'}"
