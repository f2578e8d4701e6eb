"""Timeline: the state of every sequence in every step, built from step records alone. All views draw from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from string import ascii_letters

from minillm.trace import FREED, Arrival, Finish, RunFacts, StepRecord, sequence_name
from minillm.view.printable import printable

MAX_CELLS = 512  # cells kept per track: no terminal has more columns
MAX_FINISHED = 64  # tracks of finished sequences that are kept
LETTERS = ascii_letters.swapcase()  # A to Z, then a to z, then A again


class State(StrEnum):
    """The state of a sequence in one step."""

    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # the step computed tokens of the prompt for the first time
    RECOMPUTE = "recompute"  # the step computed tokens again that a preemption had discarded
    DECODE = "decode"  # the step computed the last sampled token and sampled the next one
    STALLED = "stalled"  # it holds blocks, but the step advanced only other sequences
    PREEMPTED = "preempted"  # it lost its blocks and returned to the queue
    FINISHED = "finished"  # its answer was completed in this step
    ENDED_EARLY = "ended early"  # it was aborted or failed in this step


@dataclass(frozen=True)
class Cell:
    """One sequence in one step.

    Attributes
    ----------
    state : its state.
    num_tokens : tokens of it that the step computed.
    state_before_end : its state in the same step before it ended; None if it did not end, or ended while waiting.
    """

    state: State
    num_tokens: int = 0
    state_before_end: State | None = None


STALLED = Cell(State.STALLED)  # every running sequence's cell in every step, until a chunk or an event replaces it


@dataclass
class Track:
    """One sequence from its arrival on: a row of cells, and its text.

    Attributes
    ----------
    name : the sequence's name in the records: the request's id, followed by the completion's number unless it is 0.
    letter : its one-letter label, for tiles and batches; letters repeat after 52 sequences.
    number : how many sequences arrived before it.
    created_step : the first step whose record mentions the sequence.
    first_step, end_step : the first step that has a cell for it, and the step in which it ended; None until then.
    prompt : its prompt in printable characters; empty if the trace does not contain it.
    answer, num_new_characters : its answer so far in printable characters, and how many of them the newest step added.
    num_prompt_tokens, num_generated, max_tokens : tokens of the prompt, of the answer so far, and the limit.
    num_computed : the highest number of its positions that have been computed at one time.
    num_recomputed : tokens that were computed again.
    finish_reason : why it ended, or None.
    cells : cells by step. Steps in which the sequence only waited have none.
    """

    name: str
    letter: str
    number: int
    created_step: int
    first_step: int
    prompt: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    answer: str = ""
    num_new_characters: int = 0
    num_generated: int = 0
    num_computed: int = 0
    num_recomputed: int = 0
    end_step: int | None = None
    finish_reason: str | None = None
    cells: dict[int, Cell] = field(default_factory=dict, repr=False)

    def cell(self, step: int) -> Cell | None:
        """Return the sequence's cell in a step; None before its first step and after its end."""
        if step in self.cells:
            return self.cells[step]
        is_alive = self.first_step <= step and (self.end_step is None or step < self.end_step)
        return Cell(State.WAITING) if is_alive else None  # an unfinished sequence that is not running is waiting

    def set_cell(self, step: int, cell: Cell, max_cells: int | None) -> None:
        """Store a cell, and drop the oldest one if there are now more than `max_cells`; None keeps all."""
        self.cells[step] = cell
        if max_cells is not None and len(self.cells) > max_cells:
            del self.cells[next(iter(self.cells))]


class Timeline:
    """The tracks of all sequences of a run, in order of arrival.

    Parameters
    ----------
    facts : RunFacts of the run.
    max_cells : cells kept per track; None keeps all.
    max_finished : tracks of finished sequences that are kept; None keeps all.

    Attributes
    ----------
    tracks : tracks of the unfinished sequences and of the last finished ones, by name.
    finished : tracks of the last finished sequences, even if a later sequence has the same name.
    record : the newest StepRecord, or None.
    first_step : the number of the first step.
    """

    def __init__(
        self, facts: RunFacts, max_cells: int | None = MAX_CELLS, max_finished: int | None = MAX_FINISHED
    ) -> None:
        self.facts = facts
        self.max_cells, self.max_finished = max_cells, max_finished
        self.tracks: dict[str, Track] = {}
        self.finished: list[Track] = []
        self.record: StepRecord | None = None
        self.first_step = 0
        self._step = 0
        self._num_tracks = 0
        self._grown: list[Track] = []
        self._updated: dict[int, Track] = {}  # by identity, because a name can be reused within a step

    def push(self, record: StepRecord) -> list[Track]:
        """Add the next step. Return all tracks that its record mentions, including finished ones."""
        if self.record is None:
            self.first_step = record.step
        self.record, self._step, self._updated = record, record.step, {}
        for track in self._grown:
            track.num_new_characters = 0
        self._grown = []
        ended: list[Finish] = []
        for finish in record.finished:
            if self._precedes_arrival(finish, record):
                self._finish(finish)
            else:
                ended.append(finish)
        for arrival in record.arrived:
            self._arrive(arrival)
        for sequence in record.running:
            self._set_cell(self._track(sequence.request_id, sequence.completion), STALLED)
        for chunk in record.chunks:
            track = self._track(chunk.request_id, chunk.completion)
            num_repeated = max(0, min(track.num_computed, chunk.stop) - chunk.start)
            track.num_recomputed += num_repeated
            track.num_computed = max(track.num_computed, chunk.stop)
            state = State.DECODE if not chunk.is_prefill else State.RECOMPUTE if num_repeated else State.PREFILL
            self._set_cell(track, Cell(state, chunk.num_tokens))
            for token in chunk.sampled:
                self._append_token(self._track(chunk.request_id, token.completion), token.text, track)
        for preemption in record.preempted:
            self._set_cell(self._track(preemption.request_id, preemption.completion), Cell(State.PREEMPTED))
        for finish in ended:
            self._finish(finish)
        return list(self._updated.values())

    def all_tracks(self) -> list[Track]:
        """Return all tracks that are kept, in order of arrival."""
        tracks = {track.number: track for track in [*self.finished, *self.tracks.values()]}
        return [tracks[number] for number in sorted(tracks)]

    def block_owners(self) -> dict[int, list[Track]]:
        """Return, for each held block of the newest step, the sequences that hold it, in order of first admission."""
        owners: dict[int, list[Track]] = {}
        for sequence in self.record.running if self.record else []:
            if track := self.tracks.get(sequence.name):
                for block in chain.from_iterable(sequence.block_tables):
                    if block != FREED:
                        owners.setdefault(block, []).append(track)
        return owners

    def _arrive(self, arrival: Arrival) -> None:
        track = self._track(arrival.request_id, 0)
        track.prompt, track.num_prompt_tokens = printable(arrival.prompt or ""), arrival.num_prompt_tokens
        track.max_tokens = arrival.max_tokens

    def _track(self, request_id: str, completion: int) -> Track:
        """Return the unfinished track of a sequence, or a new one.

        A new track is needed for an arrival, for a fork, and for a sequence that is older than the trace.
        """
        name = sequence_name(request_id, completion)
        if name not in self.tracks or self.tracks[name].finish_reason is not None:
            self.tracks.pop(name, None)  # a request id can be reused; the new track is then the last one
            letter = LETTERS[self._num_tracks % len(LETTERS)]
            self.tracks[name] = Track(name, letter, self._num_tracks, self._step, self._step)
            self._num_tracks += 1
        track = self.tracks[name]
        self._updated[id(track)] = track
        return track

    def _precedes_arrival(self, finish: Finish, record: StepRecord) -> bool:
        """Return whether the sequence was aborted before a new request with the same id arrived in the same record."""
        if finish.reason != "abort" or all(arrival.request_id != finish.request_id for arrival in record.arrived):
            return False
        track = self.tracks.get(finish.name)
        return track is not None and track.finish_reason is None

    def _append_token(self, track: Track, text: str, parent: Track) -> None:
        if track is not parent and not track.num_generated:  # forked in this step from the request's first completion
            track.prompt, track.num_prompt_tokens = parent.prompt, parent.num_prompt_tokens
            track.max_tokens, track.num_computed = parent.max_tokens, parent.num_computed
            track.first_step = self._step + 1
        text = printable(text)
        track.answer += text
        track.num_new_characters += len(text)
        track.num_generated += 1
        self._grown.append(track)

    def _finish(self, finish: Finish) -> None:
        track = self._track(finish.request_id, finish.completion)
        self.finished.append(track)
        track.end_step, track.finish_reason = self._step, finish.reason
        state = State.FINISHED if finish.reason in ("stop", "length") else State.ENDED_EARLY
        cell = track.cells.get(self._step)
        self._set_cell(track, Cell(state, cell.num_tokens, cell.state) if cell else Cell(state))
        if self.max_finished is not None and len(self.finished) > self.max_finished:
            oldest = self.finished.pop(0)
            if self.tracks.get(oldest.name) is oldest:
                del self.tracks[oldest.name]

    def _set_cell(self, track: Track, cell: Cell) -> None:
        track.set_cell(self._step, cell, self.max_cells)
