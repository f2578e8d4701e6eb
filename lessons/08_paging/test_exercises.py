"""Are the exercises of lesson 8 right?"""

import random

import pytest

from minillm.engine.block_allocator import BlockAllocator

B = 4


@pytest.fixture
def allocator(exercises, monkeypatch):
    """Makes an allocator with the exercise of a name in the place of its method."""

    def make(method, num_blocks):
        monkeypatch.setattr(BlockAllocator, method, getattr(exercises, method))
        return BlockAllocator(num_blocks, B)

    return make


def publish(blocks, table, token_ids):
    """Let all full blocks of `token_ids`, which lie in `table`, be found."""
    node = blocks.prefixes.root
    for index in range(len(token_ids) // B):
        node = blocks.publish(table, index, token_ids[index * B : (index + 1) * B], node)


def cached(num_blocks, token_ids):
    """An allocator that has cached these tokens' blocks and nothing else, and the table they lay in."""
    blocks, table = BlockAllocator(num_blocks, B), []
    BlockAllocator.extend(blocks, table, len(token_ids))
    publish(blocks, table, token_ids)
    before = list(table)
    blocks.shrink(table)
    return blocks, before


# extend


def test_extend_gives_a_table_just_enough_blocks(allocator):
    blocks, table = allocator("extend", 10), []
    for num_tokens, wanted in ((1, 1), (4, 1), (5, 2), (12, 3), (13, 4), (2, 4)):
        assert blocks.extend(table, num_tokens) == []
        assert len(table) == wanted, f"{num_tokens} tokens"
        assert blocks.num_held == wanted


def test_extend_gives_no_block_twice(allocator):
    blocks, tables = allocator("extend", 12), [[], [], []]
    for num_tokens in range(1, 17):
        for table in tables:
            blocks.extend(table, num_tokens)
    assert sorted(block for table in tables for block in table) == list(range(12))


def test_extend_gives_all_or_nothing(allocator):
    blocks, first, second = allocator("extend", 5), [], []
    blocks.extend(first, 3 * B)
    blocks.extend(second, B)
    with pytest.raises(MemoryError):
        blocks.extend(second, 3 * B)  # two more, and one is there
    assert len(second) == 1
    assert blocks.num_available == 1
    blocks.extend(second, 2 * B)
    assert blocks.num_available == 0


def test_extend_says_what_it_evicted(exercises, monkeypatch):
    blocks, table = cached(3, list(range(2 * B)))
    monkeypatch.setattr(BlockAllocator, "extend", exercises.extend)
    grown = []
    assert blocks.extend(grown, B) == []  # one was free
    assert blocks.extend(grown, 3 * B) == [table[1], table[0]]  # the end of a text goes before its beginning
    assert blocks.num_cached == 0


# follow


def follow(exercises, blocks, token_ids):
    """The blocks of the nodes that were passed."""
    before = repr(blocks), repr(blocks.prefixes), list(blocks.references)
    root, *nodes = exercises.follow(blocks.prefixes, token_ids)
    assert root is blocks.prefixes.root, "all texts begin with nothing"
    assert (repr(blocks), repr(blocks.prefixes), list(blocks.references)) == before, "looking changes nothing"
    return [block for node in nodes for block in node.blocks]


def test_follow_goes_down_a_text_block_by_block(exercises):
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
    assert follow(exercises, blocks, other) == table[:1]  # what follows is equal, but follows another text
    assert follow(exercises, blocks, text[B:]) == []  # a block is known only behind the one that it followed


def test_follow_tells_equal_blocks_in_different_places_apart(exercises):
    text = [5] * (3 * B)
    blocks, table = cached(8, text)
    assert len(set(table)) == 3
    assert follow(exercises, blocks, text) == table
    assert follow(exercises, blocks, [5] * (5 * B)) == table


def test_follow_agrees_with_comparing_texts(exercises):
    choose = random.Random(0)
    blocks, texts = BlockAllocator(400, B), []
    for _ in range(60):
        text, table = [choose.randrange(2) for _ in range(choose.randrange(1, 24))], []
        common = [next((n for n, (a, b) in enumerate(zip(text, t, strict=False)) if a != b), min(len(text), len(t)))
                  for t in texts]  # fmt: skip
        whole = max((min(n, len(t) // B * B) // B for n, t in zip(common, texts, strict=True)), default=0)
        assert len(follow(exercises, blocks, text)) == whole
        blocks.extend(table, len(text))
        publish(blocks, table, text)
        texts.append(text)


# own


def test_own_replaces_a_shared_block(allocator):
    blocks, first = allocator("own", 6), []
    blocks.extend(first, 3 * B)
    second = blocks.share(first)
    before = list(first)
    source, evicted = blocks.own(second, 2)
    assert source == before[2]
    assert evicted == []
    assert first == before
    assert second[:2] == before[:2]
    assert second[2] not in before
    assert [blocks.references[block] for block in first + second[2:]] == [2, 2, 1, 1]


def test_own_evicts_if_it_must(exercises):
    blocks, table = cached(2, list(range(B)))
    first = []
    blocks.extend(first, B)
    second = blocks.share(first)
    assert exercises.own(blocks, second, 0) == (first[0], table)
    assert second == table
    assert blocks.num_available == 0


def test_own_changes_nothing_if_no_block_is_left(exercises):
    blocks, first = BlockAllocator(2, B), []
    blocks.extend(first, 2 * B)
    second = blocks.share(first)
    with pytest.raises(MemoryError):
        exercises.own(blocks, second, 1)
    assert second == first
    assert blocks.references == [2, 2]
