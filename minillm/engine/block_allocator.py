"""BlockAllocator: which blocks of the KV cache are free, shared or cached. Integers only.

Several block tables can list the same block if their sequences share a prefix. The allocator therefore counts the
tables that list each block. A block is always in one of three states:

    held     listed by at least one table
    cached   listed by none, but the prefix index still finds its content; it can be reused, or evicted
    free     listed by none, and empty

The prefix index (`prefix_index.py`) finds blocks by their content. The least recently freed cached block is evicted
first. All KV-cache groups (`block_table.py`) draw from the same pool, because their blocks have the same size. A
sequence has one block table per group; the methods below change all of its tables together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from minillm.engine.block_table import FREED, BlockTable, first_readable_block, num_blocks_for
from minillm.engine.prefix_index import Node, PrefixIndex


class BlockAllocator:
    """Hand out blocks 0 to `num_blocks - 1`, count the references to each, and find blocks by content.

    Parameters
    ----------
    num_blocks : size of the pool, in blocks.
    block_size : positions per block.
    windows : for each KV-cache group, the number of positions a query reads, counting its own; None for all of them.

    Attributes
    ----------
    references : [num_blocks], the number of tables that list each block. Read-only for callers.
    prefixes : PrefixIndex of the blocks that can be found by content. Read-only for callers.

    Raises
    ------
    ValueError
        There is no block, a block has no position, or the windows are not positive integers.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: SequenceOf[int | None] = (None,)):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of at least one position: got {num_blocks} blocks of {block_size}"
            )
        if not windows or any(type(window) is not int or window < 1 for window in windows if window is not None):
            raise ValueError(f"windows are {windows!r}; expected one per KV-cache group, each 1 or more, or None")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.prefixes = PrefixIndex(block_size, self.num_groups)
        self.reset()

    def reset(self) -> None:
        """Free all blocks and empty the prefix index. The caller discards all block tables."""
        self.references = [0] * self.num_blocks
        self.prefixes.reset()
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: the block freed last is handed out next
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first

    # --- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        """KV-cache groups: block tables per sequence."""
        return len(self.windows)

    @property
    def num_free(self) -> int:
        """Blocks that no table lists and that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no table lists but whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: the free ones and, by eviction, the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that at least one table lists."""
        return self.num_blocks - self.num_available

    @property
    def cached(self) -> list[int]:
        """The cached blocks, in the order in which they would be evicted."""
        return list(self._cached)

    # --- block tables -------------------------------------------------------------------------------------------

    def new_tables(self) -> list[BlockTable]:
        """Return empty block tables for a sequence, one per KV-cache group."""
        return [BlockTable(self.block_size, window) for window in self.windows]

    def num_missing(self, tables: SequenceOf[BlockTable], num_tokens: int) -> int:
        """Return how many blocks must be added to the tables to cover `num_tokens` positions in every group."""
        return sum(max(0, num_blocks_for(num_tokens, self.block_size) - len(table.blocks)) for table in tables)

    def allocate(self, tables: SequenceOf[BlockTable], num_tokens: int) -> list[int]:
        """Append blocks to every table until it covers `num_tokens` positions. If the pool is too small, append none.

        Returns
        -------
        The cached blocks that were evicted to make room.

        Raises
        ------
        MemoryError
            Fewer blocks are available than needed; nothing has changed.
        """
        missing = self.num_missing(tables, num_tokens)
        if missing > self.num_available:
            raise MemoryError(
                f"{num_tokens} tokens need {missing} more blocks of {self.block_size}, "
                f"but {self.num_available} of {self.num_blocks} are free"
            )
        evicted: list[int] = []
        for index in range(num_blocks_for(num_tokens, self.block_size)):
            for table in tables:
                if index == len(table.blocks):
                    table.append(self._take(evicted))
        return evicted

    def free(self, tables: SequenceOf[BlockTable]) -> None:
        """Free all blocks of a sequence, last to first, and empty its tables.

        Raises
        ------
        ValueError
            A block is not held: it was freed twice, or never handed out.
        """
        while any(table.blocks for table in tables):
            for table in reversed(tables):
                if (block := table.blocks.pop()) != FREED:
                    self._drop_block_reference(block)

    def free_before(self, tables: SequenceOf[BlockTable], position: int) -> None:
        """Free the blocks that no query at `position` or later can read, in each group with a window."""
        for table in tables:
            for block in table.free_before(position):
                self._drop_block_reference(block)

    def add_reference(self, tables: SequenceOf[BlockTable]) -> list[BlockTable]:
        """Return new tables that list the same blocks: for a prefix that was found, or for a fork of a sequence."""
        for table in tables:
            for block in table.live_blocks:
                self._add_block_reference(block)
        return [table.copy() for table in tables]

    def is_shared(self, block: int) -> bool:
        """Return whether more than one table lists the block, so that none of their sequences may write to it."""
        return self.references[block] > 1

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, list[int]]:
        """Replace the shared block at `table.blocks[index]`, which is about to be written, by a new one.

        Returns
        -------
        source : the shared block. The caller copies its content to `table.blocks[index]`.
        evicted : the cached blocks that were evicted to make room.

        Raises
        ------
        MemoryError
            No block is available; nothing has changed.
        """
        if not self.num_available:
            raise MemoryError(f"a shared block must be copied before it is written, but all {self.num_blocks} are held")
        source = table.blocks[index]
        evicted: list[int] = []
        table.blocks[index] = self._take(evicted)
        self._drop_block_reference(source)
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

    def _add_block_reference(self, block: int) -> None:
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def _drop_block_reference(self, block: int) -> None:
        if not self.references[block]:
            raise ValueError(f"block {block} is not held; it was freed twice or never handed out")
        self.references[block] -= 1
        if self.references[block]:
            return
        if block in self.prefixes:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- prefix caching -----------------------------------------------------------------------------------------

    def match_prefix(self, token_ids: SequenceOf[int]) -> tuple[list[BlockTable], Node]:
        """Find the longest prefix of `token_ids`, in whole blocks, whose keys and values are in the cache.

        A prefix counts only if every block that a later query can read is present. Blocks behind a window may have
        been evicted; the tables hold FREED in their places.

        Returns
        -------
        tables : one per KV-cache group. They are not references yet: see `add_reference`.
        node : the last block's node in the prefix index, or the root if nothing was found.
        """
        root, *nodes = self.prefixes.follow(token_ids)
        length = index = len(nodes)
        readable_from = self._first_readable(length)  # one index per group
        # Walk back over the readable blocks. Where one is missing, the prefix must end before it; a query after that
        # shorter prefix reads earlier blocks, so the walk has further to go.
        while index > min(readable_from):
            index -= 1
            blocks = zip(nodes[index].blocks, readable_from, strict=True)
            if any(block is None and index >= first for block, first in blocks):
                length, readable_from = index, self._first_readable(index)
        tables = self.new_tables()
        for group, (table, start) in enumerate(zip(tables, readable_from, strict=True)):
            for index, node in enumerate(nodes[:length]):
                block = node.blocks[group]
                table.append(FREED if index < start or block is None else block)
        return tables, nodes[length - 1] if length else root

    def _first_readable(self, num_blocks: int) -> list[int]:
        """For each group, the index of the first block that a query after `num_blocks` full blocks can read."""
        position = num_blocks * self.block_size
        return [first_readable_block(position, window, self.block_size) for window in self.windows]

    def publish(
        self, tables: SequenceOf[BlockTable], index: int, token_ids: SequenceOf[int], parent: Node | None
    ) -> Node | None:
        """Add the full blocks at `index` of each table to the prefix index.

        If the index already lists other blocks with the same content, the tables switch to those and free their own.

        Parameters
        ----------
        token_ids : the `block_size` tokens whose keys and values the blocks hold.
        parent : node of the preceding block, from `match_prefix` or `publish`; the root for a first block.

        Returns
        -------
        The node of these blocks, or None if they cannot be found because the index was reset after the text began.
        """
        node = self.prefixes.add(parent, token_ids, [table.blocks[index] for table in tables])
        if node is None:
            return None
        for table, known in zip(tables, node.blocks, strict=True):
            block = table.blocks[index]
            if known is not None and known != block:
                self._add_block_reference(known)
                table.blocks[index] = known
                self._drop_block_reference(block)
        return node

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index. Held blocks stay held; cached blocks become free."""
        self.prefixes.reset()
        self._free.extend(self._cached)
        self._cached.clear()

    def __repr__(self) -> str:
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        return f"BlockAllocator({self.num_held} of {self.num_blocks} blocks of {self.block_size} held{cached})"
