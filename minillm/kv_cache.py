"""KVCache: the memory that makes the hundredth token as cheap as the second.

Attention needs the key and value of every earlier token. They never change, so they are computed once and kept
here: two arrays, cut into blocks that sequences take and give back. A contiguous cache, as textbooks draw it, is the
case of one block as long as the context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.blocks import BlockAllocator
from minillm.config import ModelConfig

DTYPES = ("float32", "float16")  # what keys and values can be stored as


class KVCache:
    """Keys and values of all layers, in blocks.

    Attributes
    ----------
    keys : [N, L, G, K, B], float32 or float16
        A block holds its B positions for all layers, so that memory is touched, and taken, as blocks are filled.
        Positions lie innermost: scoring a query against the B keys of a block then runs along memory, a lane a key.
    values : [N, L, G, B, K]
        Here head_dim lies innermost: the weighted sum of values runs along memory too, a lane a component.
    blocks : BlockAllocator
        Says which blocks are held; block tables are kept by whoever owns a sequence.

    Notes
    -----
    `dtype` is what numbers are stored as. "float16" takes half the memory, and half the time to read; keys and values
    are rounded to 11 bits, and to infinity beyond 65,504. Attention computes in float32 either way. `xp` is the array
    library that makes the arrays, and so says where they live: NumPy's in the machine's memory, CuPy's on the GPU.

    Raises
    ------
    ValueError
        `dtype` is neither.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: str = "float32", xp: Any = np
    ):
        if dtype not in DTYPES:
            raise ValueError(f"kv_dtype is {dtype!r}; keys and values can be stored as {' or '.join(DTYPES)}")
        layers, heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.keys = xp.zeros((num_blocks, layers, heads, head_dim, block_size), dtype=getattr(xp, dtype))
        self.values = xp.zeros((num_blocks, layers, heads, block_size, head_dim), dtype=getattr(xp, dtype))
        self.blocks = BlockAllocator(num_blocks, block_size)  # last: its lists are not free, the arrays' pages are

    @classmethod
    def contiguous(
        cls, config: ModelConfig, length: int, num_sequences: int = 1, dtype: str = "float32", xp: Any = np
    ) -> KVCache:
        """A cache of one unbroken stretch of `length` positions for each sequence."""
        return cls(config, num_blocks=num_sequences, block_size=length, dtype=dtype, xp=xp)

    @property
    def block_size(self) -> int:
        """`B`: positions a block holds."""
        return self.blocks.block_size

    @property
    def num_blocks(self) -> int:
        """`N`: blocks in all."""
        return self.blocks.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes: a key and a value for every layer and key/value head."""
        _, layers, heads, head_dim, _ = self.keys.shape
        return 2 * layers * heads * head_dim * self.keys.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the blocks that sequences hold now."""
        return self.blocks.num_held * self.block_size * self.bytes_per_token

    @property
    def occupancy(self) -> float:
        """Share of the blocks that sequences hold now, 0 to 1."""
        return self.blocks.num_held / self.num_blocks

    def __repr__(self):
        _, layers, heads, head_dim, _ = self.keys.shape
        return (
            f"KVCache({layers} layers, {heads} kv heads of {head_dim}, {self.keys.dtype}; {self.blocks.num_held} of "
            f"{self.num_blocks} blocks of {self.block_size} held, {self.num_bytes_held / 1e6:.1f} of "
            f"{self.num_bytes / 1e6:.1f} MB)"
        )

    def copy_block(self, source: int, target: int) -> None:
        """Write over block `target` what stands in block `source`, in all layers."""
        self.keys[target, ...] = self.keys[source, ...]
        self.values[target, ...] = self.values[source, ...]
