"""StorageType: the byte layout of a tensor type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minillm.quantization.matrix import QuantizedMatrix


@dataclass(frozen=True)
class StorageType:
    """A tensor type of GGUF or safetensors.

    Attributes
    ----------
    name : the name in ggml
    block_size : the number of consecutive values in a block; 1 for floats
    block : the bytes of a block, as a structured dtype
    unpack : converts blocks [O, I / block_size] to values
    bits : the width of a code in the resulting QuantizedMatrix, 4, 5, 6 or 8; 32 for floats
    """

    name: str
    block_size: int
    block: np.dtype
    unpack: Callable[[np.ndarray], QuantizedMatrix | np.ndarray]
    bits: int = 32

    @property
    def is_quantized(self) -> bool:
        """True if `unpack` returns a QuantizedMatrix, False if it returns a float array."""
        return self.block_size > 1

    @property
    def bits_stored(self) -> float:
        """The average size of a value in the file in bits, scales included."""
        return 8 * self.block.itemsize / self.block_size

    def num_bytes(self, num_values: int) -> int:
        """Return the size of `num_values` values in bytes. They must form whole blocks."""
        return num_values // self.block_size * self.block.itemsize

    def read(self, data: np.ndarray, shape: tuple[int, ...]) -> QuantizedMatrix | np.ndarray:
        """Convert a tensor's bytes to values.

        Parameters
        ----------
        data : uint8 [num_bytes], contiguous; usually a view into a memory-mapped file
        shape : the tensor's shape, outputs first; the last axis holds whole blocks

        Returns
        -------
        A float32 array of `shape` for float types, otherwise a QuantizedMatrix. An F32 array is a view of `data`.
        """
        return self.unpack(data.view(self.block).reshape(*shape[:-1], shape[-1] // self.block_size))

    def __str__(self) -> str:
        """Return the name and the form in memory, such as `"Q6_K as 6-bit codes"` or `"F16 as float32"`."""
        return f"{self.name} as {f'{self.bits}-bit codes' if self.is_quantized else 'float32'}"
