"""A trace as Chrome's trace events: a file that https://ui.perfetto.dev opens, and any viewer of that format.

Two processes. "engine" has a thread of steps, each with its five stages inside it, and counters beside them; "requests"
has a thread a completion, on which lies what each step meant to it. A thread shows one thing at a time: a slice begins
where the one before has ended, or lies inside it, as the format wants it.

Format: "Trace Event Format" (Chromium project); https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minillm.errors import TraceError
from minillm.trace import DECODE, PREFILL, STAGES, Arrival, ScheduledChunk, StepRecord, Trace, sequence_name
from minillm.view.shown import shown
from minillm.view.timeline import Cell, Row, State, Timeline

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2  # the two processes
STEPS = 1  # the engine's thread
# Times are counted in eighths of a microsecond. The format has microseconds as decimals, which readers turn to whole
# nanoseconds each in its own way; an eighth is one that every reader gets right, so that no two slices come to overlap.
TICKS = 8_000_000  # a second
LAST_TICK = 2**53  # further on, a JSON number skips some: 35 years
COMPUTED = (State.PREFILL, State.RECOMPUTE, State.DECODE)


def write_perfetto(trace: Trace, path: str | os.PathLike) -> None:
    """Write the whole trace to `path` as a JSON object of trace events, in UTF-8, an event a line.

    Raises
    ------
    TraceError
        As `perfetto_events` does; nothing is written then.
    OSError
        It cannot be written.
    """
    events = perfetto_events(trace)
    with Path(path).open("w", encoding="utf-8") as file:
        facts = {key: shown(fact) if isinstance(fact, str) else fact for key, fact in asdict(trace.facts).items()}
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def perfetto_events(trace: Trace) -> Iterator[Event]:
    """The trace's events in the order of their times, each made when it is asked for.

    Names and texts are safe to show. Where records overlap in time, a step begins when the one before has ended.

    Raises
    ------
    TraceError
        A time is below zero or past the format's range, or a stage took less than no time; before the first event.
    """
    for record in trace:
        for what, seconds in (("its time", record.time), ("its end", record.end)):
            if not 0 <= seconds * TICKS < LAST_TICK:
                raise TraceError(
                    f"step {record.step}: {what} is {seconds:g} s; trace events can have 0 to {LAST_TICK / TICKS:.2g} s"
                )
        for stage in STAGES:
            if record.milliseconds[stage] < 0:
                raise TraceError(
                    f"step {record.step}: {stage} took {record.milliseconds[stage]:g} ms; wanted 0 or more"
                )
    return _Writer(trace).events()


@dataclass
class _Lane:
    """A completion's thread."""

    row: Row
    thread: int
    since: int | None = None  # when it came into the queue, in ticks; None while it is not in it
    is_waiting: bool = False  # a slice of waiting has begun and not ended
    has_token: bool = False


class _Writer:
    """Goes through a trace once, with a Timeline to say what each step meant to whom."""

    def __init__(self, trace: Trace):
        self._trace, self._timeline = trace, Timeline(trace.facts)
        self._end = 0  # of the step before, in ticks
        self._lanes: dict[int, _Lane] = {}  # of the unfinished, by their row's identity
        self._queued: list[_Lane] = []  # those in the queue that have not waited any time yet
        self._last_thread = REQUESTS  # what has its process's own number is taken for the main one, and shown first
        self._labels: set[str] = set()
        self._uses: Counter[str] = Counter()

    def events(self) -> Iterator[Event]:
        """All of them."""
        yield from _name("process", ENGINE, None, f"engine: {shown(self._trace.facts.model)}", ENGINE)
        yield from _name("process", REQUESTS, None, "requests", REQUESTS)
        yield from _name("thread", ENGINE, STEPS, "steps", STEPS)
        for record in self._trace:
            start = max(self._end, round(record.time * TICKS))
            end = start + sum(_stage_ticks(record))
            events = [*_step_events(record, start, end), *self._request_events(record, start, end)]
            yield from sorted(events, key=lambda event: event.get("ts", 0))  # names have no time and come first
            self._end = end
        for lane in self._lanes.values():
            if lane.is_waiting:
                yield _end(lane.thread, self._end)

    def _request_events(self, record: StepRecord, start: int, end: int) -> Iterator[Event]:
        rows = self._timeline.push(record)
        arrivals = {arrival.request_id: arrival for arrival in record.arrived}
        chunks = {sequence_name(chunk.request_id, chunk.completion): chunk for chunk in record.chunks}
        errors = {sequence_name(f.request_id, f.completion): f.error for f in record.finished}
        newest = {row.name: row for row in rows}
        for row in rows:
            if id(row) not in self._lanes:
                lane = self._lanes[id(row)] = self._new_lane(row)
                yield from _name("thread", REQUESTS, lane.thread, self._label(row.name), lane.thread)
            if row.name in arrivals and row is newest[row.name]:
                yield self._arrive(self._lanes[id(row)], arrivals[row.name], start)
        yield from self._begin_to_wait(record.step, start, end)
        for row in rows:
            lane = self._lanes[id(row)]
            if (cell := row.cells.get(record.step)) is not None:
                yield from _cell_events(lane, cell, record.step, start, end, chunks.get(row.name))
                if cell.state == State.PREEMPTED:
                    self._queue(lane, end)
            if row.num_answered and not lane.has_token:
                lane.has_token = True
                yield _instant(lane.thread, "first token", end, {"step": record.step})
            if row.reason is not None:
                ended = {"step": record.step, "reason": shown(row.reason), "tokens": row.num_answered}
                if errors.get(row.name):
                    ended["error"] = shown(errors[row.name])
                yield _instant(lane.thread, cell.state, start if row.reason == "abort" else end, ended)
                del self._lanes[id(row)]

    def _arrive(self, lane: _Lane, arrival: Arrival, start: int) -> Event:
        """It came between the step before and this one."""
        at = min(max(self._end, round(max(0.0, arrival.time) * TICKS)), start)
        self._queue(lane, at)
        args = {"prompt_tokens": arrival.num_prompt_tokens, "max_tokens": arrival.max_tokens, "n": arrival.n}
        args |= {"priority": arrival.priority, "params": shown(json.dumps(arrival.params))}
        args |= {} if arrival.prompt is None else {"prompt": shown(arrival.prompt)}
        return _instant(lane.thread, "arrival", at, args)

    def _queue(self, lane: _Lane, at: int) -> None:
        if lane.since is None:
            lane.since = at
            self._queued.append(lane)

    def _begin_to_wait(self, step: int, start: int, end: int) -> Iterator[Event]:
        """Slices of waiting, for who is in the queue. None of no time: readers would end it before it began."""
        still_queued = []
        for lane in self._queued:
            leaves = step in lane.row.cells
            if (start if leaves else end) > lane.since:
                lane.is_waiting = True
                begin = {"ph": "B", "pid": REQUESTS, "tid": lane.thread, "name": State.WAITING}
                yield begin | {"ts": _microseconds(lane.since)}
            elif not leaves:
                still_queued.append(lane)
        self._queued = still_queued

    def _new_lane(self, row: Row) -> _Lane:
        self._last_thread += 1
        return _Lane(row, self._last_thread)

    def _label(self, name: str) -> str:
        """The thread's name: the sequence's, with a number behind it if another one is shown by the same."""
        label = first = shown(name) or "''"
        while label in self._labels:
            self._uses[first] += 1
            label = f"{first} #{self._uses[first] + 1}"
        self._labels.add(label)
        return label


def _step_events(record: StepRecord, start: int, end: int) -> Iterator[Event]:
    """The step, its stages inside it, and the counters, which keep their values until the next step."""
    tokens = Counter({PREFILL: 0, DECODE: 0})
    for chunk in record.chunks:
        tokens[chunk.phase] += chunk.num_tokens
    sequences = {"running": len(record.running), "waiting": record.num_waiting}
    blocks = {"held": record.pool.num_held, "cached": record.pool.num_cached}
    args = {"step": record.step, "tokens": record.num_tokens} | tokens | sequences | blocks
    for word in ("admitted", "preempted", "finished"):
        if parts := getattr(record, word):
            args[word] = ", ".join(shown(sequence_name(part.request_id, part.completion)) for part in parts)
    for name, values in (("tokens", tokens), ("sequences", sequences), ("blocks", blocks)):
        yield {"ph": "C", "pid": ENGINE, "name": name, "ts": _microseconds(start), "args": dict(values)}
    yield _slice(ENGINE, STEPS, f"step {record.step}", start, end, args)
    for stage, ticks in zip(STAGES, _stage_ticks(record), strict=True):
        yield _slice(ENGINE, STEPS, stage, start, start + ticks)
        start += ticks


def _cell_events(
    lane: _Lane, cell: Cell, step: int, start: int, end: int, chunk: ScheduledChunk | None
) -> Iterator[Event]:
    """What a step meant to a completion."""
    has_ended = cell.state in (State.FINISHED, State.ENDED)
    state = cell.before if has_ended else cell.state
    if lane.is_waiting:
        yield _end(lane.thread, start)
    lane.since, lane.is_waiting = None, False
    if state is None:
        return
    if state == State.PREEMPTED:
        yield _instant(lane.thread, "preemption", start, {"step": step})
    if state in COMPUTED and chunk is not None:
        args = {"step": step, "tokens": cell.num_tokens, "start": chunk.start} | _sampled(chunk)
        name = state if state == State.DECODE else f"{state} {cell.num_tokens}"
    else:
        args, name = {"step": step}, state
    yield _slice(REQUESTS, lane.thread, name, start, end, args)


def _sampled(chunk: ScheduledChunk) -> Event:
    """The token that was chosen for the chunk's own completion, if one was."""
    for token in chunk.sampled:
        if token.completion == chunk.completion:
            chosen = {"token_id": token.token_id, "text": shown(token.text)}
            return chosen if token.logprob is None else chosen | {"logprob": token.logprob}
    return {}


def _stage_ticks(record: StepRecord) -> list[int]:
    return [round(record.milliseconds[stage] * TICKS / 1000) for stage in STAGES]


def _end(thread: int, at: int) -> Event:
    return {"ph": "E", "pid": REQUESTS, "tid": thread, "ts": _microseconds(at)}


def _slice(process: int, thread: int, name: str, start: int, end: int, args: Event | None = None) -> Event:
    event = {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": _microseconds(start)}
    return event | {"dur": _microseconds(end - start)} | ({} if args is None else {"args": args})


def _instant(thread: int, name: str, at: int, args: Event) -> Event:
    return {"ph": "i", "s": "t", "pid": REQUESTS, "tid": thread, "name": name, "ts": _microseconds(at), "args": args}


def _name(kind: str, process: int, thread: int | None, name: str, place: int) -> Iterator[Event]:
    """What a process or a thread is called, and where among the others it is shown."""
    which = {"ph": "M", "pid": process} | ({} if thread is None else {"tid": thread})
    yield which | {"name": f"{kind}_name", "args": {"name": name}}
    yield which | {"name": f"{kind}_sort_index", "args": {"sort_index": place}}


def _microseconds(ticks: int) -> float:
    return ticks * 1_000_000 / TICKS
