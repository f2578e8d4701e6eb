"""StepRecorder: times the stages of a step and collects what happens in and between steps into its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.engine.sampling import SamplingParams
from minillm.engine.scheduler import Scheduler
from minillm.engine.step_plan import StepPlan
from minillm.trace.events import Arrival, Finish
from minillm.trace.records import STAGES, PoolState, RunningSequence, StepRecord

MAX_WAITING_RECORDED = 32  # names of waiting sequences in a record, so that it does not grow with the queue
MAX_PENDING_EVENTS = 1000  # requests that arrive or are aborted between two records, so that these do not grow either


class RecordedStep:
    """One step of the engine. `record` exists once the step is complete."""

    record: StepRecord


@dataclass
class Abort:
    """A request that was aborted, with one Finish event per completion."""

    request_id: str
    finished: list[Finish]


@dataclass
class PendingEvents:
    """What has happened to requests since the last step. No request id arrives twice.

    Attributes
    ----------
    step : number of the step whose record will list these events.
    arrived, aborts : the events.
    """

    step: int = 0
    arrived: list[Arrival] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)

    def must_be_recorded_before(self, request_id: str) -> bool:
        """Return whether a record is due before another event of this request, although no step runs."""
        return len(self.arrived) + len(self.aborts) >= MAX_PENDING_EVENTS or any(
            abort.request_id == request_id for abort in self.aborts
        )


class StepRecorder:
    """Builds one StepRecord per step.

    The engine calls `begin`, then `stage` around each stage, `scheduled` after the first one, and `complete` at the
    end. When the step is final, it replaces `pending`, which collects the events between two steps.

    A step that fails leaves no record, and its number is used again. Its sequences lose their blocks and start over, so
    the next record can contain an admission `after_preemption` although no record contains the preemption.

    Parameters
    ----------
    clock : returns the time in seconds.

    Attributes
    ----------
    record : the record of the current or last step. It does not exist before the first step is scheduled.
    pending : PendingEvents, which the next record lists.
    """

    def __init__(self, clock: Callable[[], float]):
        self.pending = PendingEvents()
        self._clock = clock
        self._time = self._stage_end = 0.0
        self._milliseconds = dict.fromkeys(STAGES, 0.0)

    def begin(self) -> None:
        """Start the clock of a step."""
        self._time = self._stage_end = self._clock()
        self._milliseconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attribute the time since the end of the previous stage, up to the end of the `with` block, to this stage."""
        yield
        now = self._clock()
        self._milliseconds[name] += (now - self._stage_end) * 1000
        self._stage_end = now

    def scheduled(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Record the plan, and the state of the queue and the block pool during the forward pass.

        The time that this takes counts as part of the next stage, "batch".
        """
        waiting, blocks = scheduler.waiting, scheduler.blocks
        self.record = StepRecord(
            step=self.pending.step,
            time=self._time,
            milliseconds=self._milliseconds,
            arrived=[],
            aborted=[],
            admitted=plan.admitted,
            preempted=plan.preempted,
            finished=[],
            chunks=plan.chunks,
            running=[
                RunningSequence(
                    sequence.request_id,
                    sequence.completion,
                    len(sequence.token_ids),
                    sequence.num_computed,
                    [list(table.blocks) for table in sequence.block_tables],
                )
                for sequence in scheduler.running
            ],
            waiting=[sequence.name for sequence in waiting.first(MAX_WAITING_RECORDED)],
            num_waiting=len(waiting),
            pool=PoolState(list(blocks.references), blocks.cached, plan.evicted, plan.copies),
        )

    def complete(self, finished: list[Finish]) -> StepRecord:
        """Finish the record with the completions that ended in this step, and with the events since the last one."""
        self.record.arrived = self.pending.arrived
        self.record.aborted = [abort.request_id for abort in self.pending.aborts]
        self.record.finished = [finish for abort in self.pending.aborts for finish in abort.finished] + finished
        return self.record

    def next_step(self) -> None:
        """Start to collect the events for the next record."""
        self.pending = PendingEvents(self.pending.step + 1)


def json_params(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, by name, with lists in place of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.changed.items()}
