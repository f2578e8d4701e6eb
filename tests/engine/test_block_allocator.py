"""BlockAllocator against reference counts and against the text written into each block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.block_table import FREED, BlockTable, live_blocks


def block_lists(tables):
    """Return the blocks of each table."""
    return [table.blocks for table in tables]


class Text:
    """Block tables, their tokens, and the node of their last full block, or None after a reset of the index."""

    def __init__(self, tokens, tables, node):
        self.tokens, self.tables, self.node = list(tokens), tables, node


class AllocatorMachine(RuleBasedStateMachine):
    """Texts are begun, written, forked and freed. Each block is in one state, and lookups find only correct prefixes.

    After each write, a text also frees the blocks behind the windows of its groups.
    """

    texts = Bundle("texts")

    @initialize(
        blocks_per_group=st.integers(1, 10),
        spare=st.integers(0, 2),
        block_size=st.integers(1, 3),
        windows=st.lists(st.none() | st.integers(1, 7), min_size=1, max_size=3),
    )
    def make(self, blocks_per_group, spare, block_size, windows):
        self.groups = len(windows)
        self.blocks = BlockAllocator(blocks_per_group * self.groups + min(spare, self.groups - 1), block_size, windows)
        self.size, self.windows = block_size, windows
        self.written = {}  # block -> its group, and the whole text up to the end of the block
        self.published = {}  # (text in whole blocks, group) -> the last block of the text
        self.held_texts = []

    def num_hidden(self, length, window):
        """Return how many blocks of a table no token after the first `length` can read."""
        return 0 if window is None else max(0, length - window + 1) // self.size

    def forget(self, blocks):
        """Remove evicted blocks from the expected index."""
        self.published = {key: block for key, block in self.published.items() if block not in blocks}

    @rule(target=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, tokens):
        """Begin a text with the longest prefix in the cache."""
        found, node = self.blocks.match_prefix(tokens)
        assert block_lists(found) == self.longest_prefix(tokens)
        length = found[0].capacity
        text = Text(tokens[:length], self.blocks.add_reference(found), node)
        self.held_texts.append(text)
        self.write(text, tokens[length:])
        return text

    def longest_prefix(self, tokens):
        """Return the tables of the longest prefix among all blocks that were published and not evicted."""
        for length in range(len(tokens) // self.size * self.size, 0, -self.size):
            tables = [
                [
                    FREED
                    if index < self.num_hidden(length, window)
                    else self.published.get((tuple(tokens[:end]), group))
                    for index, end in enumerate(range(self.size, length + 1, self.size))
                ]
                for group, window in enumerate(self.windows)
            ]
            is_published = any(text[:length] == tuple(tokens[:length]) for text, _ in self.published)
            if is_published and not any(None in table for table in tables):
                return tables
        return [[] for _ in self.windows]

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, text, tokens):
        self.write(text, tokens)

    @rule(target=texts, text=texts)
    def fork(self, text):
        other = Text(text.tokens, self.blocks.add_reference(text.tables), text.node)
        self.held_texts.append(other)
        return other

    @rule(text=consumes(texts))
    def free(self, text):
        self.held_texts.remove(text)
        self.blocks.free(text.tables)
        assert block_lists(text.tables) == [[] for _ in self.windows]

    @rule(number=st.integers(1, 10))
    def evict(self, number):
        """Allocate and free all free blocks and up to `number` of the cached ones."""
        tables, evictable = self.blocks.new_tables(), self.blocks.cached[:number]
        num_blocks = (self.blocks.num_free + len(evictable)) // self.groups
        evicted = self.blocks.allocate(tables, num_blocks * self.size)
        assert evicted == evictable[: len(evicted)]
        assert len(evicted) > len(evictable) - self.groups
        self.forget(evicted)
        self.blocks.free(tables)

    @rule()
    def reset(self):
        num_held = self.blocks.num_held
        self.blocks.reset_prefix_cache()
        self.published = {}
        assert (self.blocks.num_held, self.blocks.num_cached) == (num_held, 0)
        for text in self.held_texts:
            found, node = self.blocks.match_prefix(text.tokens)
            assert (block_lists(found), node) == ([[] for _ in self.windows], self.blocks.prefixes.root)

    @precondition(lambda self: self.blocks.num_available)
    @rule()
    def freeing_a_block_that_is_not_held_is_refused(self):
        block = self.blocks.references.index(0)
        with pytest.raises(ValueError, match=f"block {block} is not held"):
            self.blocks.free([BlockTable(self.size, None, [block])])

    def write(self, text, tokens):
        """Write each token to its block, publish full blocks, then free the blocks that no later query can read."""
        for token in tokens:
            if not self.write_one(text, token):
                break
        self.blocks.free_before(text.tables, len(text.tokens))
        for table, window in zip(text.tables, self.windows, strict=True):
            first = self.num_hidden(len(text.tokens), window)
            assert table.blocks[:first] == [FREED] * first
            assert FREED not in table.blocks[first:]

    def write_one(self, text, token):
        position = len(text.tokens)
        index, is_new = position // self.size, position == text.tables[0].capacity
        evictable, before = self.blocks.cached, [list(blocks) for blocks in block_lists(text.tables)]
        num_needed = sum(is_new or self.blocks.is_shared(table.blocks[index]) for table in text.tables)
        if num_needed > self.blocks.num_available:
            if is_new:
                with pytest.raises(MemoryError, match="free"):
                    self.blocks.allocate(text.tables, position + 1)
                assert block_lists(text.tables) == before
            return False
        evicted = self.make_writable(text, index, is_new)
        assert evicted == evictable[: len(evicted)]
        self.forget(evicted)
        text.tokens.append(token)
        for group, table in enumerate(text.tables):
            assert not self.blocks.is_shared(table.blocks[index])
            self.written[table.blocks[index]] = group, list(text.tokens)
            assert table.slots(range(position, position + 1)) == [
                table.blocks[index] * self.size + position % self.size
            ]
        if len(text.tokens) % self.size == 0:
            is_indexed = text.node is not None and text.node.root is self.blocks.prefixes.root
            own_blocks = [table.blocks[index] for table in text.tables]
            text.node = self.blocks.publish(text.tables, index, text.tokens[-self.size :], text.node)
            assert (text.node is not None) == is_indexed
            for group, (table, block) in enumerate(zip(text.tables, own_blocks, strict=True)):
                if is_indexed:
                    assert table.blocks[index] == self.published.setdefault((tuple(text.tokens), group), block)
                assert self.written[table.blocks[index]] == (group, text.tokens)
        return True

    def make_writable(self, text, index, is_new):
        """Allocate new blocks, or copy shared ones; return the evicted blocks."""
        if is_new:
            return self.blocks.allocate(text.tables, len(text.tokens) + 1)
        evicted = []
        for table in text.tables:
            if self.blocks.is_shared(table.blocks[index]):
                source, evicted_by_copy = self.blocks.copy_on_write(table, index)
                self.written[table.blocks[index]] = self.written[source]
                evicted += evicted_by_copy
        return evicted

    @precondition(lambda self: not self.blocks.num_available)
    @rule(text=texts)
    def a_copy_without_a_free_block_is_refused(self, text):
        before = [list(blocks) for blocks in block_lists(text.tables)]
        for table in text.tables:
            for index, block in enumerate(table.blocks):
                if block != FREED and self.blocks.is_shared(block):
                    with pytest.raises(MemoryError, match=r"all \d+ are held"):
                        self.blocks.copy_on_write(table, index)
        assert block_lists(text.tables) == before

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
    def the_index_holds_the_published_blocks_and_no_unneeded_node(self):
        prefixes, indexed = self.blocks.prefixes, {}
        paths = [(prefixes.root, [])]
        for node, tokens in paths:  # the loop appends to it
            assert node.root is prefixes.root
            assert node is prefixes.root or not node.is_empty or node.children
            for group, block in enumerate(node.blocks):
                if block is not None:
                    indexed[tuple(tokens), group] = block
            for block_tokens, child in node.children.items():
                assert (child.parent, child.tokens) == (node, block_tokens)
                paths.append((child, tokens + list(block_tokens)))
        assert indexed == self.published
        assert {block for block in range(self.blocks.num_blocks) if block in prefixes} == set(indexed.values())
        assert len(prefixes) == len(indexed)
        assert set(self.blocks.cached) <= set(indexed.values())
        assert not set(self.blocks._free) & set(indexed.values())

    @invariant()
    def live_blocks_hold_what_was_written(self):
        for text in self.held_texts:
            for group, table in enumerate(text.tables):
                for index, block in enumerate(table.blocks):
                    end = min((index + 1) * self.size, len(text.tokens))
                    if block != FREED and end > index * self.size:
                        assert (self.written[block][0], self.written[block][1][:end]) == (group, text.tokens[:end])

    @invariant()
    def references_count_the_tables_that_list_a_block(self):
        listed = [block for text in self.held_texts for table in text.tables for block in table.live_blocks]
        assert self.blocks.references == [listed.count(block) for block in range(self.blocks.num_blocks)]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=250, stateful_step_count=50)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 1)])
def test_a_pool_without_blocks_or_positions_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"got {num_blocks} blocks of {block_size}"):
        BlockAllocator(num_blocks, block_size)


def test_a_failed_allocation_takes_no_blocks():
    blocks = BlockAllocator(12, 4)
    tables = blocks.new_tables()
    with pytest.raises(MemoryError, match="60 tokens need 15 more blocks of 4, but 12 of 12 are free"):
        blocks.allocate(tables, 60)
    assert block_lists(tables) == [[]]
    blocks.allocate(tables, 9)
    assert (len(tables[0].blocks), blocks.num_held) == (3, 3)
    blocks.allocate(tables, 4)
    assert len(tables[0].blocks) == 3


def publish(blocks, tables, tokens):
    """Publish the blocks of a text, which hold one token each; return the node of each."""
    nodes = [blocks.prefixes.root]
    for index, token in enumerate(tokens):
        nodes.append(blocks.publish(tables, index, [token], nodes[-1]))
    return nodes[1:]


def allocated(blocks, num_tokens):
    """Return new tables that cover `num_tokens` positions."""
    tables = blocks.new_tables()
    blocks.allocate(tables, num_tokens)
    return tables


def cached_prefix(blocks, tokens):
    """Return the blocks of the longest prefix in the cache, per group."""
    return block_lists(blocks.match_prefix(tokens)[0])


def test_least_recently_used_blocks_are_evicted_first_and_children_before_parents():
    blocks = BlockAllocator(4, 1)
    old, new = allocated(blocks, 2), allocated(blocks, 2)
    for tables, tokens in ((old, [1, 2]), (new, [3, 4])):
        publish(blocks, tables, tokens)
    (first,), (second,) = ([list(table.blocks) for table in tables] for tables in (old, new))
    blocks.free(old)
    blocks.free(new)
    assert blocks.cached == [*reversed(first), *reversed(second)]
    blocks.free(blocks.add_reference(blocks.match_prefix([1])[0]))  # used again
    assert blocks.cached == [first[1], *reversed(second), first[0]]
    assert blocks.allocate(blocks.new_tables(), 3) == [first[1], *reversed(second)]
    assert cached_prefix(blocks, [1, 2]) == [first[:1]]
    assert cached_prefix(blocks, [3, 4]) == [[]]


def test_a_prefix_is_found_without_the_blocks_that_a_window_hides():
    blocks = BlockAllocator(4, 1, [3])
    tables = allocated(blocks, 4)
    nodes = publish(blocks, tables, [1, 2, 3, 4])
    kept = list(tables[0].blocks)
    blocks.free_before(tables, 4)
    assert tables[0].blocks == [FREED, FREED, *kept[2:]]
    assert blocks.allocate(blocks.new_tables(), 1) == kept[1:2]  # freed last to first
    for window, length in ((None, 1), (5, 1), (3, 4), (2, 4), (1, 4)):
        blocks.windows = (window,)
        hidden = 0 if window is None else max(0, length - window + 1)
        match, node = blocks.match_prefix([1, 2, 3, 4, 5])
        assert (block_lists(match), node) == ([[FREED] * hidden + kept[hidden:length]], nodes[length - 1])
    assert repr(nodes[1]) == "Node(2 blocks long, no block, 1 children)"
    assert repr(nodes[3]) == f"Node(4 blocks long, block {kept[3]}, 0 children)"
    assert repr(blocks.prefixes) == "PrefixIndex(3 blocks of 1 tokens known)"


def test_a_group_with_a_window_frees_blocks_that_other_groups_keep():
    blocks = BlockAllocator(8, 1, [2, None])
    tables = allocated(blocks, 4)
    windowed, full = [list(table.blocks) for table in tables]
    nodes = publish(blocks, tables, [1, 2, 3, 4])
    blocks.free_before(tables, 4)
    assert block_lists(tables) == [[FREED] * 3 + windowed[3:], full]
    assert blocks.cached == [windowed[2], windowed[1], windowed[0]]
    assert blocks.allocate(blocks.new_tables(), 1) == [windowed[2], windowed[1]]
    assert repr(nodes[1]) == f"Node(2 blocks long, blocks none, {full[1]}, 1 children)"
    assert (cached_prefix(blocks, [1, 2, 3, 4, 5]), blocks.match_prefix([1, 2, 3, 4, 5])[1]) == (
        block_lists(tables),
        nodes[3],
    )
    shorter, node = blocks.match_prefix([1, 2, 3, 5])  # for longer prefixes, windowed blocks have been evicted
    assert (block_lists(shorter), node) == ([windowed[:1], full[:1]], nodes[0])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_table_frees_exactly_the_blocks_that_no_later_query_can_read(window, block_size):
    for position in range(20):
        table = BlockTable(block_size, window, list(range(-(-20 // block_size))))
        readable = range(0 if window is None else max(0, position - window + 1), 20)
        expected = sorted({other // block_size for other in readable})
        freed = table.free_before(position)
        assert table.live_blocks == live_blocks(table.blocks) == expected
        assert freed == list(range(expected[0] - 1, -1, -1))
        assert table.free_before(position) == []
        assert ("freed" in repr(table)) == bool(freed)
