"""Random arguments for the operations, and the tolerances of their results."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from minillm.engine.block_table import FREED
from minillm.quantization import QuantizedMatrix, QuantizedScales

TOLERANCE = 2e-5  # relative to the scale of the output

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 150)
dtypes = st.sampled_from(["float32", "float16"])  # of cached keys and values

# Scale, window and soft cap: the defaults, or any combination.
scorings = st.just((None, None, None)) | st.tuples(
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 1, 2, 5, 64, 200, 256, 300, 2000]),
    st.sampled_from([None, 2.0]),
)


def randoms(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def quantized(seed, outputs, blocks, block_size, with_minimum, bits=None, scale_type=np.float32, super_block=None):
    """Return a random QuantizedMatrix.

    If `super_block` is given, the scales are quantized, and this number of blocks shares a float. Without `bits`, codes
    have 4 or 8 bits, depending on the seed.
    """
    rng = np.random.default_rng(seed)
    bits = bits or int(rng.choice([4, 8]))
    low, high = (0, 2**bits) if with_minimum and bits < 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = rng.integers(low, high, (outputs, blocks, block_size), dtype=np.int8)
    if super_block:
        shape = 2, outputs, blocks // super_block
        super_scales = rng.standard_normal(shape, np.float32).astype(scale_type).astype(np.float32)
        sub_scales = rng.integers(-128, 128, (2, outputs, blocks), dtype=np.int8)
        scales, minimums = (QuantizedScales(*both) for both in zip(sub_scales, super_scales, strict=True))
        return QuantizedMatrix.from_quantized_scales(codes, scales, minimums if with_minimum else None, bits=bits)
    scales, minimums = rng.standard_normal((2, outputs, blocks), np.float32).astype(scale_type).astype(np.float32)
    return QuantizedMatrix(codes, scales, minimums if with_minimum else None, bits)


def as_bfloat16(values):
    """Truncate float32 numbers to the precision of bfloat16."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def assert_close(actual, expected, scale=None):
    """Assert equality within TOLERANCE * scale.

    The scale is the largest expected number, or the size that a sum would have without cancellation.
    """
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= TOLERANCE * (np.abs(expected).max() if scale is None else scale)


def scale_of_product(x, weights):
    """Return the typical size of x @ weights.T if its terms had random signs."""
    return np.sqrt((x.astype(np.float64) ** 2) @ (weights.astype(np.float64) ** 2).T).max()


def paged_case(seed, lengths, chunk_lengths, kv_heads, queries_per_kv, head_dim, block_size, dtype="float32"):
    """Return the arguments of `attention` for random sequences, and each sequence's keys and values.

    The last tokens of each sequence are queries. Keys and values are in blocks, in random order.
    """
    rng = np.random.default_rng(seed)
    blocks = [-(-length // block_size) for length in lengths]
    pool = rng.permutation(sum(blocks) + 2).astype(np.int32)
    tables = np.full((len(lengths), max(blocks)), -1, np.int32)
    layers, layer_in_block = 3, int(rng.integers(3))
    keys = rng.standard_normal((len(pool), layers, kv_heads, head_dim, block_size), dtype=np.float32).astype(dtype)
    values = rng.standard_normal((len(pool), layers, kv_heads, block_size, head_dim), dtype=np.float32).astype(dtype)
    sequences, positions, taken = [], [], 0
    for row, (length, count) in enumerate(zip(lengths, chunk_lengths, strict=True)):
        tables[row, : blocks[row]] = pool[taken : taken + blocks[row]]
        taken += blocks[row]
        table = tables[row, : blocks[row]]
        k = np.concatenate([keys[block, layer_in_block] for block in table], axis=2)[:, :, :length].transpose(0, 2, 1)
        v = np.concatenate([values[block, layer_in_block] for block in table], axis=1)[:, :length]
        sequences.append((k, v))
        positions += range(length - count, length)
    queries = rng.standard_normal((len(positions), kv_heads * queries_per_kv, head_dim), dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(chunk_lengths)]).astype(np.int32)
    return queries, keys, values, layer_in_block, np.array(positions, np.int32), starts, tables, sequences


def without_freed_blocks(case, window):
    """Free the blocks before each sequence's window: their table entries are FREED, which points to a block of NaN."""
    queries, keys, values, layer_in_block, positions, starts, tables = case
    keys, values = (np.concatenate([blocks, np.full_like(blocks[:1], np.nan)]) for blocks in (keys, values))
    tables = tables.copy()
    for row, start in enumerate(starts[:-1]):
        unreadable = 0 if window is None else max(0, positions[start] - window + 1)
        tables[row, : unreadable // keys.shape[-1]] = FREED
    return queries, keys, values, layer_in_block, positions, starts, tables


# Short sequences with chunks of any length, and long ones with few queries, around the kernels' tiles and splits.
short_lengths = st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
long_lengths = st.tuples(st.sampled_from([127, 128, 129, 511, 512, 513, 1024, 1025, 1100]), st.integers(1, 20))
attention_shapes = {
    "seed": seeds,
    "lengths": st.lists(short_lengths | long_lengths, min_size=1, max_size=4),
    "kv_heads": st.integers(1, 3),
    "queries_per_kv": st.integers(1, 3),
    "head_dim": st.sampled_from([2, 6, 16, 40, 64, 80]),
    "block_size": st.sampled_from([1, 3, 16, 128]),
}
