"""Attention over the paged cache. The bits of a query's result depend on its own sequence alone.

The keys of a sequence are divided into *splits* of 256 positions, which the threads process independently
(Flash-Decoding, Dao et al. 2023). For each split, a query keeps three partial results: the largest score, the sum of
exp(score - largest), and the sum of the values with these weights. At the end, the partial results of all splits are
combined in order, each scaled down to the largest score of all. This is the softmax over all keys, although the scores
were never all in memory at once (online softmax, Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022).

Within a split, the keys of a block are scored at once, one SIMD lane per key, directly from the cache; then the block's
values are summed. Each block read serves all queries of a *query tile*, up to eight tokens of a sequence, and all query
heads that share the key/value head, four rows at a time. Splits are at absolute positions, and the order of every sum
depends on positions only. So the result does not change with the chunks of a prompt, the block size, or the other
sequences of the batch.

In a layer with a window, a query reads only the last `window` keys, and the splits before them are skipped.

The kernels take their arguments in tuples: `cache` is (key_blocks, value_blocks, layer_in_block); `batch` is
(positions, query_starts, block_tables); `tiles` is (positions, tile starts, the sequence of each tile, block_tables);
`scoring` is (scale, window, soft_cap); `partials` is (largest, total, weighted).
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.float16 import as_stored, narrow, overflows, widen
from minillm.ops.jit.microkernel import ROWS, aligned, multiply_add, whole_rows
from minillm.ops.jit.pointwise import exp, largest_of_lanes, soft_capped, sum_of_lanes
from minillm.ops.jit.prefetching import prefetch
from minillm.ops.jit.weight_formats import LANES

SPLIT = 256  # keys per split; a multiple of LANES
QUERY_TILE = 8  # tokens of a sequence that use a block's keys before the next block is read
TILES_PER_SLAB = 16  # query tiles processed together; limits the memory for partial results
MASKED = np.float32(-math.inf)  # score of a key that the query may not read
NO_WINDOW = 2**31 - 1  # more positions than any sequence has; an int32, as positions are

Scoring = tuple[np.float32, int, np.float32]  # scale, window, and soft cap (0 for none)


def write_kv(
    keys: np.ndarray,
    values: np.ndarray,
    key_blocks: np.ndarray,
    value_blocks: np.ndarray,
    layer_in_block: int,
    slots: np.ndarray,
) -> None:
    """Write each token's key and value [T, G, K] to its slot in the KV cache; see `reference`."""
    write_to_cache(keys, values, (as_stored(key_blocks), as_stored(value_blocks), layer_in_block), slots)


def attention(
    queries: np.ndarray,
    key_blocks: np.ndarray,
    value_blocks: np.ndarray,
    layer_in_block: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Compute causal attention of every token over its own sequence, [T, H, K] -> [T, H, K]; see `reference`."""
    cache = as_stored(key_blocks), as_stored(value_blocks), layer_in_block
    scoring = scoring_of(queries.shape[2], scale, window, soft_cap)
    return attend(queries, cache, (positions, query_starts, block_tables), scoring)


def scoring_of(head_dim: int, scale: float | None, window: int | None, soft_cap: float | None) -> Scoring:
    """Return scale, window and soft cap (0 for none) in the types that kernels take."""
    factor = np.float32(1) / np.float32(math.sqrt(head_dim)) if scale is None else np.float32(scale)
    return factor, NO_WINDOW if window is None else window, np.float32(soft_cap or 0)


@compiled
def write_to_cache(keys, values, cache, slots):
    """`write_kv` for other kernels to call. A float16 cache is passed as its bits."""
    key_blocks, value_blocks, layer_in_block = cache
    not_a_number = narrow(np.float32(np.nan), value_blocks)
    tokens, kv_heads, head_dim = keys.shape
    block_size = value_blocks.shape[3]
    for t in range(tokens):
        block, offset = divmod(slots[t], block_size)
        for g in range(kv_heads):
            fits = True
            for k in range(head_dim):
                key_blocks[block, layer_in_block, g, k, offset] = narrow(keys[t, g, k], key_blocks)
                value_blocks[block, layer_in_block, g, offset, k] = narrow(values[t, g, k], value_blocks)
                fits = fits and not overflows(keys[t, g, k], key_blocks)
            if not fits:
                value_blocks[block, layer_in_block, g, offset, :] = not_a_number


@compiled
def attend(queries, cache, batch, scoring):
    """`attention` for other kernels to call. A float16 cache is passed as its bits; `scoring` is from `scoring_of`."""
    positions, query_starts, block_tables = batch
    attended = np.empty_like(queries)
    starts, sequences = _query_tiles(query_starts)
    for tile in range(0, len(sequences), TILES_PER_SLAB):
        last = min(tile + TILES_PER_SLAB, len(sequences))
        first, stop = starts[tile], starts[last]
        tiles = positions[first:stop], starts[tile : last + 1] - first, sequences[tile:last], block_tables
        attended[first:stop] = _attend_slab(queries[first:stop], cache, tiles, scoring)
    return attended


@compiled
def _query_tiles(query_starts):
    """Divide every sequence's tokens into tiles of at most QUERY_TILE; return the start and the sequence of each."""
    num_sequences = len(query_starts) - 1
    max_tiles = num_sequences + query_starts[num_sequences] // QUERY_TILE
    starts, sequences = np.empty(max_tiles + 1, np.int64), np.empty(max_tiles, np.int64)
    count = 0
    for sequence in range(num_sequences):
        for start in range(query_starts[sequence], query_starts[sequence + 1], QUERY_TILE):
            starts[count], sequences[count] = start, sequence
            count += 1
    starts[count] = query_starts[num_sequences]
    return starts[: count + 1], sequences[:count]


@inlined
def _attend_slab(queries, cache, tiles, scoring):
    """Compute the attention of some query tiles: first every split of the keys, then the combination of all splits."""
    tokens, num_heads, head_dim = queries.shape
    positions = tiles[0]
    splits = 1 + max(positions) // SPLIT
    largest = np.empty((tokens, num_heads, splits), np.float32)
    total = np.empty((tokens, num_heads, splits), np.float32)
    weighted = np.empty((tokens, num_heads, splits, head_dim), np.float32)
    partials = largest, total, weighted
    num_tiles, kv_heads = len(tiles[2]), cache[1].shape[2]
    short = tokens == 1 and positions[0] < 32  # too little work to wake a thread for
    if short or num_tiles * kv_heads * splits == 1:
        zero = np.int64(0)  # of the same type as a loop index, so that no second version is compiled
        for g in range(kv_heads):
            _attend_split(not short, zero, g, zero, queries, cache, tiles, scoring, partials)
    else:
        _attend_splits(queries, cache, tiles, scoring, partials)
    return _combine_splits(positions, scoring[1], largest, total, weighted)


@compiled_parallel
def _attend_splits(queries, cache, tiles, scoring, partials):
    """Process all combinations of query tile, key/value head and split, shared among the threads."""
    num_tiles, kv_heads, splits = len(tiles[2]), cache[1].shape[2], partials[0].shape[2]
    for item in prange(num_tiles * kv_heads * splits):
        tile, rest = divmod(np.int64(item), kv_heads * splits)  # the index of a parallel loop is unsigned
        g, split = divmod(rest, splits)
        parallel = np.bool_(False)  # not the literal, for which a second version would be compiled
        _attend_split(parallel, tile, g, split, queries, cache, tiles, scoring, partials)


@compiled
def _attend_split(parallel, tile, g, split, queries, cache, tiles, scoring, partials):
    """Compute the partial results of one query tile for one split of one key/value head's keys.

    The rows are the tile's tokens times the query heads that share the key/value head, padded to a multiple of four. If
    this is the only piece of work, all threads share it (`parallel`): an idle thread would fall asleep and be late for
    the next product.
    """
    key_blocks, value_blocks, layer_in_block = cache
    positions, starts, sequences, block_tables = tiles
    scale, window, soft_cap = scoring
    largest, total, weighted = partials
    head_dim, block_size = queries.shape[2], value_blocks.shape[3]
    heads = queries.shape[1] // value_blocks.shape[2]
    first, stop = starts[tile], starts[tile + 1]
    rows = (stop - first) * heads
    start = split * SPLIT
    end = min(SPLIT, positions[stop - 1] + 1 - start)  # the keys of the split that any query of the tile reads,
    begin = max(0, positions[first] + 1 - window - start)  # from `begin` to `end`
    if end <= begin:
        return
    table = block_tables[sequences[tile]]
    bounds = np.empty((whole_rows(rows), 2), np.int64)  # the keys that each row reads: from, to
    for row in range(len(bounds)):
        own_end = positions[min(first + row // heads, stop - 1)] + 1 - start
        bounds[row, 0], bounds[row, 1] = max(0, min(end, own_end - window)), max(0, min(end, own_end))
    q = _scaled_rows(queries, first, g, heads, rows, scale)
    weights = np.empty((len(q), SPLIT), np.float32)
    if parallel:
        _score_parallel(q, weights, key_blocks, layer_in_block, g, table, start, begin, end)
    else:
        _score(q, weights, key_blocks, layer_in_block, g, table, start, begin, end)
    _prefetch_block(value_blocks, block_size, table, start + begin, start + end, layer_in_block, g)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        t, h = first + row // heads, g * heads + row % heads
        if soft_cap:
            _soft_cap_row(weights, row, bounds[row, 0], bounds[row, 1], soft_cap)
        largest[t, h, split], total[t, h, split] = _softmax_partial(weights, row, bounds[row, 0], bounds[row, 1], lanes)
    sums = np.empty((len(q), head_dim), np.float32)
    if parallel:
        _weighted_values_parallel(sums, weights, bounds, value_blocks, layer_in_block, g, table, start, begin, end)
    else:
        for left in range(0, head_dim, LANES):
            _weighted_values(sums, left, weights, bounds, value_blocks, layer_in_block, g, table, start, begin, end)
    for row in range(rows):
        t, h = first + row // heads, g * heads + row % heads
        for k in range(head_dim):
            weighted[t, h, split, k] = sums[row, k]


@compiled
def _prefetch_block(blocks, block_size, table, position, end, layer_in_block, g):
    """Prefetch one head's keys or values of the block that holds `position`, if that is before `end`."""
    if position < end:
        block = table[position // block_size]
        start = block * blocks.strides[0] + layer_in_block * blocks.strides[1] + g * blocks.strides[2]
        prefetch(blocks, start, blocks.strides[2])


@compiled
def _scaled_rows(queries, first, g, heads, rows, scale):
    """Return a tile's queries as rows, times `scale`, padded with zeros to a multiple of four rows."""
    head_dim = queries.shape[2]
    scaled = np.zeros((whole_rows(rows), head_dim), np.float32)
    for row in range(rows):
        for k in range(head_dim):
            scaled[row, k] = queries[first + row // heads, g * heads + row % heads, k] * scale
    return scaled


@compiled_parallel
def _score_parallel(q, scores, key_blocks, layer_in_block, g, table, start, begin, end):
    """Apply `_score` with all threads, each to different keys."""
    before = begin // LANES
    for part in prange(-(-end // LANES) - before):
        first = (before + np.int64(part)) * LANES
        _score(q, scores, key_blocks, layer_in_block, g, table, start, max(begin, first), min(end, first + LANES))


@compiled
def _score(q, scores, key_blocks, layer_in_block, g, table, start, begin, end):
    """Multiply every row's query with keys `begin` to `end` of the split at position `start`, into [rows, SPLIT]."""
    rows, head_dim = q.shape
    block_size = key_blocks.shape[4]
    sums = aligned(ROWS, LANES)
    j = begin
    while j < end:
        _prefetch_block(key_blocks, block_size, table, start + j + block_size, start + end, layer_in_block, g)
        keys = key_blocks[table[(start + j) // block_size], layer_in_block, g]
        offset = (start + j) % block_size
        run = min(block_size - offset, end - j, LANES)
        for row in range(0, rows, ROWS):
            sums[:] = 0
            multiply_add(sums, q, row, 0, keys, 0, offset, head_dim, run)
            for r in range(ROWS):
                for lane in range(run):
                    scores[np.uint64(row + r), np.uint64(j + lane)] = sums[np.uint64(r), lane]
        j += run


@compiled
def _soft_cap_row(scores, row, begin, end, soft_cap):
    """Soft-cap a row's scores `begin` to `end`."""
    for j in range(begin, end):
        scores[row, j] = soft_capped(scores[row, j], soft_cap)


@compiled
def _softmax_partial(scores, row, begin, end, lanes):
    """Turn a row's scores into exp(score - largest), in place; return the largest score and the sum.

    The row reads keys `begin` to `end`; the weights of all others become 0. Lanes are at fixed positions, so the sum
    does not depend on where the keys begin.
    """
    row = np.uint64(row)
    begin, first_lanes = np.int64(begin), np.int64(begin // LANES * LANES)
    end_lanes = -(-end // LANES) * LANES
    for j in range(first_lanes, begin):
        scores[row, j] = MASKED
    for j in range(end, end_lanes):
        scores[row, j] = MASKED
    lanes[:] = MASKED
    for first in range(first_lanes, end_lanes, LANES):
        for lane in range(LANES):
            score = scores[row, np.uint64(first + lane)]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    top = largest_of_lanes(lanes)
    lanes[:] = 0
    for first in range(first_lanes, end_lanes, LANES):
        for lane in range(LANES):
            j = np.uint64(first + lane)
            weight = exp(scores[row, j] - top)
            scores[row, j] = weight
            lanes[lane] += weight
    for j in range(end, SPLIT):
        scores[row, j] = 0
    return top, sum_of_lanes(lanes)


@compiled_parallel
def _weighted_values_parallel(sums, weights, bounds, value_blocks, layer_in_block, g, table, start, begin, end):
    """Apply `_weighted_values` with all threads, each to different lanes."""
    for tile in prange(-(-sums.shape[1] // LANES)):
        left = np.int64(tile) * LANES
        _weighted_values(sums, left, weights, bounds, value_blocks, layer_in_block, g, table, start, begin, end)


@compiled
def _weighted_values(weighted, left, weights, bounds, value_blocks, layer_in_block, g, table, start, begin, end):
    """Sum each row's values, times their weights, for 64 lanes of [rows, K]; keys as in `_score`."""
    block_size, head_dim = value_blocks.shape[3], value_blocks.shape[4]
    sums = aligned(ROWS, LANES)
    lanes = min(LANES, head_dim - left)
    for row in range(0, len(weights), ROWS):
        sums[:] = 0
        j = begin
        while j < end:
            _prefetch_block(value_blocks, block_size, table, start + j + block_size, start + end, layer_in_block, g)
            values = value_blocks[table[(start + j) // block_size], layer_in_block, g]
            offset = (start + j) % block_size
            run_end = min(j + block_size - offset, end)
            # Rows are in the order of their positions, so keys that both the first and the last of them read are read
            # by all four. No other value may be touched: 0 times a later token's infinity would be NaN.
            common = min(run_end, max(j, bounds[row + ROWS - 1, 0]))
            common_end = max(common, min(run_end, bounds[row, 1]))
            _weighted_edges(sums, weights, row, bounds, j, common, values, offset - j, left, lanes)
            multiply_add(sums, weights, row, common, values, offset + common - j, left, common_end - common, lanes)
            _weighted_edges(sums, weights, row, bounds, common_end, run_end, values, offset - j, left, lanes)
            j = run_end
        for r in range(ROWS):
            for lane in range(lanes):
                weighted[np.uint64(row + r), np.uint64(left + lane)] = sums[np.uint64(r), lane]


@inlined
def _weighted_edges(sums, weights, row, bounds, begin, end, values, shift, left, lanes):
    """Add the weighted values of keys `begin` to `end` to the sums of the rows that read them.

    Key i is row `shift + i` of `values`.
    """
    for r in range(ROWS):
        for i in range(max(begin, bounds[row + r, 0]), min(end, bounds[row + r, 1])):
            for lane in range(lanes):
                value = widen(values[np.uint64(shift + i), np.uint64(left + lane)])
                sums[np.uint64(r), lane] += weights[row + r, i] * value


@compiled
def _combine_splits(positions, window, largest, total, weighted):
    """Combine each query's partial results of the splits that it reads, in order."""
    tokens, num_heads, _, head_dim = weighted.shape
    attended = np.zeros((tokens, num_heads, head_dim), np.float32)
    for t in range(tokens):
        first, end = max(0, positions[t] + 1 - window) // SPLIT, 1 + positions[t] // SPLIT
        for h in range(num_heads):
            top = largest[t, h, first]
            for split in range(first + 1, end):
                top = max(top, largest[t, h, split])
            total_of_all = np.float32(0)
            for split in range(first, end):
                factor = exp(largest[t, h, split] - top)
                total_of_all += factor * total[t, h, split]
                for k in range(head_dim):
                    attended[t, h, k] += factor * weighted[t, h, split, k]
            for k in range(head_dim):
                attended[t, h, k] /= total_of_all
    return attended
