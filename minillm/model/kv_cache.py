"""KVCache: the memory that makes the hundredth token as cheap as the second.

Attention reads the key and value of every earlier token. They never change, so they are computed once and kept here, in
two arrays that are divided into blocks of B positions. Which sequence owns which block is decided elsewhere
(`minillm.engine.block_allocator`). A contiguous cache, as textbooks draw it, is the case of one block per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm.model.config import ModelConfig

DTYPES = ("float32", "float16")  # types that keys and values can be stored in

FULL_ATTENTION_WEIGHT = 8  # how much more waste costs in layers without a window; see `_layers_per_block`


@dataclass(frozen=True)
class KVGroup:
    """Layers with the same window, whose keys and values share blocks.

    Layers with one window can be split into several groups, so that all groups have about the same number of layers.

    Attributes
    ----------
    layers : indices of the layers.
    window : positions that a query reads, counting its own; None for all earlier ones.
    """

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True)
class CacheShape:
    """What a cache and a model must agree on: the KV-cache groups, the key/value heads G, and head_dim K."""

    groups: tuple[KVGroup, ...]
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> CacheShape:
        """Return the shape of the caches that fit this model."""
        return cls(kv_groups(config), config.num_kv_heads, config.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        """Layers that a block has room for: the size of the largest group."""
        return max(len(group.layers) for group in self.groups)


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """Divide the layers of a model into KV-cache groups.

    Most models have one group of all layers. Where some layers have a sliding window, layers with different windows
    are in different groups, so that those with a window can free blocks that the others still read.
    """
    windows = [config.window(layer) for layer in range(config.num_layers)]
    layers_by_window = {
        window: tuple(layer for layer, own in enumerate(windows) if own == window) for window in dict.fromkeys(windows)
    }
    size = _layers_per_block(layers_by_window)
    return tuple(
        KVGroup(layers[start : start + size], window)
        for window, layers in layers_by_window.items()
        for start in range(0, len(layers), size)
    )


def _layers_per_block(layers_by_window: dict[int | None, tuple[int, ...]]) -> int:
    """Choose the number of layers per block that wastes the least memory.

    All groups use blocks of the same size, so that they can share one pool. A group with fewer layers than a block has
    room for wastes the rest. Layers without a window hold their blocks longest, so their waste counts more. Each group
    also counts as one more layer, because its block table has to be kept. Gemma 3 270M has 15 layers with a window and
    three without: a block has room for three layers, and there are five groups with the window and one without.
    """
    num_layers = sum(map(len, layers_by_window.values()))

    def cost(size: int) -> int:
        return sum(
            (FULL_ATTENTION_WEIGHT if window is None else 1) * (size + 1) * -(-len(layers) // size)
            for window, layers in layers_by_window.items()
        )

    return min(range(1, num_layers + 1), key=cost)


class KVCache:
    """Keys and values of all layers, in blocks.

    Parameters
    ----------
    config : ModelConfig of the model whose keys and values are stored.
    num_blocks : N
    block_size : B, positions per block.
    dtype : type that numbers are stored in. "float16" takes half the memory, and half the time to read; keys and values
        are rounded to 11 significant bits, and become infinite beyond 65,504. Attention computes in float32 either way.
    xp : array library that allocates the arrays: NumPy for main memory, CuPy for the GPU.

    Attributes
    ----------
    keys : [N, layers per block, G, K, B], float32 or float16
        A block holds B positions of one KV-cache group's layers. Positions are innermost, so that scoring a query
        against the B keys of a block reads memory in order, one SIMD lane per key.
    values : [N, layers per block, G, B, K]
        Here head_dim is innermost, so that the weighted sum of values reads memory in order, one lane per component.
    layer_places : int64 [L, 2], for each layer its KV-cache group and its index within that group's blocks.
    shape : CacheShape, what the cache and a model must agree on.

    Raises
    ------
    ValueError
        `dtype` is not one of DTYPES.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: str = "float32", xp: Any = np
    ):
        if dtype not in DTYPES:
            raise ValueError(f"kv_dtype is {dtype!r}; keys and values can be stored as {' or '.join(DTYPES)}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_layers = config.num_layers
        self.shape = CacheShape.from_config(config)
        layers, heads, head_dim = self.shape.layers_per_block, self.shape.num_kv_heads, self.shape.head_dim
        try:
            self.keys = xp.zeros((num_blocks, layers, heads, head_dim, block_size), dtype=getattr(xp, dtype))
            self.values = xp.zeros((num_blocks, layers, heads, block_size, head_dim), dtype=getattr(xp, dtype))
        except (ValueError, OverflowError) as error:  # more than an address can reach
            raise MemoryError(str(error)) from error
        self.layer_places = np.empty((config.num_layers, 2), np.int64)
        for number, group in enumerate(self.shape.groups):
            for layer_in_block, layer in enumerate(group.layers):
                self.layer_places[layer] = number, layer_in_block

    @classmethod
    def contiguous(
        cls, config: ModelConfig, length: int, num_sequences: int = 1, dtype: str = "float32", xp: Any = np
    ) -> KVCache:
        """Return a cache with one contiguous block of `length` positions per sequence, in each KV-cache group."""
        return cls(config, num_sequences * len(kv_groups(config)), block_size=length, dtype=dtype, xp=xp)

    @staticmethod
    def num_blocks_for(config: ModelConfig, num_tokens: int, block_size: int) -> int:
        """Return how many blocks `num_tokens` positions of one sequence fill, in all KV-cache groups of a model."""
        return -(-num_tokens // block_size) * len(kv_groups(config))

    def full_tables(self) -> list[list[int]]:
        """Return block tables, one per KV-cache group, that together give the whole cache to a single sequence."""
        return [list(range(group, self.num_blocks, self.num_groups)) for group in range(self.num_groups)]

    @property
    def num_groups(self) -> int:
        """KV-cache groups. The keys of a position are in one block of each."""
        return len(self.shape.groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each KV-cache group; None where queries read all earlier positions."""
        return self.shape.windows

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: B keys and values for every layer of a group and every key/value head."""
        _, layers, heads, head_dim, positions = self.keys.shape
        return 2 * layers * heads * head_dim * positions * self.keys.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position's keys and values in all layers."""
        return 2 * self.num_layers * self.shape.num_kv_heads * self.shape.head_dim * self.keys.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block

    def copy_block(self, source: int, target: int) -> None:
        """Copy the content of block `source` to block `target`."""
        self.keys[target, ...] = self.keys[source, ...]
        self.values[target, ...] = self.values[source, ...]

    def __repr__(self) -> str:
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return (
            f"KVCache({self.num_layers} layers{groups}, {self.shape.num_kv_heads} kv heads of {self.shape.head_dim}, "
            f"{self.keys.dtype}; {self.num_blocks} blocks of {self.block_size}, {self.num_bytes / 1e6:.1f} MB)"
        )
