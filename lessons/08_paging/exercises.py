"""Lesson 8's exercises. `pytest lessons/08_paging` tells you whether they are right.

`extend` and `own` are methods of `minillm.engine.block_allocator.BlockAllocator`, so `self` is one. Its own small helpers can be used:

self.block_size, self.num_available: positions in a block; blocks that can be handed out.
self.blocks_for(num_tokens): how many blocks hold so many positions.
self._take(evicted): hand a block out, with one owner; if it was cached, it is appended to the list `evicted`.
self._give_back(block): one owner fewer.
"""

from collections.abc import Sequence

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.prefix_index import Node, PrefixIndex

ANSWERS = {
    "extend": "minillm.engine.block_allocator.BlockAllocator.extend",
    "follow": "minillm.engine.prefix_index.PrefixIndex.follow",
    "own": "minillm.engine.block_allocator.BlockAllocator.own",
}


def extend(self: BlockAllocator, block_table: list[int], num_tokens: int) -> list[int]:
    """Append blocks to `block_table` until it holds `num_tokens` positions; return those that were evicted for it.

    If fewer are available than that takes, MemoryError, and nothing has changed. A table that is long enough stays as
    it is.
    """
    raise NotImplementedError("your turn")


def follow(self: PrefixIndex, token_ids: Sequence[int]) -> list[Node]:
    """The nodes on the way down the tree that `token_ids` spell, as far as it is known; the root first.

    `self.root` is the node of no tokens at all. `node.children` is a dict: its keys are tuples of `self.block_size`
    tokens, those of one block, and its values are the nodes behind this one. Only whole blocks can be found.
    """
    raise NotImplementedError("your turn")


def own(self: BlockAllocator, block_table: list[int], index: int) -> tuple[int, list[int]]:
    """Put a block of its own into `block_table[index]`, in place of a shared one.

    Returns the shared block, from which its content must be copied, and the list of blocks evicted for the new one. The
    shared block has one owner fewer. If no block is available, MemoryError, and nothing has changed.
    """
    raise NotImplementedError("your turn")
