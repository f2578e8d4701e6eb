"""Long lists in a line that a debugger shows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice

from minillm.engine.block_allocator import held

MOST = 8  # items that are named


def few(items: Iterable[object], separator: str = " ") -> str:
    """The first MOST items with `separator` between them, and how many more there are."""
    items = iter(items)
    named, more = [str(item) for item in islice(items, MOST)], sum(1 for _ in items)
    return separator.join([*named, f"and {more} more"] if more else named)


def few_blocks(block_table: SequenceOf[int]) -> str:
    """A block table: how many of its blocks it has given back, and the first few of those that it holds."""
    blocks = held(block_table)
    gone = len(block_table) - len(blocks)
    return f"{gone} given back{'; ' if blocks else ''}{few(blocks)}" if gone else few(blocks)
