"""Lesson 8's exercises. `pytest lessons/08_paging` tells you whether they are right.

Each is a method of `minillm.blocks.BlockAllocator`, so `self` is one. Its own small helpers are there to be used:

self.block_size, self.num_available: positions in a block; blocks that can be handed out.
self.blocks_for(num_tokens): how many blocks hold so many positions.
self._take(evicted): hand a block out, with one owner; if it was cached, it is appended to the list `evicted`.
self._give_back(block): one owner fewer.
"""

from collections.abc import Sequence

from minillm.blocks import BlockAllocator

ANSWERS = {
    "extend": "minillm.blocks.BlockAllocator.extend",
    "find": "minillm.blocks.BlockAllocator.find",
    "own": "minillm.blocks.BlockAllocator.own",
}


def extend(self: BlockAllocator, block_table: list[int], num_tokens: int) -> list[int]:
    """Append blocks to `block_table` until it holds `num_tokens` positions; return those that were evicted for it.

    If fewer are available than that takes, MemoryError, and nothing has changed. A table that is long enough stays as
    it is.
    """
    raise NotImplementedError("your turn")


def find(self: BlockAllocator, token_ids: Sequence[int]) -> list[int]:
    """The blocks that hold the longest known beginning of `token_ids`, in order. Nothing is taken or changed.

    `self._index` is a dict: its keys are pairs of the block before (-1 for a first one) and a tuple of the
    `self.block_size` tokens in the block; its values are blocks. Only whole blocks can be found.
    """
    raise NotImplementedError("your turn")


def own(self: BlockAllocator, block_table: list[int], index: int) -> tuple[int, list[int]]:
    """Put a block of its own into `block_table[index]`, in place of a shared one.

    Returns the shared block, from which its content must be copied, and the list of blocks evicted for the new one. The
    shared block has one owner fewer. If no block is available, MemoryError, and nothing has changed.
    """
    raise NotImplementedError("your turn")
