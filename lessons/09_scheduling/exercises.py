"""The exercises of lesson 9. Run `pytest lessons/09_scheduling` to test your solutions.

The first two functions are methods of `minillm.engine.scheduler.Scheduler`.
"""

from collections.abc import Sequence as SequenceOf

from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan

ANSWERS = {
    "_schedule_chunk": "minillm.engine.scheduler.Scheduler._schedule_chunk",
    "_ensure_blocks": "minillm.engine.scheduler.Scheduler._ensure_blocks",
    "percentile": "minillm.trace.percentile",
}


def _schedule_chunk(self: Scheduler, sequence: Sequence, plan: StepPlan) -> None:
    """Schedule the next chunk of a prompt: as many of its remaining tokens as the step's budget allows.

    `sequence.num_computed` tokens have been computed, and the sequence is in prefill up to `sequence.prefill_end`. The
    plan holds `plan.num_tokens` tokens so far and may hold `self.max_batch_tokens`.

    First get blocks for the chunk's n tokens with `self._ensure_blocks(sequence, n, plan)`. If this returns False, the
    sequence has lost its blocks: schedule nothing. Otherwise call `plan.add_chunk(sequence, n)`. Never add an empty
    chunk.
    """
    raise NotImplementedError("your turn")


def _ensure_blocks(self: Scheduler, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
    """Give `sequence` blocks of its own for its next `num_tokens` positions, preempting later sequences if needed.

    The positions begin at `start = sequence.num_computed`; a decode needs one position. With `blocks = self.blocks` and
    `tables = sequence.block_tables` (one per KV-cache group, see lesson 8), repeat until the sequence has its blocks:

    1. If the tables are too short, they lack `blocks.num_missing(tables, start + num_tokens)` blocks.
       `blocks.allocate(tables, start + num_tokens)` appends them and returns the evicted blocks.
    2. If the tables are long enough, the block at `index = start // blocks.block_size` of a table may be shared: see
       `blocks.is_shared(block)`. Then `blocks.copy_on_write(table, index)` replaces it, and returns the block to copy
       from and the evicted blocks. Append `BlockCopy(source, target)` to `plan.copies`.
    3. If step 1 or 2 needs more blocks than `blocks.num_available`, preempt the sequence admitted last,
       `self.running[-1]`: append `Preemption(victim.request_id, victim.completion, victim.num_computed)` to
       `plan.preempted`, remove its chunk with `plan.withdraw(victim)`, and call `self._preempt(victim)`, which frees
       its blocks and returns it to the queue. Then check again: the victim's blocks may be shared, in which case
       preempting it makes no block available.

    Add all evicted blocks to `plan.evicted`. Import `BlockCopy` and `Preemption` from `minillm.trace`.

    Returns
    -------
    Whether the sequence still runs: False if it had to be preempted itself.
    """
    raise NotImplementedError("your turn")


def percentile(values: SequenceOf[float], percent: float) -> float | None:
    """Return the value that `percent` (0 to 100) of `values` do not exceed; None if there are no values.

    In sorted order, the first value is the 0th percentile, the last is the 100th, and the others are evenly spaced in
    between. Interpolate linearly between neighbours: `percentile([30, 10], 25)` is 15.0. Do not change `values`.
    """
    raise NotImplementedError("your turn")
