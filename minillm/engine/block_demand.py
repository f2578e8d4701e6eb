"""How many blocks a sequence needs, now and at most: the arithmetic behind admission and request checks.

A group without a window keeps every block until the sequence ends. A group with a window frees its oldest blocks while
it takes new ones. It never holds more than the window and one step's tokens cover, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.block_table import BlockTable, num_blocks_for
from minillm.engine.sequence import Sequence
from minillm.errors import RequestError


def max_live_blocks(num_positions: int, max_batch_tokens: int, block_size: int, windows: SequenceOf[int | None]) -> int:
    """Return the maximum number of blocks, over all groups, that a sequence holds while it grows to `num_positions`.

    Parameters
    ----------
    num_positions : positions of the whole sequence.
    max_batch_tokens : maximum number of tokens that one step computes.
    block_size : positions per block.
    windows : the window of each KV-cache group; None where there is none.
    """
    num_blocks = num_blocks_for(num_positions, block_size)
    return sum(
        num_blocks if window is None else min(num_blocks, max_window_blocks(window, max_batch_tokens, block_size))
        for window in windows
    )


def max_window_blocks(window: int, max_batch_tokens: int, block_size: int) -> int:
    """Return the maximum number of blocks that a sequence of any length holds in a group with this window."""
    at_once = window - 1 + max_batch_tokens  # positions that a step's first query reads, and those the step adds
    return num_blocks_for(at_once - 1, block_size) + 1  # n consecutive positions are in at most this many blocks


def blocks_needed(
    tables: SequenceOf[BlockTable], num_tokens: int, max_batch_tokens: int, allocator: BlockAllocator
) -> int:
    """Return how many more blocks a sequence needs, at most, until its tables cover `num_tokens` positions."""
    missing = allocator.num_missing(tables, num_tokens)
    if not missing:  # the usual case in decode: live blocks need not be counted
        return 0
    held = sum(len(table.live_blocks) for table in tables)
    most = max_live_blocks(num_tokens, max_batch_tokens, allocator.block_size, allocator.windows)
    return max(0, min(missing, most - held))


def frees_behind_windows(num_positions: int, max_batch_tokens: int, allocator: BlockAllocator) -> bool:
    """Return whether a sequence that grows to this length frees some of its blocks, behind its windows, on the way."""
    num_blocks = num_blocks_for(num_positions, allocator.block_size) * allocator.num_groups
    return max_live_blocks(num_positions, max_batch_tokens, allocator.block_size, allocator.windows) < num_blocks


def check_demand(sequence: Sequence, max_batch_tokens: int, allocator: BlockAllocator) -> None:
    """Check that the pool has enough blocks for a new request that is served alone.

    Raises
    ------
    RequestError
        The request needs more blocks than the pool has.
    """
    positions, size = sequence.max_positions, allocator.block_size
    needed = max_live_blocks(positions, max_batch_tokens, size, allocator.windows)
    if needed <= allocator.num_blocks:
        return
    at_once, remedy = "", "shorten one"
    if frees_behind_windows(positions, max_batch_tokens, allocator):
        window = max(filter(None, allocator.windows))
        at_once = f" at once, with a window of {window} and max_batch_tokens of {max_batch_tokens}"
        if None not in allocator.windows:  # then a text of any length fits if a step is small enough
            remedy = "lower max_batch_tokens"
    raise RequestError(
        f"a prompt of {sequence.num_prompt_tokens} tokens and max_tokens of {sequence.max_tokens} can fill "
        f"{positions} positions, which takes {needed} blocks of {size}{at_once}, but the pool has "
        f"{allocator.num_blocks}: {remedy}, or give the engine more num_blocks"
    )
