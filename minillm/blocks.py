"""BlockAllocator: which blocks of the KV cache are free, shared, or worth keeping, in integers only.

Memory is handed out in blocks of `block_size` positions, so that a sequence takes what it has filled, rounded up,
and the blocks of one sequence may lie anywhere (Kwon et al. 2023, PagedAttention). A sequence's *block table* lists
its blocks in order: position `p` lies in block `table[p // block_size]` at offset `p % block_size`.

Two tables may name the same block where their texts begin alike. So every block counts the tables that name it, and is

    held     some table names it
    cached   none does, but the prefix index still finds its content: it can be taken up again, or be evicted
    free     none does, and nothing is in it

The *prefix index* finds full blocks by content. A key depends on everything before it, so a block's content is its own
tokens and the block they follow, (parent, tokens): a chain of such pairs spells a whole prefix, and comparing them is
exact where a hash could be fooled. A block's number stands for its content safely because a child leaves the index
before its parent does: whoever holds a block holds all before it, gives them back last to first, and the least recently
given back is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

ROOT = -1  # the parent of a first block

Key = tuple[int, tuple[int, ...]]  # (parent block or ROOT, the block's tokens)


class BlockAllocator:
    """Hands out the numbers 0 to `num_blocks - 1`, counts who holds them, and finds those whose content is known.

    Attributes
    ----------
    num_blocks, block_size : the pool, in blocks and in positions a block.
    references : [num_blocks], how many tables name each block. To be read only.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and blocks need room: got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed block is the next handed out
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently given back first
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # the index, the other way round

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
            self._give_back(block_table.pop())

    def share(self, blocks: SequenceOf[int]) -> list[int]:
        """A new block table that names the same blocks: of a prefix that was found, or of a sequence that parts."""
        for block in blocks:
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
            del self._index[self._keys.pop(block)]
            evicted.append(block)
        self.references[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        if not self.references[block]:
            raise ValueError(f"block {block} is not held; it was freed twice or never handed out")
        self.references[block] -= 1
        if self.references[block]:
            return
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- the prefix index ---------------------------------------------------------------------------------------

    def find(self, token_ids: SequenceOf[int]) -> list[int]:
        """The blocks that hold the longest known beginning of `token_ids`, in whole blocks. They are not taken yet."""
        found: list[int] = []
        parent = ROOT
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = self._index.get((parent, tuple(token_ids[start : start + self.block_size])))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def publish(self, block_table: list[int], index: int, token_ids: SequenceOf[int]) -> None:
        """Let others find block `index` of the table, which is full of computed `token_ids`, the tokens of that block.

        If another block is known to hold the same, the table names that one from now on, and its own is given back.
        """
        parent, block = (block_table[index - 1] if index else ROOT), block_table[index]
        if parent != ROOT and parent not in self._keys:
            return  # the index was emptied in between: a chain must begin at its beginning
        key = (parent, tuple(token_ids))
        known = self._index.get(key, block)
        if known == block:
            self._keys[block], self._index[key] = key, block
        else:
            (block_table[index],) = self.share([known])
            self._give_back(block)

    def forget(self) -> None:
        """Empty the prefix index. Blocks that are held stay held; those that were cached are free."""
        self._index.clear()
        self._keys.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def __repr__(self):
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        return f"BlockAllocator({self.num_held} of {self.num_blocks} blocks of {self.block_size} held{cached})"
