"""The steps as the page's data has them: what each changes, and nothing that follows from those before.

Most of a record repeats the one before it: block tables grow by a block now and then, a decode takes in the token that
came out last. So writer and reader both keep, for every completion, how far it has come (`Progress`) and go on from
there. A *plain decode*, the next position's one token in and one out, is then two numbers. Whatever is not as expected
is written out in full, so that any record can be said; `js/replay.js` is the reader, and takes these steps in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.trace import DECODE, PREFILL, STAGES, Arrival, PoolState, RunningSequence, ScheduledChunk, StepRecord
from minillm.view.page.texts import Texts, plain

STRIDE = 64  # elements of a long list that are compared at once


@dataclass
class Progress:
    """How far a completion has come.

    Attributes
    ----------
    num_tokens, num_computed : as in RunningSequence.
    last : id of the token that came out last, or None.
    block_table : its blocks, those of all KV-cache groups side by side; see `interleaved`.
    """

    num_tokens: int = 0
    num_computed: int = 0
    last: int | None = None
    block_table: Sequence[int] = field(default_factory=list)


class StepWriter:
    """Turns record after record into what it changes. Keys are left out where nothing has changed."""

    def __init__(self, texts: Texts, num_blocks: int):
        self._texts = texts
        self._progress: dict[int, Progress] = {}  # by `who`
        self._running: list[int] = []
        self._waiting: tuple[list[str], int] = ([], 0)
        self._references = [0] * num_blocks
        self._cached: list[int] = []

    def write(self, record: StepRecord) -> dict[str, Any]:
        """The step as JSON has it."""
        who, string = self._texts.who, self._texts.string
        step = {
            "time": record.time,
            "milliseconds": [record.milliseconds[stage] for stage in STAGES],
            "arrived": [self._arrival(arrival) for arrival in record.arrived],
            "aborted": [self._texts.request(request_id) for request_id in record.aborted],
            "admitted": [
                [who(a.request_id, a.completion), a.num_tokens, a.num_cached_tokens, a.after_preemption]
                for a in record.admitted
            ],
            "preempted": [[who(p.request_id, p.completion), p.num_computed] for p in record.preempted],
            "finished": [[who(f.request_id, f.completion), string(f.reason), string(f.error)] for f in record.finished],
        }
        for admitted, tokens, cached, _ in step["admitted"]:
            progress = self._of(admitted)
            progress.num_tokens, progress.num_computed = tokens, cached
        step |= self._run(record.running)
        step["chunks"] = [number for chunk in record.chunks for number in self._chunk(chunk)]
        step |= self._wait(record) | self._pool(record.pool)
        return {key: value for key, value in step.items() if value not in ([], None)}

    def _of(self, who: int) -> Progress:
        progress = self._progress.get(who)
        if progress is None:
            progress = self._progress[who] = Progress()
        return progress

    def _arrival(self, arrival: Arrival) -> list[Any]:
        string, texts = self._texts.string, arrival.token_texts
        return [
            self._texts.who(arrival.request_id, 0),
            arrival.time,
            arrival.num_prompt_tokens,
            string(arrival.prompt),
            plain(arrival.params),
            arrival.n,
            arrival.max_tokens,
            arrival.priority,
            None if texts is None else [string(text) for text in texts],
        ]

    def _run(self, running: Sequence[RunningSequence]) -> dict[str, Any]:
        """Who runs, if others than before; and by place in that list, whose numbers and tables are not as expected."""
        names, counts, tables = [], [], []
        for place, sequence in enumerate(running):
            who = self._texts.who(sequence.request_id, sequence.completion)
            names.append(who)
            progress = self._of(who)
            if (progress.num_tokens, progress.num_computed) != (sequence.num_tokens, sequence.num_computed):
                counts.append([place, sequence.num_tokens, sequence.num_computed])
                progress.num_tokens, progress.num_computed = sequence.num_tokens, sequence.num_computed
            table = interleaved(sequence.block_tables)
            if progress.block_table != table:
                keep = num_alike(progress.block_table, table)
                tables.append([place, keep, *table[keep:]])
                progress.block_table = table
        changed = names != self._running
        self._running = names
        return {"running": names if changed and names else 0 if changed else None, "counts": counts, "tables": tables}

    def _chunk(self, chunk: ScheduledChunk) -> list[Any]:
        """A plain decode as two numbers, who and the token out; any other chunk as one list."""
        who = self._texts.who(chunk.request_id, chunk.completion)
        progress, tokens = self._of(who), [self._texts.token(t.token_id, t.token_text, t.text) for t in chunk.sampled]
        table = interleaved(chunk.block_tables)
        as_expected = chunk.start == progress.num_computed and table == progress.block_table
        out = chunk.sampled[0] if len(chunk.sampled) == 1 else None
        if (
            as_expected
            and chunk.phase == DECODE
            and chunk.token_ids == [progress.last]
            and out
            and (out.completion, out.logprob) == (chunk.completion, None)
        ):
            written = [who, tokens[0]]
        else:
            changed_table = None if table == progress.block_table else table
            sampled = [
                [t.completion, token, *([] if t.logprob is None else [round(t.logprob, 4)])]
                for t, token in zip(chunk.sampled, tokens, strict=True)
            ]
            written = [[who, int(chunk.phase != PREFILL), chunk.start, chunk.token_ids, changed_table, sampled]]
        self._advance(progress, chunk)
        return written

    def _advance(self, progress: Progress, chunk: ScheduledChunk) -> None:
        """After the chunk: whoever got a token has come as far as the chunk, and knows one token more."""
        known, progress.num_computed = progress.num_tokens, chunk.start + chunk.num_tokens
        for token in chunk.sampled:
            own = progress
            if token.completion != chunk.completion:  # it parts from this one
                own = self._of(self._texts.who(chunk.request_id, token.completion))
                own.num_computed, own.block_table = progress.num_computed, progress.block_table
            own.num_tokens, own.last = known + 1, token.token_id

    def _wait(self, record: StepRecord) -> dict[str, Any]:
        waiting = (record.waiting, record.num_waiting)
        if waiting == self._waiting:
            return {}
        self._waiting = waiting
        return {"waiting": [record.num_waiting, *map(self._texts.name, record.waiting)]}

    def _pool(self, pool: PoolState) -> dict[str, Any]:
        """By block the counts that have changed; of the cached blocks those that no longer are, and the new ones."""
        references = [
            number
            for start in range(0, len(pool.references), STRIDE)
            if pool.references[start : start + STRIDE] != self._references[start : start + STRIDE]
            for block in range(start, min(start + STRIDE, len(pool.references)))
            if pool.references[block] != self._references[block]
            for number in (block, pool.references[block])
        ]
        cached = self._cached_changes(pool.cached) if pool.cached != self._cached else None
        self._references, self._cached = pool.references, pool.cached
        copies = [[copy.source, copy.target] for copy in pool.copies]
        return {"references": references, "cached": cached, "evicted": pool.evicted, "copies": copies}

    def _cached_changes(self, cached: list[int]) -> list[list[int]]:
        gone = set(self._cached) - set(cached)
        left = [block for block in self._cached if block not in gone]
        if left != cached[: len(left)]:  # some have changed places: all anew
            gone, left = set(self._cached), []
        return [sorted(gone), cached[len(left) :]]


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal elements both begin."""
    if one == other[: len(one)]:
        return len(one)
    return next(number for number, (a, b) in enumerate(zip(one, [*other, None], strict=False)) if a != b)


def interleaved(block_tables: list[list[int]]) -> list[int]:
    """Return the blocks of all KV-cache groups in one list: the first block of each group, then the second, ...

    A table that grows by a block then only gets longer, whatever the number of groups.
    """
    if len(block_tables) == 1:
        return block_tables[0]
    return [block for blocks in zip(*block_tables, strict=True) for block in blocks]
