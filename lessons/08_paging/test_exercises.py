"""Tests of the exercises of lesson 8."""

import random

import pytest

from minillm.engine.block_allocator import BlockAllocator

B = 4


@pytest.fixture
def allocator(exercises, monkeypatch):
    """Return a function that makes an allocator with one method replaced by the exercise of the same name."""

    def make(method, num_blocks, windows=(None,)):
        monkeypatch.setattr(BlockAllocator, method, getattr(exercises, method))
        return BlockAllocator(num_blocks, B, windows)

    return make


def publish(blocks, tables, token_ids):
    """Add the blocks that `token_ids` fill in `tables` to the prefix index."""
    node = blocks.prefixes.root
    for index in range(len(token_ids) // B):
        node = blocks.publish(tables, index, token_ids[index * B : (index + 1) * B], node)


def cached(num_blocks, token_ids):
    """Return an allocator in which only the blocks of these tokens are cached, and the list of those blocks."""
    blocks = BlockAllocator(num_blocks, B)
    tables = blocks.new_tables()
    BlockAllocator.allocate(blocks, tables, len(token_ids))
    publish(blocks, tables, token_ids)
    before = list(tables[0].blocks)
    blocks.free(tables)
    return blocks, before


# allocate


def test_allocate_adds_as_few_blocks_as_possible(allocator):
    blocks = allocator("allocate", 10)
    tables = blocks.new_tables()
    for num_tokens, expected in ((1, 1), (4, 1), (5, 2), (12, 3), (13, 4), (2, 4)):
        assert blocks.allocate(tables, num_tokens) == []
        assert len(tables[0].blocks) == expected, f"{num_tokens} tokens"
        assert blocks.num_held == expected


def test_allocate_never_hands_out_a_held_block(allocator):
    blocks = allocator("allocate", 12)
    sequences = [blocks.new_tables() for _ in range(3)]
    for num_tokens in range(1, 17):
        for tables in sequences:
            blocks.allocate(tables, num_tokens)
    assert sorted(block for (table,) in sequences for block in table.blocks) == list(range(12))


def test_allocate_extends_the_table_of_every_group(allocator):
    blocks = allocator("allocate", 6, windows=(None, 8))
    tables = blocks.new_tables()
    blocks.allocate(tables, 2 * B + 1)
    assert sorted(block for table in tables for block in table.blocks) == list(range(6))
    assert [len(table.blocks) for table in tables] == [3, 3]


def test_allocate_changes_nothing_if_blocks_are_missing(allocator):
    blocks = allocator("allocate", 5)
    first, second = blocks.new_tables(), blocks.new_tables()
    blocks.allocate(first, 3 * B)
    blocks.allocate(second, B)
    with pytest.raises(MemoryError):
        blocks.allocate(second, 3 * B)  # needs two more blocks, but only one is available
    assert len(second[0].blocks) == 1
    assert blocks.num_available == 1
    blocks.allocate(second, 2 * B)
    assert blocks.num_available == 0


def test_allocate_returns_the_evicted_blocks(exercises, monkeypatch):
    blocks, before = cached(3, list(range(2 * B)))
    monkeypatch.setattr(BlockAllocator, "allocate", exercises.allocate)
    tables = blocks.new_tables()
    assert blocks.allocate(tables, B) == []  # one block was free
    assert blocks.allocate(tables, 3 * B) == [before[1], before[0]]  # the end of a text is evicted before its beginning
    assert blocks.num_cached == 0


# follow


def follow(exercises, blocks, token_ids):
    """Call the exercise; return the blocks of the nodes on the path, and check that the index has not changed."""
    before = repr(blocks), repr(blocks.prefixes), list(blocks.references)
    root, *nodes = exercises.follow(blocks.prefixes, token_ids)
    assert root is blocks.prefixes.root, "every path begins at the root"
    assert (repr(blocks), repr(blocks.prefixes), list(blocks.references)) == before, "`follow` must not change anything"
    return [block for node in nodes for block in node.blocks]


def test_follow_descends_one_block_at_a_time(exercises):
    text = list(range(3 * B))
    blocks, table = cached(8, text)
    assert follow(exercises, blocks, text) == table
    assert follow(exercises, blocks, [*text, 7, 7]) == table
    assert follow(exercises, blocks, text[:-1]) == table[:2]
    assert follow(exercises, blocks, text[: B - 1]) == []
    assert follow(exercises, blocks, []) == []


def test_follow_ends_at_the_first_difference(exercises):
    text = list(range(3 * B))
    blocks, table = cached(8, text)
    other = list(text)
    other[B] = 99
    assert follow(exercises, blocks, other) == table[:1]  # the third block has the same tokens, but a different prefix
    assert follow(exercises, blocks, text[B:]) == []  # a block is found only after the block that precedes it


def test_follow_distinguishes_equal_blocks_at_different_positions(exercises):
    text = [5] * (3 * B)
    blocks, table = cached(8, text)
    assert len(set(table)) == 3
    assert follow(exercises, blocks, text) == table
    assert follow(exercises, blocks, [5] * (5 * B)) == table


def test_follow_agrees_with_comparing_texts(exercises):
    choose = random.Random(0)
    blocks, texts = BlockAllocator(400, B), []
    for _ in range(60):
        text, tables = [choose.randrange(2) for _ in range(choose.randrange(1, 24))], blocks.new_tables()
        common = [next((n for n, (a, b) in enumerate(zip(text, t, strict=False)) if a != b), min(len(text), len(t)))
                  for t in texts]  # fmt: skip
        whole = max((min(n, len(t) // B * B) // B for n, t in zip(common, texts, strict=True)), default=0)
        assert len(follow(exercises, blocks, text)) == whole
        blocks.allocate(tables, len(text))
        publish(blocks, tables, text)
        texts.append(text)


# copy_on_write


def test_copy_on_write_replaces_a_shared_block(allocator):
    blocks = allocator("copy_on_write", 6)
    first = blocks.new_tables()
    blocks.allocate(first, 3 * B)
    second = blocks.add_reference(first)
    before = list(first[0].blocks)
    source, evicted = blocks.copy_on_write(second[0], 2)
    assert source == before[2]
    assert evicted == []
    assert first[0].blocks == before
    assert second[0].blocks[:2] == before[:2]
    assert second[0].blocks[2] not in before
    assert [blocks.references[block] for block in first[0].blocks + second[0].blocks[2:]] == [2, 2, 1, 1]


def test_copy_on_write_evicts_a_cached_block_if_none_is_free(exercises):
    blocks, before = cached(2, list(range(B)))
    first = blocks.new_tables()
    blocks.allocate(first, B)
    second = blocks.add_reference(first)
    assert exercises.copy_on_write(blocks, second[0], 0) == (first[0].blocks[0], before)
    assert second[0].blocks == before
    assert blocks.num_available == 0


def test_copy_on_write_changes_nothing_if_no_block_is_available(exercises):
    blocks = BlockAllocator(2, B)
    first = blocks.new_tables()
    blocks.allocate(first, 2 * B)
    second = blocks.add_reference(first)
    with pytest.raises(MemoryError):
        exercises.copy_on_write(blocks, second[0], 1)
    assert second[0].blocks == first[0].blocks
    assert blocks.references == [2, 2]
