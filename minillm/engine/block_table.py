"""BlockTable: which blocks of the KV cache hold one sequence's keys and values. Integers only.

The KV cache hands out memory in blocks of `block_size` positions (Kwon et al. 2023, PagedAttention). A block table
lists a sequence's blocks in the order of its positions, so the blocks themselves can be anywhere in the pool:

    positions     0 1 2 3   4 5 6 7   8 9 . .          block_size 4, 10 positions so far
    table         [   3   ,     0   ,     7   ]
    position 6    block 0, offset 2

In a model with sliding windows, some layers read only the last `window` positions and others read all of them (in Gemma
3 270M, three of 18). The layers therefore form *KV-cache groups*: the layers of a group have the same window and share
a block table. (Layers with the same window can be in several groups, so that all groups are about equally large.) A
sequence has one table per group, all of the same length. A group with a window frees each block as soon as no later
query can read it; its table keeps its length, with FREED in place of the block:

    group 0, window 8     [FREED, 4, 6, 9]             13 positions so far
    group 1, no window    [2, 5, 8, 1]

vLLM keeps one table per KV-cache group as well.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minillm.reprs import format_block_table

FREED = -1  # in a block table, in place of a block that the sequence has freed; `batch.NO_BLOCK` is the same number


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence in one KV-cache group.

    Attributes
    ----------
    block_size : positions per block.
    window : positions that a query of this group can read, counting its own; None if it reads all earlier ones.
    blocks : block numbers in the order of positions; FREED where the block has been freed.
    """

    block_size: int
    window: int | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Positions that the table covers."""
        return len(self.blocks) * self.block_size

    @property
    def live_blocks(self) -> list[int]:
        """The blocks that have not been freed."""
        return live_blocks(self.blocks)

    def append(self, block: int) -> None:
        """Add a block for the next `block_size` positions."""
        self.blocks.append(block)

    def index_of(self, position: int) -> int:
        """Return the index in `blocks` of the block that holds `position`."""
        return position // self.block_size

    def slots(self, positions: range) -> list[int]:
        """Return the slot of each position, `block * block_size + offset`: where its key and value are stored."""
        return [
            self.blocks[position // self.block_size] * self.block_size + position % self.block_size
            for position in positions
        ]

    def first_readable(self, position: int) -> int:
        """Return the index of the first block that a query at `position`, or at any later one, can read."""
        return first_readable_block(position, self.window, self.block_size)

    def free_before(self, position: int) -> list[int]:
        """Drop the blocks that no query at `position` or later can read.

        Returns
        -------
        The dropped blocks, last to first. The caller returns them to the pool.
        """
        dropped: list[int] = []
        for index in range(min(self.first_readable(position), len(self.blocks)) - 1, -1, -1):
            if self.blocks[index] == FREED:
                break  # all blocks before it have been freed too
            dropped.append(self.blocks[index])
            self.blocks[index] = FREED
        return dropped

    def copy(self) -> BlockTable:
        """Return a table with the same blocks. The caller counts the new references."""
        return BlockTable(self.block_size, self.window, list(self.blocks))

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"BlockTable({format_block_table(self.blocks)}; {self.block_size} positions each{window})"


def first_readable_block(position: int, window: int | None, block_size: int) -> int:
    """Return the index of the first block that a query at `position`, or at any later one, can read."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of one KV-cache group `num_tokens` positions fill, counting a partly filled last one."""
    return -(-num_tokens // block_size)


def live_blocks(blocks: SequenceOf[int]) -> list[int]:
    """Return the blocks of a table that have not been freed."""
    return [block for block in blocks if block != FREED]
