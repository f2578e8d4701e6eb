"""From a plan and the scheduler that made it to the records of a step: plain data that does not change any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.engine.sampling import SamplingParams
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.trace import (
    DECODE,
    PREFILL,
    STAGES,
    Admission,
    BlockCopy,
    ChunkRecord,
    PoolState,
    Preemption,
    RunningSequence,
    StepRecord,
)

MAX_WAITING_SHOWN = 32  # a record names so many of those that wait: it must not grow with the queue


class Stopwatch:
    """How long each stage of a step took: a lap ends one and begins the next."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._last = clock, clock()
        self.milliseconds = dict.fromkeys(STAGES, 0.0)

    def lap(self, stage: str) -> None:
        """What was done since the lap before was `stage`."""
        now = self._clock()
        self.milliseconds[stage] += (now - self._last) * 1000
        self._last = now


def record_of(plan: StepPlan, scheduler: Scheduler, step: int, time: float) -> StepRecord:
    """The record of a step that was scheduled, but has not been carried out: nothing sampled, nobody finished."""
    waiting = scheduler.waiting
    return StepRecord(
        step=step,
        time=time,
        milliseconds={},
        arrived=[],
        aborted=[],
        admitted=[
            Admission(*_who(a.sequence), len(a.sequence.token_ids), a.num_cached_tokens, a.after_preemption)
            for a in plan.admitted
        ],
        preempted=[Preemption(*_who(p.sequence), p.num_computed) for p in plan.preempted],
        finished=[],
        chunks=[
            ChunkRecord(
                *_who(chunk.sequence),
                PREFILL if chunk.is_prefill else DECODE,
                chunk.start,
                chunk.token_ids,
                chunk.block_table,
            )
            for chunk in plan.chunks
        ],
        running=[
            RunningSequence(*_who(s), len(s.token_ids), s.num_computed, list(s.block_table)) for s in scheduler.running
        ],
        waiting=[sequence.name for sequence in waiting.first(MAX_WAITING_SHOWN)],
        num_waiting=len(waiting),
        pool=PoolState(
            references=list(scheduler.blocks.references),
            cached=scheduler.blocks.cached,
            evicted=plan.evicted,
            copies=[BlockCopy(source, target) for source, target in plan.copies],
        ),
    )


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not the default ones, as JSON can have them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.changed.items()}


def _who(sequence: Sequence) -> tuple[str, int]:
    return sequence.request_id, sequence.completion
