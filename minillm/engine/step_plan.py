"""StepPlan: what a step is to do, decided by the scheduler in integers only, carried out by the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minillm.engine.sequence import Sequence
from minillm.reprs import few, few_blocks


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens by which a step advances one sequence. A snapshot: it stays what it was when the sequence goes on.

    Attributes
    ----------
    sequence : whose.
    start : position of the first token.
    token_ids : the tokens.
    block_table : the sequence's blocks, for all positions up to the last of these.
    is_prefill : whether the tokens stood there when the sequence was admitted; else it is the one chosen last.
    num_samples : tokens to choose after it: none while known tokens remain; else one for each completion the sequence
        stands for.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    block_table: list[int]
    is_prefill: bool
    num_samples: int

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.token_ids)

    def __repr__(self):
        phase = "prefill" if self.is_prefill else "decode"
        return (
            f"ScheduledChunk({self.sequence.name}[{self.start}:{self.stop}], {phase}, {self.num_samples} to sample, "
            f"blocks {few_blocks(self.block_table)})"
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that left the queue: how many of its tokens were found in the cache, and whether it came back."""

    sequence: Sequence
    num_cached_tokens: int
    after_preemption: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence that gave its blocks back and went back into the queue; `num_computed` tokens had been computed."""

    sequence: Sequence
    num_computed: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of sampling one token: the token, and why the answer ends with it if it does.

    The reason alone, without a token, ends an answer that could not be sampled.
    """

    token_id: int | None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended, and why."""

    sequence: Sequence
    reason: str


@dataclass
class StepPlan:
    """One step.

    Attributes
    ----------
    chunks : which sequence advances by how much, in the batch's order.
    admitted, preempted : who came and who had to go, so that it could be so.
    copies : (source, target) blocks to copy before anything is computed, in this order.
    evicted : blocks whose cached content was given up.
    finished : who ended; known only once the step is committed.
    num_tokens : tokens of all chunks.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    num_tokens: int = 0

    def advance(self, sequence: Sequence, num_tokens: int, *, is_prefill: bool) -> None:
        """Add a chunk: the next `num_tokens` tokens of `sequence`."""
        start = sequence.num_computed
        token_ids = sequence.token_ids[start : start + num_tokens]
        num_samples = sequence.num_forks if start + num_tokens == len(sequence.token_ids) else 0
        table = list(sequence.block_table)
        self.chunks.append(ScheduledChunk(sequence, start, token_ids, table, is_prefill, num_samples))
        self.num_tokens += num_tokens

    def withdraw(self, sequence: Sequence) -> None:
        """Take out the chunk, if any, of a sequence that is about to lose its blocks, and copies made for it."""
        own = [chunk for chunk in self.chunks if chunk.sequence is sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.num_tokens -= sum(len(chunk.token_ids) for chunk in own)
        self.copies = [copy for copy in self.copies if copy[1] not in sequence.block_table]

    def __repr__(self):
        prefills = [f"{c.sequence.name}[{c.start}:{c.stop}]" for c in self.chunks if c.is_prefill]
        parts = {
            "prefill": prefills,
            "decode": [c.sequence.name for c in self.chunks if not c.is_prefill],
            "admitted": _names(self.admitted),
            "preempted": _names(self.preempted),
            "finished": [f"{f.sequence.name} ({f.reason})" for f in self.finished],
            "found": [f"{a.num_cached_tokens} of {a.sequence.name}" for a in self.admitted if a.num_cached_tokens],
            "copies": [f"{source}->{target}" for source, target in self.copies],
            "evicted": [str(block) for block in self.evicted],
        }
        said = "; ".join(f"{word} {few(items)}" for word, items in parts.items() if items)
        return f"StepPlan({self.num_tokens} tokens: {said})" if said else "StepPlan(nothing to do)"


def _names(items: Iterable[Admitted | Preempted]) -> list[str]:
    return [item.sequence.name for item in items]
