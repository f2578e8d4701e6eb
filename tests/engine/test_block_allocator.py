"""BlockAllocator against a count of who names what, and against the text that was really written into each block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from minillm.engine.block_allocator import GIVEN_BACK, BlockAllocator, held


class Text:
    """A block table, the tokens it holds, and the node of its last full block; None once the index was emptied."""

    def __init__(self, tokens, table, node):
        self.tokens, self.table, self.node = list(tokens), list(table), node


class Blocks(RuleBasedStateMachine):
    """Texts are begun, written, parted and given back; every block is always in one state, and finding never lies.

    A text also gives back what lies behind the windows of its groups, whenever something was written.
    """

    texts = Bundle("texts")

    @initialize(
        num_rows=st.integers(1, 10),
        spare=st.integers(0, 2),
        block_size=st.integers(1, 3),
        windows=st.lists(st.none() | st.integers(1, 7), min_size=1, max_size=3),
    )
    def make(self, num_rows, spare, block_size, windows):
        self.groups = len(windows)
        self.blocks = BlockAllocator(num_rows * self.groups + min(spare, self.groups - 1), block_size, windows)
        self.size, self.windows = block_size, windows
        self.written = {}  # block -> its group, and the whole text up to the end of what is in it
        self.known = {}  # (text in whole blocks, group) -> the block that holds its last
        self.held = []

    def hidden(self, length, window):
        """Rows that no token behind `length` others reaches."""
        return 0 if window is None else max(0, length - window + 1) // self.size

    def forgotten(self, blocks):
        self.known = {spelled: block for spelled, block in self.known.items() if block not in blocks}

    @rule(target=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, tokens):
        """A new text takes up the longest beginning that can be gone on from."""
        found, node = self.blocks.find(tokens)
        assert found == self.longest_usable(tokens)
        length = len(found) // self.groups * self.size
        text = Text(tokens[:length], self.blocks.share(found), node)
        self.held.append(text)
        self.write(text, tokens[length:])
        return text

    def longest_usable(self, tokens):
        """Looked for among all that was ever published and never evicted, the longest beginning first."""
        for length in range(len(tokens) // self.size * self.size, 0, -self.size):
            table = [
                GIVEN_BACK if row < self.hidden(length, window) else self.known.get((beginning, group))
                for row, end in enumerate(range(self.size, length + 1, self.size))
                for beginning in [tuple(tokens[:end])]
                for group, window in enumerate(self.windows)
            ]
            spelled = any(known[:length] == tuple(tokens[:length]) for known, _ in self.known)
            if spelled and None not in table:
                return table
        return []

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, text, tokens):
        self.write(text, tokens)

    @rule(target=texts, text=texts)
    def part(self, text):
        other = Text(text.tokens, self.blocks.share(text.table), text.node)
        self.held.append(other)
        return other

    @rule(text=consumes(texts))
    def give_back(self, text):
        self.held.remove(text)
        self.blocks.shrink(text.table)
        assert text.table == []

    @rule(number=st.integers(1, 10))
    def others_need_room(self, number):
        """They take the free blocks, and so many of the cached ones."""
        table, evictable = [], self.blocks.cached[:number]
        rows = (self.blocks.num_free + len(evictable)) // self.groups
        evicted = self.blocks.extend(table, rows * self.size)
        assert evicted == evictable[: len(evicted)]
        assert len(evicted) > len(evictable) - self.groups
        self.forgotten(evicted)
        self.blocks.shrink(table)

    @rule()
    def forget(self):
        held = self.blocks.num_held
        self.blocks.reset_prefix_cache()
        self.known = {}
        assert (self.blocks.num_held, self.blocks.num_cached) == (held, 0)
        for text in self.held:
            assert self.blocks.find(text.tokens) == ([], self.blocks.prefixes.root)

    @precondition(lambda self: self.blocks.num_available)
    @rule()
    def giving_back_what_nobody_holds_is_refused(self):
        block = self.blocks.references.index(0)
        with pytest.raises(ValueError, match=f"block {block} is not held"):
            self.blocks.shrink([block] * self.groups)

    def write(self, text, tokens):
        """Write each token where the table says, publishing blocks as they fill up; then let go of what is behind."""
        for token in tokens:
            if not self.write_one(text, token):
                break
        self.blocks.give_back_behind(text.table, len(text.tokens))
        for group, window in enumerate(self.windows):
            table, first = text.table[group :: self.groups], self.hidden(len(text.tokens), window)
            assert table[:first] == [GIVEN_BACK] * first
            assert GIVEN_BACK not in table[first:]

    def write_one(self, text, token):
        position = len(text.tokens)
        places = self.blocks.row(position)
        evictable, before = self.blocks.cached, list(text.table)
        wanted = sum(place >= len(text.table) or self.blocks.is_shared(text.table[place]) for place in places)
        if wanted > self.blocks.num_available:
            if places.start == len(text.table):
                with pytest.raises(MemoryError, match="free"):
                    self.blocks.extend(text.table, position + 1)
                assert text.table == before
            return False
        evicted = self.take(text, places)
        assert evicted == evictable[: len(evicted)]
        self.forgotten(evicted)
        text.tokens.append(token)
        for group, place in enumerate(places):
            assert not self.blocks.is_shared(text.table[place])
            self.written[text.table[place]] = group, list(text.tokens)
        if len(text.tokens) % self.size == 0:
            is_found = text.node is not None and text.node.root is self.blocks.prefixes.root
            own = [text.table[place] for place in places]
            text.node = self.blocks.publish(text.table, position // self.size, text.tokens[-self.size :], text.node)
            assert (text.node is not None) == is_found
            for group, (place, block) in enumerate(zip(places, own, strict=True)):
                if is_found:
                    assert text.table[place] == self.known.setdefault((tuple(text.tokens), group), block)
                assert self.written[text.table[place]] == (group, text.tokens)
        return True

    def take(self, text, places):
        if places.start == len(text.table):
            return self.blocks.extend(text.table, len(text.tokens) + 1)
        evicted = []
        for place in places:
            if self.blocks.is_shared(text.table[place]):
                source, gone = self.blocks.own(text.table, place)
                self.written[text.table[place]] = self.written[source]
                evicted += gone
        return evicted

    @precondition(lambda self: not self.blocks.num_available)
    @rule(text=texts)
    def where_nothing_is_free_nothing_is_copied(self, text):
        before = list(text.table)
        for place, block in enumerate(before):
            if block != GIVEN_BACK and self.blocks.is_shared(block):
                with pytest.raises(MemoryError, match=r"none of .* is free"):
                    self.blocks.own(text.table, place)
        assert text.table == before

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
    def the_index_knows_what_was_published_and_nothing_that_nobody_needs(self):
        prefixes, spelled = self.blocks.prefixes, {}
        ways = [(prefixes.root, [])]
        for node, tokens in ways:  # grows as it goes on
            assert node.root is prefixes.root
            assert node is prefixes.root or not node.is_empty or node.children
            for group, block in enumerate(node.blocks):
                if block is not None:
                    spelled[tuple(tokens), group] = block
            for own, child in node.children.items():
                assert (child.parent, child.tokens) == (node, own)
                ways.append((child, tokens + list(own)))
        assert spelled == self.known
        assert {block for block in range(self.blocks.num_blocks) if block in prefixes} == set(spelled.values())
        assert len(prefixes) == len(spelled)
        assert set(self.blocks.cached) <= set(spelled.values())
        assert not set(self.blocks._free) & set(spelled.values())

    @invariant()
    def what_a_table_names_is_what_was_written(self):
        for text in self.held:
            for place, block in enumerate(text.table):
                row, group = divmod(place, self.groups)
                end = min((row + 1) * self.size, len(text.tokens))
                if block != GIVEN_BACK and end > row * self.size:
                    assert (self.written[block][0], self.written[block][1][:end]) == (group, text.tokens[:end])

    @invariant()
    def references_equal_the_tables(self):
        named = [block for text in self.held for block in held(text.table)]
        assert self.blocks.references == [named.count(block) for block in range(self.blocks.num_blocks)]


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=250, stateful_step_count=50)


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


def publish(blocks, table, tokens):
    """Let the blocks of a text of one token each be found; the node of each."""
    nodes = [blocks.prefixes.root]
    for index, token in enumerate(tokens):
        nodes.append(blocks.publish(table, index, [token], nodes[-1]))
    return nodes[1:]


def test_the_least_recently_used_goes_first_and_children_before_parents():
    blocks = BlockAllocator(4, 1)
    old, new = [], []
    for table, tokens in ((old, [1, 2]), (new, [3, 4])):
        blocks.extend(table, 2)
        publish(blocks, table, tokens)
    first, second = list(old), list(new)
    blocks.shrink(old)
    blocks.shrink(new)
    assert blocks.cached == [*reversed(first), *reversed(second)]
    blocks.shrink(blocks.share(blocks.find([1])[0]))  # used again
    assert blocks.cached == [first[1], *reversed(second), first[0]]
    table = []
    assert blocks.extend(table, 3) == [first[1], *reversed(second)]
    assert blocks.find([1, 2])[0] == first[:1]
    assert blocks.find([3, 4])[0] == []


def test_a_beginning_is_found_without_its_own_beginning_where_a_window_hides_that():
    blocks, table = BlockAllocator(4, 1, [3]), []
    blocks.extend(table, 4)
    nodes = publish(blocks, table, [1, 2, 3, 4])
    kept = list(table)
    blocks.give_back_behind(table, 4)
    assert table == [GIVEN_BACK, GIVEN_BACK, *kept[2:]]
    assert blocks.extend([], 1) == kept[1:2]  # given back last to first
    for window, length in ((None, 1), (5, 1), (3, 4), (2, 4), (1, 4)):
        blocks.windows = (window,)
        hidden = 0 if window is None else max(0, length - window + 1)
        assert blocks.find([1, 2, 3, 4, 5]) == ([GIVEN_BACK] * hidden + kept[hidden:length], nodes[length - 1])
    assert repr(nodes[1]) == "Node(2 blocks long, no block, 1 children)"
    assert repr(nodes[3]) == f"Node(4 blocks long, block {kept[3]}, 0 children)"
    assert repr(blocks.prefixes) == "PrefixIndex(3 blocks of 1 tokens known)"


def test_layers_with_a_window_let_go_what_others_keep():
    blocks, table = BlockAllocator(8, 1, [2, None]), []
    blocks.extend(table, 4)
    taken = list(table)
    nodes = publish(blocks, table, [1, 2, 3, 4])
    blocks.give_back_behind(table, 4)
    assert table[::2] == [GIVEN_BACK] * 3 + taken[6:7]
    assert table[1::2] == taken[1::2]
    assert blocks.cached == [taken[4], taken[2], taken[0]]
    assert blocks.extend([], 1) == [taken[4], taken[2]]
    assert repr(nodes[1]) == f"Node(2 blocks long, blocks none, {taken[3]}, 1 children)"
    assert blocks.find([1, 2, 3, 4, 5]) == (table, nodes[3])
    assert blocks.find([1, 2, 3, 5]) == (taken[:2], nodes[0])  # the keys that others would miss were evicted
