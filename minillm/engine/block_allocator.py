"""BlockAllocator: which blocks of the KV cache are free, shared, or worth keeping, in integers only.

Memory is handed out in blocks of `block_size` positions, so that a sequence takes what it has filled, rounded up,
and the blocks of one sequence may lie anywhere (Kwon et al. 2023, PagedAttention). A sequence's *block table* lists
its blocks in order: position `p` lies in block `table[p // block_size]` at offset `p % block_size`.

Two tables may name the same block where their texts begin alike. So every block counts the tables that name it, and is

    held     some table names it
    cached   none does, but the prefix index still finds its content: it can be taken up again, or be evicted
    free     none does, and nothing is in it

Which blocks can be found by their content is kept in the prefix index (`prefix_index.py`). The least recently given
back is evicted first.

A layer that sees only a window has no use for the blocks behind it: no query reaches them any more, so a sequence gives
them back while it runs. Its table keeps its length, and names GIVEN_BACK in their places. But other layers of the same
model may see everything (Gemma 3: three of 18). So that these need not hold on to what those let go, layers are in
*groups* that see equally far, and a block holds its positions for the layers of one group. A table then has a *row* of
blocks, one a group, where it otherwise has a single one:

                      window of 8          window of 8          all               block_size 4,
    positions 0 ..    GIVEN_BACK           GIVEN_BACK           2                 13 positions so far
    positions 4 ..    3                    4                    5
    positions 8 ..    6                    7                    8
    positions 12 ..   9                    0                    1

It is one list all the same, row after row: block `table[position // block_size * num_groups + group]`. All groups take
from one pool, for their blocks are of one size (vLLM's hybrid KV cache manager works so, too).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from minillm.engine.prefix_index import Node, PrefixIndex

GIVEN_BACK = -1  # stands in a block table for a block that it has given back, as for all before that of the group


def num_held(block_table: SequenceOf[int]) -> int:
    """How many blocks a table names, without those that it has given back."""
    return len(block_table) - block_table.count(GIVEN_BACK)


def held(block_table: SequenceOf[int]) -> list[int]:
    """The blocks that a table names, without those that it has given back."""
    return [block for block in block_table if block != GIVEN_BACK]


class BlockAllocator:
    """Hands out the numbers 0 to `num_blocks - 1`, counts who holds them, and finds those whose content is known.

    Attributes
    ----------
    num_blocks, block_size : the pool, in blocks and in positions a block.
    windows : for each group of layers how many positions a query sees, its own the last; None if all before it.
    references : [num_blocks], how many tables name each block. To be read only.
    prefixes : PrefixIndex of the blocks whose content can be found. To be read only.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: SequenceOf[int | None] = (None,)):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and blocks need room: got {num_blocks} blocks of {block_size}")
        if not windows or any(type(window) is not int or window < 1 for window in windows if window is not None):
            raise ValueError(f"windows are {windows!r}; wanted one for each group of layers: 1 or more, or None")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed block is the next handed out
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently given back first
        self.prefixes = PrefixIndex(block_size, self.num_groups)

    @property
    def num_groups(self) -> int:
        """Groups of layers: blocks in a row of a table."""
        return len(self.windows)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and nothing is in."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, but whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: the free ones and, by eviction, the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that some block table names."""
        return self.num_blocks - self.num_available

    @property
    def cached(self) -> list[int]:
        """The cached blocks, in the order in which they would be evicted."""
        return list(self._cached)

    def rows_for(self, num_tokens: int) -> int:
        """How many rows of a table `num_tokens` positions fill, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions, of all layers."""
        return self.rows_for(num_tokens) * self.num_groups

    def row(self, position: int) -> range:
        """Where in a table the blocks of `position` stand."""
        start = position // self.block_size * self.num_groups
        return range(start, start + self.num_groups)

    def first_reached(self, position: int, window: int | None) -> int:
        """Which row of its table is the first that a query at `position` can reach, and whoever comes after it.

        It sees `window` positions, its own the last, or all up to its own. If that is one, and begins a block, no row
        before it is reached.
        """
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    # --- taking and giving back ---------------------------------------------------------------------------------

    def extend(self, block_table: list[int], num_tokens: int) -> list[int]:
        """Append blocks to `block_table` until it holds `num_tokens` positions; all of them or, if it cannot, none.

        Returns the blocks among them that were cached, and are now evicted.

        Raises
        ------
        MemoryError
            Fewer blocks are available than that takes; nothing has changed.
        """
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > self.num_available:
            raise MemoryError(
                f"{num_tokens} tokens need {missing} more blocks of {self.block_size}, "
                f"but {self.num_available} of {self.num_blocks} are free"
            )
        evicted: list[int] = []
        for _ in range(missing):
            block_table.append(self._take(evicted))
        return evicted

    def shrink(self, block_table: list[int], num_tokens: int = 0) -> None:
        """Give back the blocks at the end of `block_table` that `num_tokens` positions do not need, last to first.

        Raises
        ------
        ValueError
            A block is not held: freed twice, or never handed out.
        """
        for _ in range(len(block_table) - self.blocks_for(num_tokens)):
            if (block := block_table.pop()) != GIVEN_BACK:
                self._give_back(block)

    def give_back_behind(self, block_table: list[int], position: int) -> None:
        """Give back what no query at `position`, nor any after it, reaches: each group's blocks last to first."""
        for group, window in enumerate(self.windows):
            for row in range(self.first_reached(position, window) - 1, -1, -1):
                place = row * self.num_groups + group
                if block_table[place] == GIVEN_BACK:
                    break
                self._give_back(block_table[place])
                block_table[place] = GIVEN_BACK

    def share(self, blocks: SequenceOf[int]) -> list[int]:
        """A new block table that names the same blocks: of a prefix that was found, or of a sequence that parts."""
        for block in held(blocks):
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1
        return list(blocks)

    def is_shared(self, block: int) -> bool:
        """Whether more than one table names the block, so that nobody may write into it."""
        return self.references[block] > 1

    def own(self, block_table: list[int], index: int) -> tuple[int, list[int]]:
        """Put a block of its own into `block_table[index]`, for a shared one about to be written: copy-on-write.

        Returns the block to copy from (the copy's target is now `block_table[index]`), and the blocks evicted for it.

        Raises
        ------
        MemoryError
            No block is available; nothing has changed.
        """
        if not self.num_available:
            raise MemoryError(f"a shared block is to be copied, but none of {self.num_blocks} is free")
        source, evicted = block_table[index], []
        block_table[index] = self._take(evicted)
        self._give_back(source)
        return source, evicted

    def _take(self, evicted: list[int]) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.prefixes.evict(block)
            evicted.append(block)
        self.references[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        if not self.references[block]:
            raise ValueError(f"block {block} is not held; it was freed twice or never handed out")
        self.references[block] -= 1
        if self.references[block]:
            return
        if block in self.prefixes:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- the prefix index ---------------------------------------------------------------------------------------

    def find(self, token_ids: SequenceOf[int]) -> tuple[list[int], Node]:
        """The longest known beginning of `token_ids` that can be gone on from: its table, and its node in the index.

        It is of whole blocks, and all that a query behind it can reach are there. For those that none can, behind a
        window, the table says GIVEN_BACK: they may have been evicted. The blocks are not taken yet.
        """
        root, *nodes = self.prefixes.follow(token_ids)
        length = row = len(nodes)
        first_rows = self._first_rows(length)
        while row > min(first_rows):  # from the end on: whoever misses a block can only go on in its place
            row -= 1
            if any(block is None and row >= first for block, first in zip(nodes[row].blocks, first_rows, strict=True)):
                length, first_rows = row, self._first_rows(row)
        table = [
            GIVEN_BACK if row < first else block
            for row, node in enumerate(nodes[:length])
            for block, first in zip(node.blocks, first_rows, strict=True)
        ]
        return table, nodes[length - 1] if length else root

    def _first_rows(self, num_rows: int) -> list[int]:
        """By group the first row that a query behind `num_rows` full ones can reach."""
        return [self.first_reached(num_rows * self.block_size, window) for window in self.windows]

    def publish(self, block_table: list[int], row: int, token_ids: SequenceOf[int], parent: Node | None) -> Node | None:
        """Let others find a row of the table, which is full of computed `token_ids`, the tokens of its positions.

        If other blocks are known to hold the same, the table names those from now on, and its own are given back.

        Parameters
        ----------
        parent : the node of the row before, as `find` or `publish` gave it; of a first row the root.

        Returns
        -------
        The row's node; None if nobody can find it, for the index was emptied since its text began.
        """
        places = self.row(row * self.block_size)
        node = self.prefixes.add(parent, token_ids, [block_table[place] for place in places])
        if node is None:
            return None
        for place, known in zip(places, node.blocks, strict=True):
            if known != (block := block_table[place]):
                (block_table[place],) = self.share([known])
                self._give_back(block)
        return node

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index. Blocks that are held stay held; those that were cached are free."""
        self.prefixes.reset()
        self._free.extend(self._cached)
        self._cached.clear()

    def __repr__(self):
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        return f"BlockAllocator({self.num_held} of {self.num_blocks} blocks of {self.block_size} held{cached})"
