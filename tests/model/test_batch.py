"""Batch against a simple concatenation of chunks, and the sizes of the KV cache."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.engine.block_table import FREED, BlockTable
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import NO_BLOCK, Batch, Chunk
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import KVCache, kv_groups

CONFIG = ModelConfig("llama", 100, 16, 32, 2, 4, 2, 8, 64)


@st.composite
def chunk_lists(draw):
    """Draw a block size, a number of KV-cache groups, and chunks."""
    block_size, groups, chunks = draw(st.integers(1, 9)), draw(st.integers(1, 3)), []
    for number in range(draw(st.integers(1, 5))):
        start, length, spare = draw(st.integers(0, 30)), draw(st.integers(1, 20)), draw(st.integers(0, 2))
        num_blocks = -(-(start + length) // block_size) + spare
        tables = [[1000 * number + 100 * group + index for index in range(num_blocks)] for group in range(groups)]
        for table in tables:
            num_freed = draw(st.integers(0, start // block_size))  # behind a window
            table[:num_freed] = [FREED] * num_freed
        token_ids = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        chunks.append(Chunk(token_ids, start, tables))
    return block_size, groups, chunks


@given(chunk_lists())
def test_a_batch_concatenates_chunks_with_one_slot_per_token(case):
    block_size, groups, chunks = case
    batch = Batch.from_chunks(chunks, block_size, groups)
    rows = [
        (
            token,
            position,
            [
                BlockTable(block_size, None, table).slots(range(position, position + 1))[0]
                for table in chunk.block_tables
            ],
        )
        for chunk in chunks
        for position, token in enumerate(chunk.token_ids, chunk.start)
    ]
    assert batch.num_tokens == len(rows)
    assert batch.num_sequences == len(chunks)
    assert batch.token_ids.tolist() == [row[0] for row in rows]
    assert batch.positions.tolist() == [row[1] for row in rows]
    assert batch.slots.T.tolist() == [row[2] for row in rows]
    for row, chunk in enumerate(chunks):
        token_ids = batch.token_ids[batch.query_starts[row] : batch.query_starts[row + 1]]
        assert token_ids.tolist() == list(chunk.token_ids)
        for group, table in enumerate(chunk.block_tables):
            found = batch.block_tables[group, row].tolist()
            assert found[: len(table)] == table
            assert set(found[len(table) :]) <= {NO_BLOCK}
    assert f"{len(rows)} tokens of {len(chunks)} sequences" in repr(batch)


def test_tables_and_batches_use_the_same_mark_for_freed_blocks():
    assert NO_BLOCK == FREED


@pytest.mark.parametrize(
    ("chunks", "block_size", "num_groups", "message"),
    [
        ([], 16, 1, "at least one chunk"),
        ([Chunk([], 0, [[0]])], 16, 1, "chunk 0 has 0 tokens"),
        ([Chunk([1], -1, [[0]])], 16, 1, "starting at position -1"),
        (
            [Chunk([1], 0, [[0]]), Chunk([1, 2], 15, [[1]])],
            16,
            1,
            "chunk 1 has 2 tokens starting at position 15; .* its block tables cover positions 0 to 15",
        ),
        ([Chunk([1], 32, [[0, 2], [1, 3]])], 16, 2, "its block tables cover positions 0 to 31"),
        (
            [Chunk([1], 0, [[0, 1], [2]])],
            16,
            2,
            r"chunk 0 has 2 block tables of \[1, 2\] blocks; expected 2, one per KV-cache group, all of the same",
        ),
        ([Chunk([1], 0, [[0]])], 16, 2, r"chunk 0 has 1 block tables of \[1\] blocks; expected 2"),
        (
            [Chunk([1], 0, [[0]]), Chunk([1, 2], 19, [[FREED] * 5 + [7]])],
            4,
            1,
            "chunk 1 would write to position 19, whose block has been freed: its block tables are 5 freed; 7",
        ),
    ],
)
def test_chunks_that_do_not_fit_their_tables_are_refused(chunks, block_size, num_groups, message):
    with pytest.raises(ValueError, match=message):
        Batch.from_chunks(chunks, block_size, num_groups)


@given(st.integers(1, 40), st.data())
def test_layers_with_the_same_window_share_blocks(num_layers, data):
    """Every layer is in one group and has one slot in its blocks.

    In groups without a window, at most half of the slots stay empty.
    """
    windowed = data.draw(st.sets(st.integers(0, num_layers - 1)))
    config = replace(CONFIG, num_layers=num_layers, sliding_window=9, window_layers=tuple(windowed))
    groups = kv_groups(config)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))
    assert all({config.window(layer) for layer in group.layers} == {group.window} for group in groups)
    if len(windowed) in (0, num_layers):
        assert [group.layers for group in groups] == [tuple(range(num_layers))]
    cache = KVCache(config, num_blocks=1)
    assert cache.num_groups == len(cache.windows) == len(groups)
    assert len({tuple(place) for place in cache.layer_places.tolist()}) == num_layers
    assert cache.layer_places[:, 1].max() + 1 == cache.keys.shape[1]
    sizes = [len(group.layers) for group in groups if group.window is None]
    assert len(sizes) * cache.keys.shape[1] <= 2 * sum(sizes)


def test_the_byte_counts_of_a_cache():
    cache = KVCache(CONFIG, num_blocks=10, block_size=4)
    assert cache.bytes_per_token == 2 * 2 * 2 * 8 * 4  # key and value, layers, kv heads, head_dim, float32
    assert cache.num_bytes == cache.keys.nbytes + cache.values.nbytes == 40 * cache.bytes_per_token
    assert cache.num_bytes == cache.num_blocks * cache.bytes_per_block
    assert "10 blocks of 4" in repr(cache)


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 20))
def test_full_tables_list_all_blocks_of_a_cache(num_windowed, block_size, length):
    config = replace(CONFIG, num_layers=3, sliding_window=2, window_layers=tuple(range(num_windowed)))
    num_blocks = KVCache.num_blocks_for(config, length, block_size)
    cache = KVCache(config, num_blocks, block_size)
    tables = cache.full_tables()
    assert len(tables) == cache.num_groups
    assert {len(table) for table in tables} == {-(-length // block_size)}
    assert sorted(block for table in tables for block in table) == list(range(num_blocks))


def test_copying_a_block_copies_all_layers_and_changes_no_other_block():
    cache, rng = KVCache(CONFIG, num_blocks=4, block_size=3), np.random.default_rng(0)
    cache.keys[:], cache.values[:] = rng.normal(size=cache.keys.shape), rng.normal(size=cache.values.shape)
    keys, values = cache.keys.copy(), cache.values.copy()
    cache.copy_block(2, 0)
    order = [2, 1, 2, 3]
    np.testing.assert_array_equal(cache.keys, keys[order])
    np.testing.assert_array_equal(cache.values, values[order])


def test_a_plan_becomes_the_batch_of_its_chunks():
    plan, tables = StepPlan(), [[3, 1], [0]]
    for table, start, length in ((tables[0], 2, 4), (tables[1], 3, 1)):
        sequence = Sequence.from_prompt("r", list(range(10, 10 + start + length)), 5)
        sequence.num_computed, sequence.block_tables = start, [BlockTable(4, None, table)]
        plan.add_chunk(sequence, length)
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
