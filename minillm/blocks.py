"""BlockAllocator: which blocks of the KV cache are free, in integers only.

Memory is handed out in blocks of `block_size` positions, so that a sequence takes what it has filled, rounded up,
and the blocks of one sequence may lie anywhere (Kwon et al. 2023, PagedAttention). A sequence's *block table* lists
its blocks in order: position `p` lies in block `table[p // block_size]` at offset `p % block_size`.
"""

from __future__ import annotations


class BlockAllocator:
    """Hands out the numbers 0 to `num_blocks - 1`, each to one holder at a time."""

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and blocks need room: got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed block is the next handed out
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that some block table names."""
        return len(self._held)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def extend(self, block_table: list[int], num_tokens: int) -> None:
        """Append blocks to `block_table` until it holds `num_tokens` positions; all of them or, if it cannot, none.

        Raises
        ------
        MemoryError
            Fewer blocks are free than that takes; nothing has changed.
        """
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > self.num_free:
            raise MemoryError(
                f"{num_tokens} tokens need {missing} more blocks of {self.block_size}, "
                f"but {self.num_free} of {self.num_blocks} are free"
            )
        for _ in range(missing):
            block = self._free.pop()
            self._held.add(block)
            block_table.append(block)

    def shrink(self, block_table: list[int], num_tokens: int = 0) -> None:
        """Give back the blocks at the end of `block_table` that `num_tokens` positions do not need.

        Raises
        ------
        ValueError
            A block is not held: freed twice, or never handed out.
        """
        while len(block_table) > self.blocks_for(num_tokens):
            block = block_table.pop()
            if block not in self._held:
                raise ValueError(f"block {block} is not held; it was freed twice or never handed out")
            self._held.remove(block)
            self._free.append(block)

    def __repr__(self):
        return f"BlockAllocator({self.num_held} of {self.num_blocks} blocks of {self.block_size} held)"
