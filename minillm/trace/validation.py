"""Consistency checks for traces that are read from a file, beyond the types of their fields.

A step must continue the one before it, and its block pool must agree with its block tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from math import isfinite

from minillm.errors import TraceError
from minillm.trace.events import DECODE, PREFILL
from minillm.trace.records import FREED, STAGES, RunFacts, StepRecord

Check = Callable[[bool, str], None]


def check_facts(facts: RunFacts, location: str) -> None:
    """Check that the numbers of a header are in range.

    Raises
    ------
    TraceError
        A number is out of range; the message names it.
    """
    if not facts.windows or any(window is not None and window < 1 for window in facts.windows):
        raise TraceError(
            f"{location}, windows is {facts.windows}; expected one per KV-cache group, each 1 or more, or null"
        )
    for name in ("block_size", "num_blocks", "max_batch_tokens", "max_sequences"):
        if getattr(facts, name) < 1:
            raise TraceError(f"{location}, {name} is {getattr(facts, name)}; expected 1 or more")
    for name, cost in vars(facts.costs).items() if facts.costs else ():
        if cost < 0:
            raise TraceError(f"{location}, costs, {name} is {cost}; expected 0 or more")


def check_step(record: StepRecord, previous: StepRecord | None, facts: RunFacts, location: str) -> None:
    """Check that a step is consistent in itself, with the previous step and with the header.

    Raises
    ------
    TraceError
        The step is inconsistent; the message describes the contradiction.
    """
    check = partial(_check, location)
    if previous:
        check(record.step == previous.step + 1, f"step {record.step} follows step {previous.step}")
        check(record.time >= previous.time, f"time {record.time} is before {previous.time}, that of the previous step")
    check(record.time >= 0, f"time {record.time} is negative")
    for arrival in record.arrived:
        check(arrival.time >= 0, f"the arrival time {arrival.time} of request {arrival.request_id!r} is negative")
        check(
            arrival.time <= record.time,
            f"request {arrival.request_id!r} arrived at {arrival.time}, after the step began at {record.time}",
        )
    check(min(record.milliseconds.values(), default=0) >= 0, f"a duration is negative: {record.milliseconds}")
    check(isfinite(record.end), f"time {record.time} plus milliseconds {record.milliseconds} is not finite")
    _check_blocks(record, facts, check)
    num_named = len(record.waiting)
    check(
        record.num_waiting >= num_named,
        f"{num_named} waiting sequences are named, but num_waiting is {record.num_waiting}",
    )
    stages = set(record.milliseconds)
    check(stages == set(STAGES), f"milliseconds has the keys {sorted(stages)}; expected {', '.join(STAGES)}")
    for chunk in record.chunks:
        check(chunk.phase in (PREFILL, DECODE), f"phase is {chunk.phase!r}; expected {PREFILL!r} or {DECODE!r}")
        check(chunk.start >= 0, f"a chunk starts at position {chunk.start}")
        check(chunk.num_tokens > 0, f"the chunk of request {chunk.request_id!r} is empty")


def _check_blocks(record: StepRecord, facts: RunFacts, check: Check) -> None:
    """Check that all block numbers exist, and that the reference counts agree with the running sequences' tables."""
    pool, num_blocks, num_groups = record.pool, facts.num_blocks, facts.num_groups
    check(pool.num_blocks == num_blocks, f"the pool has {pool.num_blocks} blocks, but the header has {num_blocks}")
    in_chunks = [_live_blocks(chunk.block_tables, num_groups, check) for chunk in record.chunks]
    in_tables = [_live_blocks(sequence.block_tables, num_groups, check) for sequence in record.running]
    held = set().union(*in_tables)
    copied = [block for copy in pool.copies for block in (copy.source, copy.target)]
    non_empty = [*filter(None, [held, *in_chunks, pool.cached, pool.evicted, copied]), [0]]
    lowest, highest = min(map(min, non_empty)), max(map(max, non_empty))
    exist = lowest >= 0 and highest < num_blocks
    check(exist, f"there is no block {highest if lowest >= 0 else lowest}; expected 0 to {num_blocks - 1}")
    check(min(pool.references) >= 0, "a reference count is negative")
    # These cheap conditions find most errors; counting each block takes longer.
    all_referenced = len(held) == pool.num_held and all(map(pool.references.__getitem__, held))
    if not all_referenced or sum(map(len, in_tables)) != sum(pool.references):
        counts = Counter(chain.from_iterable(in_tables))
        block = next(block for block in range(num_blocks) if counts[block] != pool.references[block])
        check(False, f"block {block} has {pool.references[block]} references, but {counts[block]} block tables list it")
    check(not any(pool.references[block] for block in pool.cached), "a cached block is also held")


def _live_blocks(block_tables: list[list[int]], num_groups: int, check: Check) -> list[int]:
    """Return the live blocks of a sequence in all groups. In each table, freed blocks must precede them."""
    check(len(block_tables) == num_groups, f"{len(block_tables)} block tables, but {num_groups} KV-cache groups")
    lengths = sorted({len(table) for table in block_tables})
    check(len(lengths) == 1, f"the block tables of a sequence have different lengths: {lengths}")
    live: list[int] = []
    for table in block_tables:
        num_freed = table.count(FREED)
        if table[:num_freed].count(FREED) != num_freed:
            block = next(block for block in table if block != FREED)
            check(False, f"a block table lists block {block} before a freed one ({FREED}); freed blocks come first")
        live += table[num_freed:]
    return live


def _check(location: str, holds: bool, message: str) -> None:
    if not holds:
        raise TraceError(f"{location}: {message}")
