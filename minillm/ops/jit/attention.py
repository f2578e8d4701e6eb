"""Attention over the paged cache, whose bits depend on a query's own sequence alone.

A query meets the keys of its sequence in *tiles* of 64 neighbouring positions, one after another, and carries three
things from tile to tile: the largest score so far, the sum of exp(score - largest), and the sum of values weighted
so. When a larger score turns up, both sums are scaled down to it (online softmax, Milakov & Gimelshein 2018; tiled,
it is FlashAttention, Dao et al. 2022). Scores are computed for all 64 keys of a tile at once, a SIMD lane each.

Tiles are shared: all queries of a prompt's chunk, and all query heads of a group, use the keys that were brought in.
For a single query there is little to share out among threads, so keys are also cut into *splits* of 512 positions
that threads take as they come (Flash-Decoding, Dao et al. 2023), combined in order afterwards. Tiles and splits lie
at absolute positions, so how a prompt was chunked, or who else is in the batch, changes nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.pointwise import exp

TILE = 64  # keys that are scored at once
SPLIT = 512  # keys that one thread takes; a multiple of TILE
QUERIES = 8  # tokens of a sequence that use a tile of keys before the next is brought in
SLAB = 16  # groups of queries that are worked on together: bounds the memory for what they carry from each split
PIECE = 16  # numbers of a value that are summed at once
U0, U1, U2, U3, U4, U5, U6, U7, U8, U9, U10, U11, U12, U13, U14, U15 = map(np.uint64, range(16))
NOTHING = np.float32(-math.inf)  # the score of a key that must not be seen


@compiled
def write_kv(keys, values, key_blocks, value_blocks, layer, slots):
    """Store each token's key and value [T, G, K] at its slot in a layer of the cache; see `reference`."""
    tokens, kv_heads, head_dim = keys.shape
    block_size = value_blocks.shape[3]
    for t in range(tokens):
        block, offset = divmod(slots[t], block_size)
        for g in range(kv_heads):
            for k in range(head_dim):
                key_blocks[block, layer, g, k, offset] = keys[t, g, k]
                value_blocks[block, layer, g, offset, k] = values[t, g, k]


@compiled
def attention(queries, key_blocks, value_blocks, layer, positions, query_starts, block_tables):
    """Causal attention of every token over its own sequence's keys [T, H, K] -> [T, H, K]; see `reference`."""
    attended = np.empty_like(queries)
    starts, owners = _query_groups(query_starts)
    for group in range(0, len(owners), SLAB):
        last = min(group + SLAB, len(owners))
        first, stop = starts[group], starts[last]
        attended[first:stop] = _attend(
            queries[first:stop],
            key_blocks,
            value_blocks,
            layer,
            positions[first:stop],
            starts[group : last + 1] - first,
            owners[group:last],
            block_tables,
        )
    return attended


@compiled
def _attend(queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables):
    """Some query groups' attention: every split of the keys on its own, then all of them together."""
    tokens, num_heads, head_dim = queries.shape
    splits = 1 + max(positions) // SPLIT
    largest = np.empty((tokens, num_heads, splits), np.float32)
    total = np.empty((tokens, num_heads, splits), np.float32)
    weighted = np.empty((tokens, num_heads, splits, head_dim), np.float32)
    _attend_splits(
        queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables, largest, total, weighted
    )
    return _combine_splits(positions, largest, total, weighted)


@compiled
def _query_groups(query_starts):
    """Cut every sequence's tokens into groups of at most QUERIES: where each starts, and whose it is."""
    sequences = len(query_starts) - 1
    most = sequences + query_starts[sequences] // QUERIES
    starts, owners = np.empty(most + 1, np.int64), np.empty(most, np.int64)
    count = 0
    for sequence in range(sequences):
        for start in range(query_starts[sequence], query_starts[sequence + 1], QUERIES):
            starts[count], owners[count] = start, sequence
            count += 1
    starts[count] = query_starts[sequences]
    return starts[: count + 1], owners[:count]


@compiled_parallel
def _attend_splits(
    queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables, largest, total, weighted
):
    """For each group of queries, key/value head and split of the keys: what the queries carry away from it.

    A group's rows are its tokens times the query heads that share the key/value head.
    """
    _, num_heads, head_dim = queries.shape
    kv_heads = value_blocks.shape[2]
    heads = num_heads // kv_heads
    splits = largest.shape[2]
    padded = -(-head_dim // 8) * 8  # the kernels take eight numbers of a head at a time
    for item in prange(len(owners) * kv_heads * splits):
        group, rest = divmod(np.int64(item), kv_heads * splits)  # Numba counts a parallel loop in unsigned numbers
        g, split = divmod(rest, splits)
        first, stop = starts[group], starts[group + 1]
        length = positions[stop - 1] + 1  # the keys that the last of the group may see
        rows = (stop - first) * heads
        q = np.zeros((rows, padded), np.float32)
        for row in range(rows):
            for k in range(head_dim):
                q[row, k] = queries[first + row // heads, g * heads + row % heads, k] / np.float32(math.sqrt(head_dim))
        tops = np.full(rows, NOTHING, np.float32)
        sums = np.zeros((rows, TILE), np.float32)
        means = np.zeros((rows, head_dim), np.float32)
        key_tile = np.zeros((padded, TILE), np.float32)
        value_tile = np.zeros((TILE, head_dim), np.float32)
        scores = np.empty(TILE, np.float32)
        for start in range(split * SPLIT, min((split + 1) * SPLIT, length), TILE):
            count = min(TILE, length - start)
            _fetch(key_blocks, value_blocks, layer, g, block_tables, owners[group], start, count, key_tile, value_tile)
            for row in range(rows):
                visible = min(count, positions[first + row // heads] + 1 - start)
                if visible > 0:
                    _score(q, row, key_tile, visible, scores)
                    _take_in(scores, visible, value_tile, row, tops, sums, means)
        for row in range(rows):
            t, h = first + row // heads, g * heads + row % heads
            largest[t, h, split] = tops[row]
            total[t, h, split] = np.float32(0)
            for lane in range(TILE):
                total[t, h, split] += sums[row, lane]
            for k in range(head_dim):
                weighted[t, h, split, k] = means[row, k]


@inlined
def _fetch(key_blocks, value_blocks, layer, g, block_tables, sequence, start, count, key_tile, value_tile):
    """Bring `count` keys and values from position `start` on out of their blocks, side by side."""
    head_dim, block_size = key_blocks.shape[3], key_blocks.shape[4]
    j = 0
    while j < count:
        block, offset = block_tables[sequence, (start + j) // block_size], (start + j) % block_size
        run = min(block_size - offset, count - j)
        for k in range(head_dim):
            _copy(key_blocks, block, layer, g, k, offset, run, key_tile, k, j)
        for x in range(run):
            _copy(value_blocks, block, layer, g, offset + x, 0, head_dim, value_tile, j + x, 0)
        j += run


@inlined
def _copy(blocks, block, layer, g, row, start, count, tile, to_row, to_start):
    """Copy `count` numbers of a block's row into a tile's, sixteen at a time.

    They are read before any is written: so they may be moved at once, for no write can change what is still to be
    read. The indices are unsigned, for a negative one would count from the end, and testing for that costs as much.
    """
    whole = count - count % 16
    for i in range(0, whole, 16):
        r, w = np.uint64(start + i), np.uint64(to_start + i)
        a0, a1 = blocks[block, layer, g, row, r + U0], blocks[block, layer, g, row, r + U1]
        a2, a3 = blocks[block, layer, g, row, r + U2], blocks[block, layer, g, row, r + U3]
        a4, a5 = blocks[block, layer, g, row, r + U4], blocks[block, layer, g, row, r + U5]
        a6, a7 = blocks[block, layer, g, row, r + U6], blocks[block, layer, g, row, r + U7]
        a8, a9 = blocks[block, layer, g, row, r + U8], blocks[block, layer, g, row, r + U9]
        a10, a11 = blocks[block, layer, g, row, r + U10], blocks[block, layer, g, row, r + U11]
        a12, a13 = blocks[block, layer, g, row, r + U12], blocks[block, layer, g, row, r + U13]
        a14, a15 = blocks[block, layer, g, row, r + U14], blocks[block, layer, g, row, r + U15]
        tile[to_row, w + U0], tile[to_row, w + U1], tile[to_row, w + U2], tile[to_row, w + U3] = a0, a1, a2, a3
        tile[to_row, w + U4], tile[to_row, w + U5], tile[to_row, w + U6], tile[to_row, w + U7] = a4, a5, a6, a7
        tile[to_row, w + U8], tile[to_row, w + U9], tile[to_row, w + U10], tile[to_row, w + U11] = a8, a9, a10, a11
        tile[to_row, w + U12], tile[to_row, w + U13], tile[to_row, w + U14], tile[to_row, w + U15] = a12, a13, a14, a15
    for i in range(whole, count):
        tile[to_row, to_start + i] = blocks[block, layer, g, row, start + i]


@inlined
def _score(q, row, key_tile, visible, scores):
    """Query times each of the tile's keys, a lane a key; those out of sight get -infinity."""
    scores[:] = 0
    for k in range(0, q.shape[1], 8):
        q0, q1, q2, q3 = q[row, k], q[row, k + 1], q[row, k + 2], q[row, k + 3]
        q4, q5, q6, q7 = q[row, k + 4], q[row, k + 5], q[row, k + 6], q[row, k + 7]
        for lane in range(TILE):
            s = scores[lane]
            s += q0 * key_tile[k, lane]
            s += q1 * key_tile[k + 1, lane]
            s += q2 * key_tile[k + 2, lane]
            s += q3 * key_tile[k + 3, lane]
            s += q4 * key_tile[k + 4, lane]
            s += q5 * key_tile[k + 5, lane]
            s += q6 * key_tile[k + 6, lane]
            s += q7 * key_tile[k + 7, lane]
            scores[lane] = s
    for lane in range(visible, TILE):
        scores[lane] = NOTHING


@inlined
def _take_in(scores, visible, value_tile, row, tops, sums, means):
    """Turn the tile's scores into weights and add its values, scaling what was there to the largest score so far."""
    head_dim = means.shape[1]
    top = tops[row]
    for lane in range(TILE):
        top = max(top, scores[lane])
    fade = exp(tops[row] - top)
    tops[row] = top
    for lane in range(TILE):
        scores[lane] = exp(scores[lane] - top)
    for lane in range(visible, TILE):
        scores[lane] = 0
    for lane in range(TILE):
        sums[row, lane] = sums[row, lane] * fade + scores[lane]
    for k in range(head_dim):
        means[row, k] *= fade
    whole = head_dim - head_dim % PIECE
    eights = visible - visible % 8
    for j in range(0, eights, 8):
        p0, p1, p2, p3 = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        p4, p5, p6, p7 = scores[j + 4], scores[j + 5], scores[j + 6], scores[j + 7]
        for first in range(0, whole, PIECE):
            for lane in range(PIECE):
                k = first + lane
                m = means[row, k]
                m += p0 * value_tile[j, k]
                m += p1 * value_tile[j + 1, k]
                m += p2 * value_tile[j + 2, k]
                m += p3 * value_tile[j + 3, k]
                m += p4 * value_tile[j + 4, k]
                m += p5 * value_tile[j + 5, k]
                m += p6 * value_tile[j + 6, k]
                m += p7 * value_tile[j + 7, k]
                means[row, k] = m
        for k in range(whole, head_dim):
            for x in range(8):
                means[row, k] += scores[j + x] * value_tile[j + x, k]
    for j in range(eights, visible):  # and not one further: 0 times a later token's infinity would be NaN
        for k in range(head_dim):
            means[row, k] += scores[j] * value_tile[j, k]


@compiled
def _combine_splits(positions, largest, total, weighted):
    """Put together what each query carried away from the splits it could see, in their order."""
    tokens, num_heads, _, head_dim = weighted.shape
    attended = np.zeros((tokens, num_heads, head_dim), np.float32)
    for t in range(tokens):
        seen = 1 + positions[t] // SPLIT
        for h in range(num_heads):
            top = largest[t, h, 0]
            for split in range(1, seen):
                top = max(top, largest[t, h, split])
            sum_of_all = np.float32(0)
            for split in range(seen):
                share = exp(largest[t, h, split] - top)
                sum_of_all += share * total[t, h, split]
                for k in range(head_dim):
                    attended[t, h, k] += share * weighted[t, h, split, k]
            for k in range(head_dim):
                attended[t, h, k] /= sum_of_all
    return attended
