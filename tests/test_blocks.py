"""BlockAllocator against a count of who names what, and against the text that was really written into each block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from minillm.blocks import BlockAllocator


class Text:
    """A block table, and the tokens it holds."""

    def __init__(self, tokens, table, is_published=True):
        self.tokens, self.table, self.is_published = list(tokens), list(table), is_published


class Blocks(RuleBasedStateMachine):
    """Texts are begun, written, parted and given back; every block is always in one state, and finding never lies."""

    texts = Bundle("texts")

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 3))
    def make(self, num_blocks, block_size):
        self.blocks = BlockAllocator(num_blocks, block_size)
        self.size, self.written = block_size, {}  # block -> the whole text up to the end of what is in it
        self.held = []

    @rule(target=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, tokens):
        """A new text takes up the longest beginning that is known."""
        found = self.blocks.find(tokens)
        assert len(set(found)) == len(found) <= len(tokens) // self.size
        for index, block in enumerate(found):
            assert self.written[block] == tokens[: (index + 1) * self.size]
        for text in filter(lambda text: text.is_published, self.held):  # what others hold is never overlooked
            common = self.whole_blocks_in_common(text.tokens, tokens)
            assert text.table[:common] == found[:common]
        text = Text(tokens[: len(found) * self.size], self.blocks.share(found))
        self.held.append(text)
        self.write(text, tokens[len(found) * self.size :])
        return text

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, text, tokens):
        self.write(text, tokens)

    @rule(target=texts, text=texts)
    def part(self, text):
        other = Text(text.tokens, self.blocks.share(text.table), text.is_published)
        self.held.append(other)
        return other

    @rule(text=consumes(texts))
    def give_back(self, text):
        self.held.remove(text)
        self.blocks.shrink(text.table)
        assert text.table == []

    @rule()
    def forget(self):
        held = self.blocks.num_held
        self.blocks.forget()
        assert (self.blocks.num_held, self.blocks.num_cached) == (held, 0)
        for text in self.held:
            assert self.blocks.find(text.tokens) == []
            text.is_published = False

    @precondition(lambda self: self.blocks.num_available)
    @rule()
    def giving_back_what_nobody_holds_is_refused(self):
        block = self.blocks.references.index(0)
        with pytest.raises(ValueError, match=f"block {block} is not held"):
            self.blocks.shrink([block])

    def write(self, text, tokens):
        """Write each token where the table says, publishing blocks as they become full."""
        for token in tokens:
            index = len(text.tokens) // self.size
            evictable = self.blocks.cached
            is_shared = index < len(text.table) and self.blocks.is_shared(text.table[index])
            before = list(text.table)
            if (index == len(text.table) or is_shared) and not self.blocks.num_available:
                with pytest.raises(MemoryError, match="free"):
                    self.take(text, index)
                assert text.table == before
                return
            evicted = self.take(text, index)
            assert evicted == evictable[: len(evicted)]
            text.tokens.append(token)
            block = text.table[index]
            assert not self.blocks.is_shared(block)
            self.written[block] = list(text.tokens)
            if len(text.tokens) % self.size == 0:
                self.blocks.publish(text.table, index, text.tokens[-self.size :])
                assert self.written[text.table[index]] == text.tokens

    def take(self, text, index):
        if index == len(text.table):
            return self.blocks.extend(text.table, len(text.tokens) + 1)
        if self.blocks.is_shared(text.table[index]):
            source, evicted = self.blocks.own(text.table, index)
            self.written[text.table[index]] = self.written[source]
            return evicted
        return []

    def whole_blocks_in_common(self, left, right):
        count = 0
        while (count + 1) * self.size <= min(len(left), len(right)):
            if left[: (count + 1) * self.size] != right[: (count + 1) * self.size]:
                break
            count += 1
        return count

    @invariant()
    def every_block_is_in_one_state(self):
        blocks = self.blocks
        free, cached = set(blocks._free), set(blocks.cached)
        held = {block for block, count in enumerate(blocks.references) if count}
        assert (blocks.num_free, blocks.num_cached, blocks.num_held) == (len(blocks._free), len(cached), len(held))
        assert len(free) + len(cached) + len(held) == blocks.num_blocks
        assert free | cached | held == set(range(blocks.num_blocks))
        assert f"{blocks.num_held} of {blocks.num_blocks} blocks" in repr(blocks)

    @invariant()
    def whoever_is_found_has_parents_that_are_found(self):
        keys = self.blocks._keys
        assert {block: key for key, block in self.blocks._index.items()} == keys
        assert {parent for parent, _ in keys.values()} <= {-1, *keys}
        assert set(self.blocks.cached) <= set(keys)
        assert not set(self.blocks._free) & set(keys)

    @invariant()
    def what_a_table_names_is_what_was_written(self):
        for text in self.held:
            for index, block in enumerate(text.table):
                end = min((index + 1) * self.size, len(text.tokens))
                assert self.written[block][:end] == text.tokens[:end]

    @invariant()
    def references_equal_the_tables(self):
        named = [block for text in self.held for block in text.table]
        assert self.blocks.references == [named.count(block) for block in range(self.blocks.num_blocks)]


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 1)])
def test_a_pool_without_room_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"got {num_blocks} blocks of {block_size}"):
        BlockAllocator(num_blocks, block_size)


def test_all_or_nothing():
    blocks, table = BlockAllocator(12, 4), []
    with pytest.raises(MemoryError, match="60 tokens need 15 more blocks of 4, but 12 of 12 are free"):
        blocks.extend(table, 60)
    assert table == []
    blocks.extend(table, 41)
    blocks.shrink(table, 9)
    assert (len(table), blocks.num_held) == (3, 3)
    blocks.extend(table, 4)
    assert len(table) == 3


def test_the_least_recently_used_goes_first_and_children_before_parents():
    blocks = BlockAllocator(4, 1)
    old, new = [], []
    for table, tokens in ((old, [1, 2]), (new, [3, 4])):
        blocks.extend(table, 2)
        for index, token in enumerate(tokens):
            blocks.publish(table, index, [token])
    first, second = list(old), list(new)
    blocks.shrink(old)
    blocks.shrink(new)
    assert blocks.cached == [*reversed(first), *reversed(second)]
    blocks.shrink(blocks.share(blocks.find([1])))  # used again
    assert blocks.cached == [first[1], *reversed(second), first[0]]
    table = []
    assert blocks.extend(table, 3) == [first[1], *reversed(second)]
    assert blocks.find([1, 2]) == first[:1]
    assert blocks.find([3, 4]) == []
