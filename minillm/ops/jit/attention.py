"""Attention over the paged cache, whose bits depend on a query's own sequence alone.

The keys of a sequence are cut into *splits* of 256 positions, which threads take as they come (Flash-Decoding, Dao et
al. 2023). From a split, a query carries away three things: its largest score, the sum of exp(score - largest), and
the sum of the values weighted so. When all splits are done they are put together in order, each scaled down to the
largest score of all: the softmax of all keys, though no one ever saw all the scores (online softmax, Milakov &
Gimelshein 2018; FlashAttention, Dao et al. 2022).

Within a split, a block's keys are scored at once, a SIMD lane each, straight from where they lie; then its values are
summed. They serve all queries of a prompt's chunk and all query heads of a group, four rows at a time, before the next
block is read. Splits lie at absolute positions, and the order of every sum is of positions alone, so how a prompt was
chunked, how long blocks are, or who else is in the batch, changes nothing.

Where a layer has a window, a query sees the last `window` keys alone, and splits before those are not looked at.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.float16 import narrow, stored, widen
from minillm.ops.jit.microkernel import ROWS, aligned, multiply_add, whole_rows
from minillm.ops.jit.pointwise import exp, largest_of_lanes, squeezed, sum_of_lanes
from minillm.ops.jit.prefetching import prefetch
from minillm.ops.jit.weight_formats import LANES

SPLIT = 256  # keys that one thread takes; a multiple of LANES
QUERIES = 8  # tokens of a sequence that use a block's keys before the next is read
SLAB = 16  # groups of queries that are worked on together: bounds the memory for what they carry from each split
NOTHING = np.float32(-math.inf)  # the score of a key that must not be seen
NO_WINDOW = 2**31 - 1  # more positions than any sequence has; an int32, as they are


def write_kv(keys, values, key_blocks, value_blocks, layer, slots):
    """Store each token's key and value [T, G, K] at its slot in a layer of the cache; see `reference`."""
    keep_kv(keys, values, stored(key_blocks), stored(value_blocks), layer, slots)


def attention(
    queries,
    key_blocks,
    value_blocks,
    layer,
    positions,
    query_starts,
    block_tables,
    scale=None,
    window=None,
    soft_cap=None,
):
    """Causal attention of every token over its own sequence's keys [T, H, K] -> [T, H, K]; see `reference`."""
    how = scoring(queries.shape[2], scale, window, soft_cap)
    return attend(queries, stored(key_blocks), stored(value_blocks), layer, positions, query_starts, block_tables, how)


def scoring(head_dim, scale, window, soft_cap):
    """How queries are scored, in the types that kernels take: scale, window, and soft cap (0 for none)."""
    scale = np.float32(1) / np.float32(math.sqrt(head_dim)) if scale is None else np.float32(scale)
    return scale, NO_WINDOW if window is None else window, np.float32(soft_cap or 0)


@compiled
def keep_kv(keys, values, key_blocks, value_blocks, layer, slots):
    """`write_kv`, for other kernels to call: of a float16 cache they have the bits."""
    tokens, kv_heads, head_dim = keys.shape
    block_size = value_blocks.shape[3]
    for t in range(tokens):
        block, offset = divmod(slots[t], block_size)
        for g in range(kv_heads):
            for k in range(head_dim):
                key_blocks[block, layer, g, k, offset] = narrow(keys[t, g, k], key_blocks)
                value_blocks[block, layer, g, offset, k] = narrow(values[t, g, k], value_blocks)


@compiled
def attend(queries, key_blocks, value_blocks, layer, positions, query_starts, block_tables, how):
    """`attention`, for other kernels to call: of a float16 cache they have the bits; `how` is from `scoring`."""
    attended = np.empty_like(queries)
    starts, owners = _query_groups(query_starts)
    for group in range(0, len(owners), SLAB):
        last = min(group + SLAB, len(owners))
        first, stop = starts[group], starts[last]
        attended[first:stop] = _attend_slab(
            queries[first:stop],
            key_blocks,
            value_blocks,
            layer,
            positions[first:stop],
            starts[group : last + 1] - first,
            owners[group:last],
            block_tables,
            how,
        )
    return attended


@inlined
def _attend_slab(queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables, how):
    """Some query groups' attention: every split of the keys on its own, then all of them together."""
    tokens, num_heads, head_dim = queries.shape
    splits = 1 + max(positions) // SPLIT
    largest = np.empty((tokens, num_heads, splits), np.float32)
    total = np.empty((tokens, num_heads, splits), np.float32)
    weighted = np.empty((tokens, num_heads, splits, head_dim), np.float32)
    carried = largest, total, weighted
    kv_heads = value_blocks.shape[2]
    short = tokens == 1 and positions[0] < 32  # not worth waking a thread for
    if short or len(owners) * kv_heads * splits == 1:
        first = np.int64(0)  # of the type that a loop counts in, so that it need not be compiled for another
        for g in range(kv_heads):
            _attend_split(
                not short,
                first,
                g,
                first,
                queries,
                key_blocks,
                value_blocks,
                layer,
                positions,
                starts,
                owners,
                block_tables,
                how,
                carried,
            )
    else:
        _attend_splits(queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables, how, carried)
    return _combine_splits(positions, how[1], largest, total, weighted)


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
def _attend_splits(queries, key_blocks, value_blocks, layer, positions, starts, owners, block_tables, how, carried):
    """All pieces of work, shared among the threads: each group of queries, key/value head and split of the keys."""
    kv_heads, splits = value_blocks.shape[2], carried[0].shape[2]
    for item in prange(len(owners) * kv_heads * splits):
        group, rest = divmod(np.int64(item), kv_heads * splits)  # Numba counts a parallel loop in unsigned numbers
        g, split = divmod(rest, splits)
        _attend_split(
            np.bool_(False),  # not the constant, which it would be compiled for once more
            group,
            g,
            split,
            queries,
            key_blocks,
            value_blocks,
            layer,
            positions,
            starts,
            owners,
            block_tables,
            how,
            carried,
        )


@compiled
def _attend_split(
    together,
    group,
    g,
    split,
    queries,
    key_blocks,
    value_blocks,
    layer,
    positions,
    starts,
    owners,
    block_tables,
    how,
    carried,
):
    """What a group of queries carries away from one split of one head's keys.

    Its rows are the group's tokens times the query heads that share the key/value head; made a multiple of four.
    Where it is the only piece of work, the threads share it (`together`): one that had nothing to do would fall asleep,
    and be late for the next product.
    """
    largest, total, weighted = carried
    scale, window, soft_cap = how
    head_dim, block_size = queries.shape[2], value_blocks.shape[3]
    heads = queries.shape[1] // value_blocks.shape[2]
    first, stop = starts[group], starts[group + 1]
    rows = (stop - first) * heads
    start = split * SPLIT
    seen = min(SPLIT, positions[stop - 1] + 1 - start)  # keys of the split that the last of the group may see
    unseen = max(0, positions[first] + 1 - window - start)  # keys of the split that even the first sees no more
    if seen <= unseen:
        return
    table = block_tables[owners[group]]
    visible = np.empty((whole_rows(rows), 2), np.int64)  # which keys of the split a row may see: from, and up to
    for row in range(len(visible)):
        end = positions[min(first + row // heads, stop - 1)] + 1 - start
        visible[row, 0], visible[row, 1] = max(0, min(seen, end - window)), max(0, min(seen, end))
    q = _scaled_rows(queries, first, g, heads, rows, scale)
    weights = np.empty((len(q), SPLIT), np.float32)
    if together:
        _score_together(q, weights, key_blocks, layer, g, table, start, unseen, seen)
    else:
        _score(q, weights, key_blocks, layer, g, table, start, unseen, seen)
    _prefetch_block(value_blocks, block_size, table, start + unseen, start + seen, layer, g)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        t, h = first + row // heads, g * heads + row % heads
        if soft_cap:
            _squeeze(weights, row, visible[row, 0], visible[row, 1], soft_cap)
        largest[t, h, split], total[t, h, split] = _weigh(weights, row, visible[row, 0], visible[row, 1], lanes)
    sums = np.empty((len(q), head_dim), np.float32)
    if together:
        _mix_together(sums, weights, visible, value_blocks, layer, g, table, start, unseen, seen)
    else:
        for left in range(0, head_dim, LANES):
            _mix(sums, left, weights, visible, value_blocks, layer, g, table, start, unseen, seen)
    for row in range(rows):
        t, h = first + row // heads, g * heads + row % heads
        for k in range(head_dim):
            weighted[t, h, split, k] = sums[row, k]


@compiled
def _prefetch_block(blocks, block_size, table, position, end, layer, g):
    """Ask for one head's keys or values of the block that holds `position`, if that lies before `end`."""
    if position < end:
        block = table[position // block_size]
        start = block * blocks.strides[0] + layer * blocks.strides[1] + g * blocks.strides[2]
        prefetch(blocks, start, blocks.strides[2])


@compiled
def _scaled_rows(queries, first, g, heads, rows, scale):
    """A group's queries by row, times `scale`; rows of zeros fill them up to a multiple of four."""
    head_dim = queries.shape[2]
    scaled = np.zeros((whole_rows(rows), head_dim), np.float32)
    for row in range(rows):
        for k in range(head_dim):
            scaled[row, k] = queries[first + row // heads, g * heads + row % heads, k] * scale
    return scaled


@compiled_parallel
def _score_together(q, scores, key_blocks, layer, g, table, start, unseen, seen):
    """`_score` by all threads: a key's score is its own."""
    before = unseen // LANES
    for part in prange(-(-seen // LANES) - before):
        first = (before + np.int64(part)) * LANES
        _score(q, scores, key_blocks, layer, g, table, start, max(unseen, first), min(seen, first + LANES))


@compiled
def _score(q, scores, key_blocks, layer, g, table, start, unseen, seen):
    """Every row's query times keys `unseen` to `seen` from position `start` on, into [rows, SPLIT]."""
    rows, head_dim = q.shape
    block_size = key_blocks.shape[4]
    sums = aligned(ROWS, LANES)
    j = unseen
    while j < seen:
        _prefetch_block(key_blocks, block_size, table, start + j + block_size, start + seen, layer, g)
        keys = key_blocks[table[(start + j) // block_size], layer, g]
        offset = (start + j) % block_size
        run = min(block_size - offset, seen - j, LANES)
        for row in range(0, rows, ROWS):
            sums[:] = 0
            multiply_add(sums, q, row, 0, keys, 0, offset, head_dim, run)
            for r in range(ROWS):
                for lane in range(run):
                    scores[np.uint64(row + r), np.uint64(j + lane)] = sums[np.uint64(r), lane]
        j += run


@compiled
def _squeeze(scores, row, begin, end, soft_cap):
    """Squeeze a row's scores `begin` to `end` between -soft_cap and soft_cap."""
    for j in range(begin, end):
        scores[row, j] = squeezed(scores[row, j], soft_cap)


@compiled
def _weigh(scores, row, begin, visible, lanes):
    """Turn a row's scores into exp(score - largest), in place, 0 for keys out of sight: the largest, and their sum.

    In sight are keys `begin` to `visible`. Lanes lie at fixed positions, so a sum is the same wherever others begin.
    """
    row = np.uint64(row)
    begin, first_lanes = np.int64(begin), np.int64(begin // LANES * LANES)
    end = -(-visible // LANES) * LANES
    for j in range(first_lanes, begin):
        scores[row, j] = NOTHING
    for j in range(visible, end):
        scores[row, j] = NOTHING
    lanes[:] = NOTHING
    for first in range(first_lanes, end, LANES):
        for lane in range(LANES):
            score = scores[row, np.uint64(first + lane)]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    top = largest_of_lanes(lanes)
    lanes[:] = 0
    for first in range(first_lanes, end, LANES):
        for lane in range(LANES):
            j = np.uint64(first + lane)
            weight = exp(scores[row, j] - top)
            scores[row, j] = weight
            lanes[lane] += weight
    for j in range(visible, SPLIT):
        scores[row, j] = 0
    return top, sum_of_lanes(lanes)


@compiled_parallel
def _mix_together(mixed, weights, visible, value_blocks, layer, g, table, start, unseen, seen):
    """`_mix` by all threads: a lane's sum is its own."""
    for tile in prange(-(-mixed.shape[1] // LANES)):
        left = np.int64(tile) * LANES
        _mix(mixed, left, weights, visible, value_blocks, layer, g, table, start, unseen, seen)


@compiled
def _mix(mixed, left, weights, visible, value_blocks, layer, g, table, start, unseen, seen):
    """Every row's sum of the values from position `start` on, each times its weight: 64 lanes of [rows, K]."""
    block_size, head_dim = value_blocks.shape[3], value_blocks.shape[4]
    sums = aligned(ROWS, LANES)
    lanes = min(LANES, head_dim - left)
    for row in range(0, len(weights), ROWS):
        sums[:] = 0
        j = unseen
        while j < seen:
            _prefetch_block(value_blocks, block_size, table, start + j + block_size, start + seen, layer, g)
            values = value_blocks[table[(start + j) // block_size], layer, g]
            offset = (start + j) % block_size
            end = min(j + block_size - offset, seen)
            # Rows are in the order of their positions: what the first may see yet, and the last still, all may.
            # And not one value more: 0 times a later token's infinity would be NaN.
            common = min(end, max(j, visible[row + ROWS - 1, 0]))
            behind = max(common, min(end, visible[row, 1]))
            _mix_edges(sums, weights, row, visible, j, common, values, offset - j, left, lanes)
            multiply_add(sums, weights, row, common, values, offset + common - j, left, behind - common, lanes)
            _mix_edges(sums, weights, row, visible, behind, end, values, offset - j, left, lanes)
            j = end
        for r in range(ROWS):
            for lane in range(lanes):
                mixed[np.uint64(row + r), np.uint64(left + lane)] = sums[np.uint64(r), lane]


@inlined
def _mix_edges(sums, weights, row, visible, begin, end, values, shift, left, lanes):
    """Add what keys `begin` to `end` give those of four rows that may see them; key i has row `shift + i` of values."""
    for r in range(ROWS):
        for i in range(max(begin, visible[row + r, 0]), min(end, visible[row + r, 1])):
            for lane in range(lanes):
                value = widen(values[np.uint64(shift + i), np.uint64(left + lane)])
                sums[np.uint64(r), lane] += weights[row + r, i] * value


@compiled
def _combine_splits(positions, window, largest, total, weighted):
    """Put together what each query carried away from the splits it could see, in their order."""
    tokens, num_heads, _, head_dim = weighted.shape
    attended = np.zeros((tokens, num_heads, head_dim), np.float32)
    for t in range(tokens):
        first, seen = max(0, positions[t] + 1 - window) // SPLIT, 1 + positions[t] // SPLIT
        for h in range(num_heads):
            top = largest[t, h, first]
            for split in range(first + 1, seen):
                top = max(top, largest[t, h, split])
            sum_of_all = np.float32(0)
            for split in range(first, seen):
                share = exp(largest[t, h, split] - top)
                sum_of_all += share * total[t, h, split]
                for k in range(head_dim):
                    attended[t, h, k] += share * weighted[t, h, split, k]
            for k in range(head_dim):
                attended[t, h, k] /= sum_of_all
    return attended
