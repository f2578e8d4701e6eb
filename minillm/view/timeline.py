"""Timeline: what became of every sequence in every step. Kept from records alone; all views draw from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from string import ascii_letters

from minillm.trace import PREFILL, Arrival, Finish, RunFacts, StepRecord, sequence_name
from minillm.view.shown import shown

HISTORY = 512  # steps that are remembered; more columns no view has
KEPT_FINISHED = 64  # rows of finished sequences that are remembered
LETTERS = ascii_letters.swapcase()  # A to Z, then a to z, then from the beginning


class State(StrEnum):
    """What a step meant to a sequence."""

    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # tokens known before were computed, for the first time
    RECOMPUTE = "recompute"  # so they were, after a preemption, for another time
    DECODE = "decode"  # the token chosen last was computed, and a further one chosen
    HELD_UP = "held up"  # it holds blocks, but the step went to others
    PREEMPTED = "preempted"  # it lost its blocks and went back into the queue
    FINISHED = "finished"  # its answer ended with this step
    ENDED = "ended early"  # aborted or failed


@dataclass(frozen=True)
class Cell:
    """A sequence in a step: what became of it, and how many of its tokens were computed.

    Where an answer ended, `before` is what the step meant to the sequence until then; None if it only waited.
    """

    state: State
    num_tokens: int = 0
    before: State | None = None


HELD_UP = Cell(State.HELD_UP)  # of every running sequence in every step, until it turns out to be something else


@dataclass
class Row:
    """A sequence, from its arrival on.

    Attributes
    ----------
    name : as the records have it; the request's id, with the completion's number if that is not the first.
    letter : by which it is known in maps; 52 sequences later another one gets the same.
    number : how many came before it.
    came : the step whose record named it first.
    since, until : the first step it was seen in, and the one it ended in.
    prompt : its prompt, safe to show; empty if the trace does not tell.
    answer, fresh : its answer so far, safe to show, and how many characters of it the newest step has brought.
    num_prompt_tokens, num_answered, max_tokens : of the prompt, of the answer so far, and what it may come to.
    num_computed : positions up to which it has ever been computed.
    num_recomputed : tokens computed for another time.
    reason : why it ended, or None.
    """

    name: str
    letter: str
    number: int
    came: int
    since: int
    prompt: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    answer: str = ""
    fresh: int = 0
    num_answered: int = 0
    num_computed: int = 0
    num_recomputed: int = 0
    until: int | None = None
    reason: str | None = None
    cells: dict[int, Cell] = field(default_factory=dict, repr=False)

    def cell(self, step: int) -> Cell | None:
        """What became of it in that step; None before it came and after it ended."""
        if step in self.cells:
            return self.cells[step]
        there = self.since <= step and (self.until is None or step < self.until)
        return Cell(State.WAITING) if there else None  # whoever neither runs nor has ended waits

    def put(self, step: int, cell: Cell, history: int | None) -> None:
        """Remember it, and forget what is longer ago than the last `history` cells; None forgets nothing."""
        self.cells[step] = cell
        if history is not None and len(self.cells) > history:
            del self.cells[next(iter(self.cells))]


class Timeline:
    """All sequences of a run, in the order they came in.

    Parameters
    ----------
    facts : RunFacts of the run.
    history : cells that a row remembers; None for all of them.
    kept_finished : rows of finished sequences that are remembered; None for all of them.

    Attributes
    ----------
    rows : of the unfinished sequences and of those that finished last, by name.
    finished : those that finished last, whether or not another sequence has got their name since.
    record : the newest StepRecord, or None.
    first : the first step that was seen.
    """

    def __init__(self, facts: RunFacts, history: int | None = HISTORY, kept_finished: int | None = KEPT_FINISHED):
        self.facts = facts
        self.history, self.kept_finished = history, kept_finished
        self.rows: dict[str, Row] = {}
        self.finished: list[Row] = []
        self.record: StepRecord | None = None
        self.first = 0
        self._num_rows = 0
        self._fresh: list[Row] = []
        self._touched: dict[int, Row] = {}  # by identity: a name may be used again within a step

    def push(self, record: StepRecord) -> list[Row]:
        """Take in the next step; returns the rows it says anything of, those that ended with it among them."""
        if self.record is None:
            self.first = record.step
        self.record, self._touched = record, {}
        for row in self._fresh:
            row.fresh = 0
        self._fresh = []
        ended_in_it = []
        for finish in record.finished:
            if self._has_left_its_name(finish, record):
                self._finish(finish)
            else:
                ended_in_it.append(finish)
        for arrival in record.arrived:
            self._arrive(arrival, record.step)
        for sequence in record.running:
            self._put(self._row(sequence.request_id, sequence.completion), HELD_UP)
        for chunk in record.chunks:
            row = self._row(chunk.request_id, chunk.completion)
            repeated = max(0, min(row.num_computed, chunk.start + chunk.num_tokens) - chunk.start)
            row.num_recomputed += repeated
            row.num_computed = max(row.num_computed, chunk.start + chunk.num_tokens)
            state = State.DECODE if chunk.phase != PREFILL else State.RECOMPUTE if repeated else State.PREFILL
            self._put(row, Cell(state, chunk.num_tokens))
            for token in chunk.sampled:
                self._grow(self._row(chunk.request_id, token.completion), token.text, row)
        for preemption in record.preempted:
            self._put(self._row(preemption.request_id, preemption.completion), Cell(State.PREEMPTED))
        for finish in ended_in_it:
            self._finish(finish)
        return list(self._touched.values())

    def everyone(self) -> list[Row]:
        """All rows that are remembered, in the order they came in."""
        rows = {row.number: row for row in [*self.finished, *self.rows.values()]}
        return [rows[number] for number in sorted(rows)]

    def owners(self) -> dict[int, list[Row]]:
        """For each block that is held in the newest step: the sequences whose tables name it, first admitted first."""
        owners: dict[int, list[Row]] = {}
        for sequence in self.record.running if self.record else []:
            row = self.rows.get(sequence_name(sequence.request_id, sequence.completion))
            for block in chain.from_iterable(sequence.block_tables) if row else []:
                if block >= 0:  # not freed
                    owners.setdefault(block, []).append(row)
        return owners

    def _arrive(self, arrival: Arrival, step: int) -> None:
        row = self._row(arrival.request_id, 0)
        row.prompt, row.num_prompt_tokens = shown(arrival.prompt or ""), arrival.num_prompt_tokens
        row.max_tokens = arrival.max_tokens

    def _row(self, request_id: str, completion: int) -> Row:
        """The unfinished row of that name, or a new one: an arrival, a completion that parts, a trace cut in front."""
        name = sequence_name(request_id, completion)
        if name not in self.rows or self.rows[name].reason is not None:
            self.rows.pop(name, None)  # an id may be used again; its new bearer comes last
            letter = LETTERS[self._num_rows % len(LETTERS)]
            self.rows[name] = Row(name, letter, self._num_rows, self.record.step, self.record.step)
            self._num_rows += 1
        row = self.rows[name]
        self._touched[id(row)] = row
        return row

    def _has_left_its_name(self, finish: Finish, record: StepRecord) -> bool:
        """Whether its sequence was aborted before a request arrived that got the same id: both in one record."""
        if finish.reason != "abort" or all(arrival.request_id != finish.request_id for arrival in record.arrived):
            return False
        row = self.rows.get(sequence_name(finish.request_id, finish.completion))
        return row is not None and row.reason is None

    def _grow(self, row: Row, text: str, parent: Row) -> None:
        if row is not parent and not row.num_answered:  # it has parted from its request's first completion just now
            row.prompt, row.num_prompt_tokens = parent.prompt, parent.num_prompt_tokens
            row.max_tokens, row.num_computed = parent.max_tokens, parent.num_computed
            row.since = self.record.step + 1
        text = shown(text)
        row.answer += text
        row.fresh += len(text)
        row.num_answered += 1
        self._fresh.append(row)

    def _finish(self, finish: Finish) -> None:
        row = self._row(finish.request_id, finish.completion)
        self.finished.append(row)
        row.until, row.reason = self.record.step, finish.reason
        state = State.FINISHED if finish.reason in ("stop", "length") else State.ENDED
        computed = row.cells.get(self.record.step)
        self._put(row, Cell(state, computed.num_tokens, computed.state) if computed else Cell(state))
        if self.kept_finished is not None and len(self.finished) > self.kept_finished:
            oldest = self.finished.pop(0)
            if self.rows.get(oldest.name) is oldest:
                del self.rows[oldest.name]

    def _put(self, row: Row, cell: Cell) -> None:
        row.put(self.record.step, cell, self.history)
