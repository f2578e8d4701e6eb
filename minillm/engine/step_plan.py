"""StepPlan: what one step will do. The scheduler makes the plan; the engine carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.engine.sequence import Sequence
from minillm.reprs import abbreviated
from minillm.trace.events import DECODE, PREFILL, Admission, BlockCopy, Finish, Preemption, ScheduledChunk


@dataclass
class SequenceState:
    """What a commit changes of a sequence besides its blocks, as it was before the commit.

    Attributes
    ----------
    sequence : the sequence.
    num_tokens : length of its `token_ids`.
    num_completions : completions that it represented.
    """

    sequence: Sequence
    num_tokens: int
    num_completions: int

    def restore(self) -> None:
        """Return the sequence to this state."""
        del self.sequence.token_ids[self.num_tokens :]
        self.sequence.num_completions = self.num_completions


@dataclass
class StepPlan:
    """One step.

    Attributes
    ----------
    chunks : the tokens that the step computes for each scheduled sequence, in the order of the batch. The types of
        these and of the following entries, and their fields, are in `minillm/trace/events.py`; a trace records them.
    admitted, preempted : the sequences that gained or lost their blocks in this step.
    copies : blocks to copy before anything is computed, in this order.
    evicted : cached blocks that were evicted.
    finished : completions that ended; filled in when the step is committed.
    num_tokens : total tokens of all chunks.
    before : the states of the planned requests' sequences before the commit; filled in when it begins.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    num_tokens: int = 0
    before: list[SequenceState] = field(default_factory=list)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of `sequence`."""
        start = sequence.num_computed
        is_last = start + num_tokens == len(sequence.token_ids)
        self.chunks.append(
            ScheduledChunk(
                sequence.request_id,
                sequence.completion,
                PREFILL if sequence.in_prefill else DECODE,
                start,
                sequence.token_ids[start : start + num_tokens],
                [list(table.blocks) for table in sequence.block_tables],
                # All completions of a prompt sample their first token from the logits of its last token.
                num_samples=sequence.num_completions if is_last else 0,
            )
        )
        self.num_tokens += num_tokens

    def withdraw(self, sequence: Sequence) -> None:
        """Remove the chunk, if any, of a sequence that is about to lose its blocks, and the copies made for it."""
        key = (sequence.request_id, sequence.completion)
        own = [chunk for chunk in self.chunks if (chunk.request_id, chunk.completion) == key]
        self.chunks = [chunk for chunk in self.chunks if (chunk.request_id, chunk.completion) != key]
        self.num_tokens -= sum(chunk.num_tokens for chunk in own)
        blocks = {block for table in sequence.block_tables for block in table.blocks}
        self.copies = [copy for copy in self.copies if copy.target not in blocks]

    def __repr__(self) -> str:
        parts = {
            "prefill": [chunk.span for chunk in self.chunks if chunk.is_prefill],
            "decode": [chunk.name for chunk in self.chunks if not chunk.is_prefill],
            "admitted": [admission.name for admission in self.admitted],
            "preempted": [preemption.name for preemption in self.preempted],
            "finished": [f"{finish.name} ({finish.reason})" for finish in self.finished],
            "cached": [f"{a.num_cached_tokens} of {a.name}" for a in self.admitted if a.num_cached_tokens],
            "copies": [f"{copy.source}->{copy.target}" for copy in self.copies],
            "evicted": [str(block) for block in self.evicted],
        }
        text = "; ".join(f"{label} {abbreviated(items)}" for label, items in parts.items() if items)
        return f"StepPlan({self.num_tokens} tokens: {text})" if text else "StepPlan(nothing to do)"
