"""Batch against the simplest way to lay chunks end to end; the KV cache's sizes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.engine.block_allocator import GIVEN_BACK
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import Batch, Chunk
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import KVCache

CONFIG = ModelConfig("llama", 100, 16, 32, 2, 4, 2, 8, 64)


@st.composite
def chunk_lists(draw):
    """Block size, groups of layers, and chunks, of each with the tables of its groups."""
    block_size, groups, cases = draw(st.integers(1, 9)), draw(st.integers(1, 3)), []
    for number in range(draw(st.integers(1, 5))):
        start, length, spare = draw(st.integers(0, 30)), draw(st.integers(1, 20)), draw(st.integers(0, 2))
        rows = -(-(start + length) // block_size) + spare
        tables = [[1000 * number + 100 * group + row for row in range(rows)] for group in range(groups)]
        for table in tables:
            gone = draw(st.integers(0, start // block_size))  # behind a window
            table[:gone] = [GIVEN_BACK] * gone
        token_ids = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        side_by_side = [block for row in zip(*tables, strict=True) for block in row]
        cases.append((Chunk(token_ids, start, side_by_side), tables))
    return block_size, groups, cases


@given(chunk_lists())
def test_chunks_lie_end_to_end_and_every_token_knows_its_place(case):
    block_size, groups, cases = case
    chunks = [chunk for chunk, _ in cases]
    batch = Batch.from_chunks(chunks, block_size, groups)
    rows = [
        (
            token,
            start,
            [tables[group][start // block_size] * block_size + start % block_size for group in range(groups)],
        )
        for chunk, tables in cases
        for start, token in enumerate(chunk.token_ids, chunk.start)
    ]
    assert batch.num_tokens == len(rows)
    assert batch.num_sequences == len(chunks)
    assert batch.token_ids.tolist() == [row[0] for row in rows]
    assert batch.positions.tolist() == [row[1] for row in rows]
    assert batch.slots.T.tolist() == [row[2] for row in rows]
    for row, (chunk, tables) in enumerate(cases):
        own = batch.token_ids[batch.query_starts[row] : batch.query_starts[row + 1]]
        assert own.tolist() == list(chunk.token_ids)
        for group, table in enumerate(tables):
            found = batch.block_tables[group, row].tolist()
            assert found[: len(table)] == table
            assert set(found[len(table) :]) <= {-1}
    assert f"{len(rows)} tokens of {len(chunks)} sequences" in repr(batch)


def test_batches_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at least one chunk"):
        Batch.from_chunks([], 16)
    with pytest.raises(ValueError, match="chunk 0 holds 0 tokens"):
        Batch.from_chunks([Chunk([], 0, [0])], 16)
    with pytest.raises(ValueError, match="from position -1 on"):
        Batch.from_chunks([Chunk([1], -1, [0])], 16)
    with pytest.raises(ValueError, match=r"chunk 1 holds 2 tokens from position 15 on; .* 1 blocks of 16 end at 16"):
        Batch.from_chunks([Chunk([1], 0, [0]), Chunk([1, 2], 15, [1])], 16)
    with pytest.raises(ValueError, match="its 4 blocks of 16 for 2 groups of layers end at 32"):
        Batch.from_chunks([Chunk([1], 32, [0, 1, 2, 3])], 16, num_groups=2)
    with pytest.raises(
        ValueError, match="chunk 0 has a table of 3 blocks; of 2 groups of layers there must be equally"
    ):
        Batch.from_chunks([Chunk([1], 0, [0, 1, 2])], 16, num_groups=2)
    gone = "chunk 1 would write to position 19, but its block table has given back the block of that: 5 given back; 7"
    with pytest.raises(ValueError, match=gone):
        Batch.from_chunks([Chunk([1], 0, [0]), Chunk([1, 2], 19, [GIVEN_BACK] * 5 + [7])], 4)


@given(st.integers(1, 40), st.data())
def test_layers_that_see_equally_far_share_blocks(num_layers, data):
    """Every layer is in one group, and has a place in its blocks; few places stay empty."""
    windowed = data.draw(st.sets(st.integers(0, num_layers - 1)))
    config = replace(CONFIG, num_layers=num_layers, sliding_window=9, window_layers=tuple(windowed))
    groups = config.layer_groups
    assert sorted(layer for group in groups for layer in group) == list(range(num_layers))
    assert [{config.window(layer) for layer in group} for group in groups] == [{own} for own in config.group_windows]
    if len(windowed) in (0, num_layers):
        assert groups == (tuple(range(num_layers)),)
    cache = KVCache(config, num_blocks=1)
    assert cache.num_groups == cache.blocks.num_groups == len(groups)
    assert len({tuple(place) for place in cache.places.tolist()}) == num_layers
    assert cache.places[:, 1].max() + 1 == cache.keys.shape[1]
    of_all = [len(group) for group, window in zip(groups, cache.blocks.windows, strict=True) if window is None]
    assert len(of_all) * cache.keys.shape[1] <= 2 * sum(of_all)


def test_the_cache_tells_its_size_and_occupancy():
    cache = KVCache(CONFIG, num_blocks=10, block_size=4)
    assert cache.bytes_per_token == 2 * 2 * 2 * 8 * 4  # key and value, layers, kv heads, head_dim, float32
    assert cache.num_bytes == cache.keys.nbytes + cache.values.nbytes == 40 * cache.bytes_per_token
    table = []
    cache.blocks.extend(table, 9)
    assert len(table) == 3
    assert cache.occupancy == 0.3
    assert cache.num_bytes_held == 12 * cache.bytes_per_token
    assert "3 of 10 blocks of 4 held" in repr(cache)


def test_a_block_is_copied_in_all_layers_and_no_other_is_touched():
    cache, random = KVCache(CONFIG, num_blocks=4, block_size=3), np.random.default_rng(0)
    cache.keys[:], cache.values[:] = random.normal(size=cache.keys.shape), random.normal(size=cache.values.shape)
    keys, values = cache.keys.copy(), cache.values.copy()
    cache.copy_block(2, 0)
    order = [2, 1, 2, 3]
    np.testing.assert_array_equal(cache.keys, keys[order])
    np.testing.assert_array_equal(cache.values, values[order])


def test_a_plan_becomes_the_batch_of_its_chunks():
    plan, tables = StepPlan(), [[3, 1], [0]]
    for table, start, length in ((tables[0], 2, 4), (tables[1], 3, 1)):
        sequence = Sequence.of("r", list(range(10, 10 + start + length)), 5)
        sequence.num_computed, sequence.block_table = start, table
        plan.advance(sequence, length, is_prefill=length > 1)
    batch = Batch.from_plan(plan, 4)
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 13]
    assert batch.slots.tolist() == [[14, 15, 4, 5, 3]]
    tables[0][0] = 9  # a plan is a snapshot
    assert Batch.from_plan(plan, 4).slots.tolist() == batch.slots.tolist()


def test_a_contiguous_cache_is_one_large_block():
    cache = KVCache.contiguous(CONFIG, length=50)
    assert (cache.num_blocks, cache.block_size) == (1, 50)
    assert cache.keys.shape == (1, 2, 2, 8, 50)
    assert cache.values.shape == (1, 2, 2, 50, 8)
