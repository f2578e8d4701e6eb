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

Where every layer of a model sees only a window, a sequence gives the blocks behind it back while it runs: no query
reaches them any more. Its table keeps its length, and names GIVEN_BACK in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from minillm.prefix_index import Node, PrefixIndex

GIVEN_BACK = -1  # stands in a block table for a block that the table has given back, as for all before it


def held(block_table: SequenceOf[int]) -> list[int]:
    """The blocks that a table names, without those that it has given back."""
    return [block for block in block_table if block != GIVEN_BACK]


class BlockAllocator:
    """Hands out the numbers 0 to `num_blocks - 1`, counts who holds them, and finds those whose content is known.

    Attributes
    ----------
    num_blocks, block_size : the pool, in blocks and in positions a block.
    references : [num_blocks], how many tables name each block. To be read only.
    prefixes : PrefixIndex of the blocks whose content can be found. To be read only.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and blocks need room: got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed block is the next handed out
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently given back first
        self.prefixes = PrefixIndex(block_size)

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

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def first_reached(self, position: int, window: int | None) -> int:
        """Which block of its table is the first that a query at `position` can reach, and whoever comes after it.

        It sees `window` positions, its own the last, or all up to its own. If that is one, and begins a block, no block
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

    def give_back_before(self, block_table: list[int], index: int) -> None:
        """Give back the blocks before `block_table[index]`, which no query will reach any more, last to first."""
        for place in range(index - 1, -1, -1):
            if block_table[place] == GIVEN_BACK:
                return
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

    def find(self, token_ids: SequenceOf[int], window: int | None = None) -> tuple[list[int], Node]:
        """The longest known beginning of `token_ids` that can be gone on from: its table, and its node in the index.

        It is of whole blocks, and all that a query behind it can reach are there. For those that none can, with a
        `window`, the table says GIVEN_BACK: they may have been evicted. The blocks are not taken yet.
        """
        nodes, length, unbroken = self.prefixes.follow(token_ids), 0, 0
        for number, node in enumerate(nodes[1:], start=1):
            unbroken = 0 if node.block is None else unbroken + 1
            if unbroken >= number - self.first_reached(number * self.block_size, window):
                length = number
        first = self.first_reached(length * self.block_size, window)
        return [GIVEN_BACK] * first + [node.block for node in nodes[first + 1 : length + 1]], nodes[length]

    def publish(
        self, block_table: list[int], index: int, token_ids: SequenceOf[int], parent: Node | None
    ) -> Node | None:
        """Let others find block `index` of the table, which is full of computed `token_ids`, the tokens of that block.

        If another block is known to hold the same, the table names that one from now on, and its own is given back.

        Parameters
        ----------
        parent : the node of the block before, as `find` or `publish` gave it; of a first block the root.

        Returns
        -------
        The block's node; None if nobody can find it, for the index was emptied since its text began.
        """
        block = block_table[index]
        node = self.prefixes.add(parent, token_ids, block)
        if node is not None and node.block != block:
            (block_table[index],) = self.share([node.block])
            self._give_back(block)
        return node

    def forget(self) -> None:
        """Empty the prefix index. Blocks that are held stay held; those that were cached are free."""
        self.prefixes.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def __repr__(self):
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        return f"BlockAllocator({self.num_held} of {self.num_blocks} blocks of {self.block_size} held{cached})"
