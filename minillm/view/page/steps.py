"""Step records as differences: each step stores only what does not follow from the steps before it.

Most of a record repeats its predecessor: a block table occasionally grows by one block, and a decode computes the token
that was sampled last. Writer and reader therefore both keep a `SequenceState` per sequence and predict the next record
from it. A *plain decode*, which computes one token at the next position and samples one, takes two numbers. Everything
that differs from the prediction is written in full, so that any record can be represented. `js/replay.js` is the
reader; it processes the parts of a step in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.trace import DECODE, PREFILL, STAGES, Arrival, PoolState, RunningSequence, ScheduledChunk, StepRecord
from minillm.view.page.interning import Interner, page_value

SLICE = 64  # elements of a long list that are compared at once


@dataclass
class SequenceState:
    """The state of a sequence after the steps so far.

    Attributes
    ----------
    num_tokens, num_computed : as in RunningSequence.
    last_token : id of the token that was sampled last, or None.
    block_tables : its blocks, one table per KV-cache group.
    """

    num_tokens: int = 0
    num_computed: int = 0
    last_token: int | None = None
    block_tables: list[list[int]] = field(default_factory=list)


class StepWriter:
    """Convert records, in order, to differences. Keys without a change are left out."""

    def __init__(self, interner: Interner, num_blocks: int, num_groups: int) -> None:
        self._interner = interner
        self._num_groups = num_groups
        self._states: dict[int, SequenceState] = {}  # by the sequence's index
        self._running: list[int] = []
        self._waiting: tuple[list[str], int] = ([], 0)
        self._references = [0] * num_blocks
        self._cached: list[int] = []

    def write(self, record: StepRecord) -> dict[str, Any]:
        """Return the changes of the next step, as a JSON object."""
        sequence, string = self._interner.sequence, self._interner.string
        admitted = [
            (sequence(a.request_id, a.completion), a.num_tokens, a.num_cached_tokens, a.after_preemption)
            for a in record.admitted
        ]
        step: dict[str, Any] = {
            "time": record.time,
            "milliseconds": [record.milliseconds[stage] for stage in STAGES],
            "arrived": [self._arrival(arrival) for arrival in record.arrived],
            "aborted": [self._interner.request(request_id) for request_id in record.aborted],
            "admitted": admitted,
            "preempted": [[sequence(p.request_id, p.completion), p.num_computed] for p in record.preempted],
            "finished": [
                [sequence(f.request_id, f.completion), string(f.reason), string(f.error)] for f in record.finished
            ],
        }
        for index, num_tokens, num_cached_tokens, _ in admitted:
            state = self._state(index)
            state.num_tokens, state.num_computed = num_tokens, num_cached_tokens
        step |= self._running_changes(record.running)
        step["chunks"] = [item for chunk in record.chunks for item in self._chunk(chunk)]
        step |= self._waiting_changes(record) | self._pool_changes(record.pool)
        return {key: value for key, value in step.items() if value not in ([], None)}

    def _state(self, index: int) -> SequenceState:
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = SequenceState(block_tables=[[] for _ in range(self._num_groups)])
        return state

    def _arrival(self, arrival: Arrival) -> list[Any]:
        string, texts = self._interner.string, arrival.token_texts
        return [
            self._interner.sequence(arrival.request_id, 0),
            arrival.time,
            arrival.num_prompt_tokens,
            string(arrival.prompt),
            page_value(arrival.params),
            arrival.n,
            arrival.max_tokens,
            arrival.priority,
            None if texts is None else [string(text) for text in texts],
        ]

    def _running_changes(self, running: Sequence[RunningSequence]) -> dict[str, Any]:
        """Return the changes of the running sequences.

        `running` lists them if the list differs from the previous step's; 0 means that it is empty. `counts` and
        `tables` refer to sequences by their index in that list.
        """
        sequences: list[int] = []
        counts: list[list[int]] = []
        tables: list[list[int]] = []
        for index, sequence in enumerate(running):
            sequences.append(self._interner.sequence(sequence.request_id, sequence.completion))
            state = self._state(sequences[-1])
            if (state.num_tokens, state.num_computed) != (sequence.num_tokens, sequence.num_computed):
                counts.append([index, sequence.num_tokens, sequence.num_computed])
                state.num_tokens, state.num_computed = sequence.num_tokens, sequence.num_computed
            if state.block_tables != sequence.block_tables:
                for group, (old, new) in enumerate(zip(state.block_tables, sequence.block_tables, strict=True)):
                    if old != new:
                        num_kept = common_prefix(old, new)
                        tables.append([index, group, num_kept, *new[num_kept:]])
                state.block_tables = sequence.block_tables
        changed = sequences != self._running
        self._running = sequences
        return {"running": (sequences or 0) if changed else None, "counts": counts, "tables": tables}

    def _chunk(self, chunk: ScheduledChunk) -> list[Any]:
        """Return a plain decode as two numbers, the sequence and the sampled token, and any other chunk as one list."""
        index = self._interner.sequence(chunk.request_id, chunk.completion)
        state = self._state(index)
        tokens = [self._interner.token(t.token_id, t.token_text, t.text) for t in chunk.sampled]
        is_predicted = chunk.start == state.num_computed and chunk.block_tables == state.block_tables
        sampled = chunk.sampled[0] if len(chunk.sampled) == 1 else None
        written: list[Any]
        if (
            is_predicted
            and chunk.phase == DECODE
            and chunk.token_ids == [state.last_token]
            and sampled
            and (sampled.completion, sampled.logprob) == (chunk.completion, None)
        ):
            written = [index, tokens[0]]
        else:
            tables = None if chunk.block_tables == state.block_tables else chunk.block_tables
            outputs = [
                [t.completion, token, *([] if t.logprob is None else [round(t.logprob, 4)])]
                for t, token in zip(chunk.sampled, tokens, strict=True)
            ]
            written = [[index, int(chunk.phase != PREFILL), chunk.start, chunk.token_ids, tables, outputs]]
        self._advance(state, chunk)
        return written

    def _advance(self, state: SequenceState, chunk: ScheduledChunk) -> None:
        """Update the states after a chunk. Each sampled token adds one token to its sequence."""
        num_tokens, state.num_computed = state.num_tokens, chunk.start + chunk.num_tokens
        for token in chunk.sampled:
            target = state
            if token.completion != chunk.completion:  # a fork of the chunk's sequence
                target = self._state(self._interner.sequence(chunk.request_id, token.completion))
                target.num_computed, target.block_tables = state.num_computed, state.block_tables
            target.num_tokens, target.last_token = num_tokens + 1, token.token_id

    def _waiting_changes(self, record: StepRecord) -> dict[str, Any]:
        waiting = (record.waiting, record.num_waiting)
        if waiting == self._waiting:
            return {}
        self._waiting = waiting
        return {"waiting": [record.num_waiting, *map(self._interner.name, record.waiting)]}

    def _pool_changes(self, pool: PoolState) -> dict[str, Any]:
        """Return the changed reference counts by block, and the blocks that left or joined the cached ones."""
        references = [
            number
            for start in range(0, len(pool.references), SLICE)
            if pool.references[start : start + SLICE] != self._references[start : start + SLICE]
            for block in range(start, min(start + SLICE, len(pool.references)))
            if pool.references[block] != self._references[block]
            for number in (block, pool.references[block])
        ]
        cached = self._cached_changes(pool.cached) if pool.cached != self._cached else None
        self._references, self._cached = pool.references, pool.cached
        copies = [[copy.source, copy.target] for copy in pool.copies]
        return {"references": references, "cached": cached, "evicted": pool.evicted, "copies": copies}

    def _cached_changes(self, cached: list[int]) -> list[list[int]]:
        removed = set(self._cached) - set(cached)
        kept = [block for block in self._cached if block not in removed]
        if kept != cached[: len(kept)]:  # the order has changed: write the whole list
            removed, kept = set(self._cached), []
        return [sorted(removed), cached[len(kept) :]]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    if one == other[: len(one)]:
        return len(one)
    return next(index for index, (a, b) in enumerate(zip(one, [*other, None], strict=False)) if a != b)
