"""KVCache: the memory that makes the hundredth token as cheap as the second.

Attention needs the key and value of every earlier token. They never change, so they are computed once and kept
here: two arrays, cut into blocks that sequences take and give back. A contiguous cache, as textbooks draw it, is the
case of one block as long as the context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.engine.block_allocator import BlockAllocator
from minillm.model.config import ModelConfig

Layout = tuple[tuple[tuple[int, ...], ...], int, int]

DTYPES = ("float32", "float16")  # what keys and values can be stored as


def layout(config: ModelConfig) -> Layout:
    """What a cache and a model must have in common: groups of layers, key/value heads, numbers in a head."""
    return config.layer_groups, config.num_kv_heads, config.head_dim


class KVCache:
    """Keys and values of all layers, in blocks.

    Attributes
    ----------
    keys : [N, layers of a group, G, K, B], float32 or float16
        A block holds its B positions for all layers, so that memory is touched, and taken, as blocks are filled; or for
        one group of them, where some see only a window (`ModelConfig.layer_groups`).
        Positions lie innermost: scoring a query against the B keys of a block then runs along memory, a lane a key.
    values : [N, layers of a group, G, B, K]
        Here head_dim lies innermost: the weighted sum of values runs along memory too, a lane a component.
    places : int64 [L, 2], for each layer its group, and where in that group's blocks it stands.
    layout : what of a model's config a cache is made for.
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
        self.layout = groups, heads, head_dim = layout(config)
        layers = max(map(len, groups))
        self.keys = xp.zeros((num_blocks, layers, heads, head_dim, block_size), dtype=getattr(xp, dtype))
        self.values = xp.zeros((num_blocks, layers, heads, block_size, head_dim), dtype=getattr(xp, dtype))
        self.places = np.empty((config.num_layers, 2), np.int64)
        for number, group in enumerate(groups):
            for place, layer in enumerate(group):
                self.places[layer] = number, place
        # Last, for its lists are not free, and the arrays' pages are.
        self.blocks = BlockAllocator(num_blocks, block_size, config.group_windows)

    @classmethod
    def contiguous(
        cls, config: ModelConfig, length: int, num_sequences: int = 1, dtype: str = "float32", xp: Any = np
    ) -> KVCache:
        """A cache of one unbroken stretch of `length` positions for each sequence, in each group of layers."""
        return cls(config, num_sequences * len(config.layer_groups), block_size=length, dtype=dtype, xp=xp)

    @staticmethod
    def blocks_for(config: ModelConfig, num_tokens: int, block_size: int) -> int:
        """How many blocks of a cache for this model `num_tokens` positions of a sequence fill, in all its groups."""
        return -(-num_tokens // block_size) * len(config.layer_groups)

    @property
    def block_size(self) -> int:
        """`B`: positions a block holds."""
        return self.blocks.block_size

    @property
    def num_blocks(self) -> int:
        """`N`: blocks in all."""
        return self.blocks.num_blocks

    @property
    def num_groups(self) -> int:
        """Groups of layers; a position lies in one block of each."""
        return self.blocks.num_groups

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: B keys and values for every layer of a group and every key/value head."""
        _, layers, heads, head_dim, positions = self.keys.shape
        return 2 * layers * heads * head_dim * positions * self.keys.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position's keys and values in all layers."""
        _, _, heads, head_dim, _ = self.keys.shape
        return 2 * len(self.places) * heads * head_dim * self.keys.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the blocks that sequences hold now."""
        return self.blocks.num_held * self.bytes_per_block

    @property
    def occupancy(self) -> float:
        """Share of the blocks that sequences hold now, 0 to 1."""
        return self.blocks.num_held / self.num_blocks

    def __repr__(self):
        _, _, heads, head_dim, _ = self.keys.shape
        layers = f"{len(self.places)} layers" + (f" in {self.num_groups} groups" if self.num_groups > 1 else "")
        return (
            f"KVCache({layers}, {heads} kv heads of {head_dim}, {self.keys.dtype}; {self.blocks.num_held} of "
            f"{self.num_blocks} blocks of {self.block_size} held, {self.num_bytes_held / 1e6:.1f} of "
            f"{self.num_bytes / 1e6:.1f} MB)"
        )

    def copy_block(self, source: int, target: int) -> None:
        """Write over block `target` what stands in block `source`, in all its layers."""
        self.keys[target, ...] = self.keys[source, ...]
        self.values[target, ...] = self.values[source, ...]
