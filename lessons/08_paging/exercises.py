"""The exercises of lesson 8. Run `pytest lessons/08_paging` to test your solutions.

`allocate` and `copy_on_write` are methods of `minillm.engine.block_allocator.BlockAllocator`. They can use:

self.block_size, self.num_available : positions per block, and number of blocks that can be handed out.
self.num_missing(tables, num_tokens) : how many blocks the tables lack to cover `num_tokens` positions.
self._take(evicted) : hand out a block with one reference; if the block was cached, append it to the list `evicted`.
self._drop_block_reference(block) : remove one reference from a block, and free the block if none is left.

A `BlockTable` has the list `blocks` and the method `append(block)`.
"""

from collections.abc import Sequence

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.block_table import BlockTable
from minillm.engine.prefix_index import Node, PrefixIndex

ANSWERS = {
    "allocate": "minillm.engine.block_allocator.BlockAllocator.allocate",
    "follow": "minillm.engine.prefix_index.PrefixIndex.follow",
    "copy_on_write": "minillm.engine.block_allocator.BlockAllocator.copy_on_write",
}


def allocate(self: BlockAllocator, tables: Sequence[BlockTable], num_tokens: int) -> list[int]:
    """Append blocks to every table until it covers `num_tokens` positions.

    `tables` has one table per KV-cache group, all of the same length. Leave tables that are long enough unchanged. If
    fewer blocks are available than all tables need together, raise MemoryError and change nothing.

    Returns
    -------
    The cached blocks that were evicted to make room, in the order of eviction.
    """
    raise NotImplementedError("your turn")


def follow(self: PrefixIndex, token_ids: Sequence[int]) -> list[Node]:
    """Return the longest path through the tree that matches `token_ids`: the root, then one node per whole block.

    `self.root` is the node of the empty prefix. `node.children` is a dict from the next block's tokens, as a tuple of
    `self.block_size` ids, to the child node. Only whole blocks can be found.
    """
    raise NotImplementedError("your turn")


def copy_on_write(self: BlockAllocator, table: BlockTable, index: int) -> tuple[int, list[int]]:
    """Replace the shared block at `table.blocks[index]` by a new block, and remove one reference from the shared one.

    If no block is available, raise MemoryError and change nothing.

    Returns
    -------
    source : the shared block, whose content the caller will copy.
    evicted : the cached blocks that were evicted to make room.
    """
    raise NotImplementedError("your turn")
