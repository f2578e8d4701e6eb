"""Records: one step of the engine as plain data, enough for every view and measurement.

Every record consists of numbers, strings and lists of them, so that it can be written as JSON and read back equal.
Times are in seconds since the engine was created; the durations of stages are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.reprs import abbreviated, sequence_name
from minillm.trace.events import (
    DECODE,
    PREFILL,
    Admission,
    Arrival,
    BlockCopy,
    Finish,
    Preemption,
    ScheduledChunk,
)
from minillm.trace.roofline import ModelCosts

STAGES = ("schedule", "batch", "forward", "sample", "commit")
FREED = -1  # in a block table, in place of a freed block; the same number as in minillm.engine.block_table


@dataclass
class RunFacts:
    """What all steps of a run have in common: the header of a trace.

    Attributes
    ----------
    model : the model's name.
    policy, admission : the scheduler's options, such as "chunked" and "fcfs".
    block_size, num_blocks : positions per block and number of blocks of the KV cache.
    max_batch_tokens, max_sequences : the limits of a step.
    watermark : share of the blocks that an admission leaves available.
    prefix_caching : whether computed blocks are looked up for new requests.
    costs : bytes and operations that the model takes, from which the shortest possible time of a step follows; None if
        unknown.
    windows : for each KV-cache group, the positions that a query reads, counting its own; None for all earlier ones.
    """

    model: str
    policy: str
    admission: str
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    watermark: float
    prefix_caching: bool
    costs: ModelCosts | None = None
    windows: list[int | None] = field(default_factory=lambda: [None])

    @property
    def num_groups(self) -> int:
        """KV-cache groups: block tables per sequence."""
        return len(self.windows)


@dataclass
class RunningSequence:
    """A sequence that holds blocks during the step, whether or not the step advances it.

    Attributes
    ----------
    request_id, completion : the sequence.
    num_tokens : tokens known before the step, prompt and answer.
    num_computed : tokens computed before the step.
    block_tables : its blocks in each KV-cache group, in the order of positions, including the blocks of this step's
        tokens; FREED where a block has been freed because no later query can read it.
    """

    request_id: str
    completion: int
    num_tokens: int
    num_computed: int
    block_tables: list[list[int]]

    @property
    def name(self) -> str:
        """The sequence's name."""
        return sequence_name(self.request_id, self.completion)


@dataclass
class PoolState:
    """The KV cache's blocks during the step. Each is free, cached or held.

    Attributes
    ----------
    references : [N], the number of block tables that list each block. A block with at least one reference is held.
    cached : blocks that no table lists but whose content a new prompt can still reuse, in the order of eviction.
    evicted : cached blocks that the step evicted in order to allocate them again.
    copies : blocks that the step copied before writing.
    """

    references: list[int]
    cached: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """`N`."""
        return len(self.references)

    @property
    def num_held(self) -> int:
        """Blocks that at least one block table lists."""
        return self.num_blocks - self.references.count(0)

    @property
    def num_cached(self) -> int:
        """Blocks that no table lists but whose content can still be reused."""
        return len(self.cached)

    @property
    def num_free(self) -> int:
        """Empty blocks."""
        return self.references.count(0) - len(self.cached)

    def states(self) -> list[str]:
        """Return the state of each block: "free", "cached" or "held"."""
        states = ["held" if count else "free" for count in self.references]
        for block in self.cached:
            states[block] = "cached"
        return states


@dataclass
class StepRecord:
    """One step of the engine, from the requests that arrived before it to the tokens that it sampled.

    Attributes
    ----------
    step : 0, 1, 2, ...
    time : when it began, in seconds.
    milliseconds : duration of each of STAGES, by name.
    arrived : requests added since the last step, in order.
    aborted : ids of requests aborted since the last step.
    admitted, preempted, finished : the scheduler's events of this step. The completions of an aborted request are among
        the finished, with reason "abort".
    chunks : what was computed, in the order of the batch. Empty only if there was nothing to do.
    running : the sequences that held blocks during the step, in the order of first admission, including the ones that
        finished in it.
    waiting : names of the first sequences in the waiting queue after scheduling; the engine limits their number.
    num_waiting : total number of waiting sequences, including preempted ones.
    pool : the blocks during the forward pass.
    """

    step: int
    time: float
    milliseconds: dict[str, float]
    arrived: list[Arrival]
    aborted: list[str]
    admitted: list[Admission]
    preempted: list[Preemption]
    finished: list[Finish]
    chunks: list[ScheduledChunk]
    running: list[RunningSequence]
    waiting: list[str]
    num_waiting: int
    pool: PoolState

    @property
    def end(self) -> float:
        """When the step ended, in seconds. This is the time of the tokens that it sampled."""
        return self.time + sum(self.milliseconds.values()) / 1000

    @property
    def num_tokens(self) -> int:
        """`T`: total tokens that the step computed."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def prefix_hits(self) -> dict[str, int]:
        """Tokens found in the prefix cache, by request, for the requests admitted in this step that had any."""
        hits: dict[str, int] = {}
        for admission in self.admitted:
            if admission.num_cached_tokens:
                hits[admission.request_id] = hits.get(admission.request_id, 0) + admission.num_cached_tokens
        return hits

    def __repr__(self) -> str:
        parts = {
            "prefill": [chunk.span for chunk in self.chunks if chunk.phase == PREFILL],
            "decode": [chunk.name for chunk in self.chunks if chunk.phase == DECODE],
            "admitted": [admission.name for admission in self.admitted],
            "preempted": [preemption.name for preemption in self.preempted],
            "finished": [finish.name for finish in self.finished],
        }
        listed = [f"{label} {abbreviated(names)}" for label, names in parts.items() if names]
        counts = [f"{self.num_waiting} waiting", f"{self.pool.num_held} of {self.pool.num_blocks} blocks held"]
        return f"StepRecord({self.step}: {'; '.join(listed + counts)})"
