"""Lesson 9's exercises. `pytest lessons/09_scheduling` tells you whether they are right.

The first two are methods of `minillm.engine.scheduler.Scheduler`, so `self` is one.
"""

from collections.abc import Sequence as SequenceOf

from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan

ANSWERS = {
    "_advance": "minillm.engine.scheduler.Scheduler._advance",
    "_make_room": "minillm.engine.scheduler.Scheduler._make_room",
    "percentile": "minillm.trace.percentile",
}


def _advance(self: Scheduler, sequence: Sequence, plan: StepPlan) -> None:
    """Add the next piece of a prompt to the plan: as much as is left of it, and as the step's budget allows.

    `sequence.num_computed` tokens have been computed, and it is in prefill up to `sequence.prefill_end`. The plan holds
    `plan.num_tokens` tokens so far, and may hold `self.max_batch_tokens`. `plan.advance(sequence, n, is_prefill=True)`
    adds a piece of n tokens; an empty one must not be added.
    """
    raise NotImplementedError("your turn")


def _make_room(self: Scheduler, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
    """See to it that `sequence` has blocks of its own for the positions it fills next; False if it had to go itself.

    They are `num_tokens` (1 for a decode) from `start = sequence.num_computed` on. Where the first of them lies,
    `blocks.row(start)` tells: at which places of the table `sequence.block_table`, where blocks is `self.blocks`. It is
    one place, or one for each group of layers (lesson 8). Three things can be the matter:

    The table is too short for them, and has not the `blocks.blocks_for(start + num_tokens)` that they take:
    `blocks.extend(table, start + num_tokens)`. Or it is long enough, but the block at one of those places
    `blocks.is_shared(block)`: `blocks.own(table, place)`, which returns the block to copy from; add (from, to) to
    `plan.copies`. Both return which blocks were evicted, `extend` alone and `own` second; add them to `plan.evicted`.

    Or `blocks.num_available` is less than that takes. Then whoever was admitted last, `self.running[-1]`, makes way:
    add a `Preempted(victim, victim.num_computed)` (from `minillm.engine.step_plan`) to `plan.preempted`, take what the plan had for
    it out again, `plan.withdraw(victim)`, and then let `self._preempt(victim)` take its blocks and put it back into the
    queue. Look again, as often as it takes: a victim's blocks may be shared, and free nothing.
    """
    raise NotImplementedError("your turn")


def percentile(values: SequenceOf[float], percent: float) -> float | None:
    """The value that `percent` (0 to 100) of `values` do not exceed; None if there are no values.

    In order, the first value is the 0th percentile, the last the 100th, and the others lie evenly between. Between two
    of them go by proportion: `percentile([30, 10], 25)` is 15.0. The list that was given stays as it is.
    """
    raise NotImplementedError("your turn")
