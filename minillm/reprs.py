"""Short texts for long lists, so that a repr fits on one line of a debugger."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice

MAX_SHOWN = 8  # items listed before the rest is counted


def abbreviated(items: Iterable[object], separator: str = " ") -> str:
    """Return the first MAX_SHOWN items joined by `separator`, and the number of the remaining ones."""
    items = iter(items)
    shown, num_more = [str(item) for item in islice(items, MAX_SHOWN)], sum(1 for _ in items)
    return separator.join([*shown, f"and {num_more} more"] if num_more else shown)


def format_block_table(blocks: SequenceOf[int]) -> str:
    """Return a block table as text: the number of freed blocks (negative entries) and the first few live ones."""
    live = [block for block in blocks if block >= 0]
    num_freed = len(blocks) - len(live)
    if not num_freed:
        return abbreviated(live)
    return f"{num_freed} freed{'; ' if live else ''}{abbreviated(live)}"


def format_block_tables(tables: SequenceOf[SequenceOf[int]]) -> str:
    """Return the block tables of a sequence as text, one per KV-cache group."""
    return " | ".join(map(format_block_table, tables))


def sequence_name(request_id: str, completion: int) -> str:
    """Return a sequence's name: the id of its request, and the completion's number unless that is 0."""
    return f"{request_id}.{completion}" if completion else request_id
