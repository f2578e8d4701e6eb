"""Writing to the paged cache on the GPU, and attention over it. The kernels are in attention.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minillm.ops.gpu import device
from minillm.ops.reference import namespace, overflows_cache

Array = Any  # a CuPy array

TILE = 128  # threads per thread block, and keys that it processes at once
NO_WINDOW = np.int32(2**31 - 1)  # more positions than any sequence has


def write_kv(
    keys: Array, values: Array, key_blocks: Array, value_blocks: Array, layer_in_block: int, slots: Array
) -> None:
    """Write each token's key and value [T, G, K] to its slot in the KV cache; see `reference`."""
    xp = namespace(key_blocks)
    _, layers, kv_heads, block_size, head_dim = value_blocks.shape
    values = xp.where(overflows_cache(keys, key_blocks.dtype), xp.asarray(np.nan, dtype=values.dtype), values)
    write = device.kernel("attention.cu", "write_kv", **_settings(key_blocks, head_dim))
    write(
        (len(keys),),
        (TILE,),
        (
            xp.ascontiguousarray(keys, dtype=key_blocks.dtype),
            xp.ascontiguousarray(values, dtype=key_blocks.dtype),
            xp.ascontiguousarray(xp.asarray(slots, dtype=xp.int64)),
            *map(np.int32, (layer_in_block, layers, kv_heads, block_size)),
            key_blocks,
            value_blocks,
        ),
    )


def attention(
    queries: Array,
    key_blocks: Array,
    value_blocks: Array,
    layer_in_block: int,
    positions: Array,
    query_starts: Array,
    block_tables: Array,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Compute causal attention of every token over its own sequence, [T, H, K] -> [T, H, K]; see `reference`."""
    xp = namespace(queries)
    tokens, heads, head_dim = queries.shape
    _, layers, kv_heads, block_size, _ = value_blocks.shape
    positions, query_starts, block_tables = (
        xp.ascontiguousarray(xp.asarray(numbers, dtype=xp.int32)) for numbers in (positions, query_starts, block_tables)
    )
    sequences, table_width = block_tables.shape
    attended = xp.empty((tokens, heads, head_dim), dtype=xp.float32)
    attend = device.kernel("attention.cu", "attend", **_settings(key_blocks, head_dim))
    attend(
        (tokens, heads),
        (TILE,),
        (
            xp.ascontiguousarray(queries, dtype=xp.float32),
            key_blocks,
            value_blocks,
            positions,
            query_starts,
            block_tables,
            *map(np.int32, (layer_in_block, layers, kv_heads, block_size, sequences, table_width)),
            np.float32(1 / math.sqrt(head_dim) if scale is None else scale),
            NO_WINDOW if window is None else np.int32(window),
            np.float32(soft_cap or 0),
            attended,
        ),
    )
    return attended


def _settings(blocks: Array, head_dim: int) -> dict[str, int]:
    """Return the constants that the kernels are compiled with for this cache."""
    return {"IS_FLOAT16": int(blocks.dtype == np.float16), "HEAD_DIM": head_dim, "TILE": TILE}
