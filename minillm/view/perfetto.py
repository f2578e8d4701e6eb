"""A trace as Chrome trace events, for https://ui.perfetto.dev and every other viewer of that format.

The file has two processes. "engine" has a thread of steps, with the five stages nested in each, and counters.
"requests" has one thread per completion, with a slice for its state in each step. As the format requires, slices of one
thread either follow one another or are nested.

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
from minillm.trace import DECODE, PREFILL, STAGES, Arrival, ScheduledChunk, StepRecord, Trace
from minillm.view.printable import printable
from minillm.view.timeline import Cell, State, Timeline, Track

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2  # process ids
STEPS = 1  # thread id in the engine's process
# Times are counted in eighths of a microsecond. The format stores decimal microseconds, and readers convert them to
# integer nanoseconds in different ways. They all convert an eighth (125 ns) exactly, so rounding creates no overlaps.
TICKS_PER_SECOND = 8_000_000
MAX_TICKS = 2**53  # about 35 years; beyond this, JSON numbers skip integers
COMPUTED = (State.PREFILL, State.RECOMPUTE, State.DECODE)


def write_perfetto(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to `path` as a JSON object of trace events, in UTF-8, with one event per line.

    Raises
    ------
    TraceError
        `perfetto_events` raised it; no file is written.
    OSError
        The file cannot be written.
    """
    events = perfetto_events(trace)
    with Path(path).open("w", encoding="utf-8") as file:
        facts = {key: printable(fact) if isinstance(fact, str) else fact for key, fact in asdict(trace.facts).items()}
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def perfetto_events(trace: Trace) -> Iterator[Event]:
    """Return the trace's events in order of time. They are created as the iterator advances.

    Names and texts consist of printable characters. If two records overlap in time, the second step begins when the
    first ends.

    Raises
    ------
    TraceError
        A time is negative or exceeds the format's range, or the duration of a stage is negative. The error is raised
        before the first event.
    """
    for record in trace:
        for label, seconds in (("its time", record.time), ("its end", record.end)):
            if not 0 <= seconds * TICKS_PER_SECOND < MAX_TICKS:
                raise TraceError(
                    f"step {record.step}: {label} is {seconds:g} s; "
                    f"trace events can hold 0 to {MAX_TICKS / TICKS_PER_SECOND:.2g} s"
                )
        for stage in STAGES:
            if record.milliseconds[stage] < 0:
                raise TraceError(
                    f"step {record.step}: {stage} took {record.milliseconds[stage]:g} ms; expected 0 or more"
                )
    return _EventWriter(trace).events()


@dataclass
class _Thread:
    """The thread of one completion.

    Attributes
    ----------
    track : the completion's track in the timeline.
    number : the thread's id.
    queued_at : when the completion entered the queue, in ticks; None while it is not in the queue.
    is_waiting : whether a slice of waiting is open.
    has_token : whether its first token has been sampled.
    """

    track: Track
    number: int
    queued_at: int | None = None
    is_waiting: bool = False
    has_token: bool = False


class _EventWriter:
    """Iterate over a trace once, with a Timeline that derives the state of every sequence."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._timeline = trace, Timeline(trace.facts)
        self._end = 0  # of the previous step, in ticks
        self._threads: dict[int, _Thread] = {}  # of the unfinished completions, by the identity of their tracks
        self._queued: list[_Thread] = []  # in the queue, but without a slice of waiting yet
        self._last_number = REQUESTS  # viewers treat the thread with its process's id as the main thread
        self._labels: set[str] = set()
        self._label_counts: Counter[str] = Counter()

    def events(self) -> Iterator[Event]:
        """Return all events of the trace."""
        yield from _name_events("process", ENGINE, None, f"engine: {printable(self._trace.facts.model)}", ENGINE)
        yield from _name_events("process", REQUESTS, None, "requests", REQUESTS)
        yield from _name_events("thread", ENGINE, STEPS, "steps", STEPS)
        for record in self._trace:
            start = max(self._end, round(record.time * TICKS_PER_SECOND))
            end = start + sum(_stage_ticks(record))
            events = [*_step_events(record, start, end), *self._request_events(record, start, end)]
            yield from sorted(events, key=lambda event: event.get("ts", 0))  # names have no time and come first
            self._end = end
        for thread in self._threads.values():
            if thread.is_waiting:
                yield _end_event(thread.number, self._end)

    def _request_events(self, record: StepRecord, start: int, end: int) -> Iterator[Event]:
        tracks = self._timeline.push(record)
        arrivals = {arrival.request_id: arrival for arrival in record.arrived}
        chunks = {chunk.name: chunk for chunk in record.chunks}
        errors = {finish.name: finish.error for finish in record.finished}
        newest = {track.name: track for track in tracks}
        for track in tracks:
            if id(track) not in self._threads:
                thread = self._threads[id(track)] = self._new_thread(track)
                yield from _name_events("thread", REQUESTS, thread.number, self._label(track.name), thread.number)
            if track.name in arrivals and track is newest[track.name]:
                yield self._arrive(self._threads[id(track)], arrivals[track.name], start)
        yield from self._begin_waiting(record.step, start, end)
        for track in tracks:
            thread = self._threads[id(track)]
            if (cell := track.cells.get(record.step)) is not None:
                yield from _cell_events(thread, cell, record.step, start, end, chunks.get(track.name))
                if cell.state == State.PREEMPTED:
                    self._enqueue(thread, end)
            if track.num_generated and not thread.has_token:
                thread.has_token = True
                yield _instant_event(thread.number, "first token", end, {"step": record.step})
            if cell is not None and track.finish_reason is not None:
                args = {"step": record.step, "reason": printable(track.finish_reason), "tokens": track.num_generated}
                if error := errors.get(track.name):
                    args["error"] = printable(error)
                yield _instant_event(thread.number, cell.state, start if track.finish_reason == "abort" else end, args)
                del self._threads[id(track)]

    def _arrive(self, thread: _Thread, arrival: Arrival, start: int) -> Event:
        """Return the event of an arrival. Its time is limited to the gap between the previous step and this one."""
        time = min(max(self._end, round(max(0.0, arrival.time) * TICKS_PER_SECOND)), start)
        self._enqueue(thread, time)
        args: Event = {"prompt_tokens": arrival.num_prompt_tokens, "max_tokens": arrival.max_tokens, "n": arrival.n}
        args |= {"priority": arrival.priority, "params": printable(json.dumps(arrival.params))}
        args |= {} if arrival.prompt is None else {"prompt": printable(arrival.prompt)}
        return _instant_event(thread.number, "arrival", time, args)

    def _enqueue(self, thread: _Thread, time: int) -> None:
        if thread.queued_at is None:
            thread.queued_at = time
            self._queued.append(thread)

    def _begin_waiting(self, step: int, start: int, end: int) -> Iterator[Event]:
        """Open a slice of waiting for each queued sequence.

        Slices of no duration are left out, because readers would place their ends before their beginnings.
        """
        still_queued: list[_Thread] = []
        for thread in self._queued:
            if thread.queued_at is None:
                continue
            leaves_queue = step in thread.track.cells
            if (start if leaves_queue else end) > thread.queued_at:
                thread.is_waiting = True
                begin = {"ph": "B", "pid": REQUESTS, "tid": thread.number, "name": State.WAITING}
                yield begin | {"ts": _microseconds(thread.queued_at)}
            elif not leaves_queue:
                still_queued.append(thread)
        self._queued = still_queued

    def _new_thread(self, track: Track) -> _Thread:
        self._last_number += 1
        return _Thread(track, self._last_number)

    def _label(self, name: str) -> str:
        """Return the thread's name: the sequence's, with a number appended if the name is already in use."""
        label = base = printable(name) or "''"
        while label in self._labels:
            self._label_counts[base] += 1
            label = f"{base} #{self._label_counts[base] + 1}"
        self._labels.add(label)
        return label


def _step_events(record: StepRecord, start: int, end: int) -> Iterator[Event]:
    """Return the step, its nested stages, and the counters, which keep their values until the next step."""
    tokens = Counter({PREFILL: 0, DECODE: 0})
    for chunk in record.chunks:
        tokens[chunk.phase] += chunk.num_tokens
    sequences = {"running": len(record.running), "waiting": record.num_waiting}
    blocks = {"held": record.pool.num_held, "cached": record.pool.num_cached}
    args: Event = {"step": record.step, "tokens": record.num_tokens} | tokens | sequences | blocks
    for kind in ("admitted", "preempted", "finished"):
        if events := getattr(record, kind):
            args[kind] = ", ".join(printable(event.name) for event in events)
    for name, values in (("tokens", tokens), ("sequences", sequences), ("blocks", blocks)):
        yield {"ph": "C", "pid": ENGINE, "name": name, "ts": _microseconds(start), "args": dict(values)}
    yield _slice_event(ENGINE, STEPS, f"step {record.step}", start, end, args)
    for stage, ticks in zip(STAGES, _stage_ticks(record), strict=True):
        yield _slice_event(ENGINE, STEPS, stage, start, start + ticks)
        start += ticks


def _cell_events(
    thread: _Thread, cell: Cell, step: int, start: int, end: int, chunk: ScheduledChunk | None
) -> Iterator[Event]:
    """Return the events of one completion in one step."""
    has_ended = cell.state in (State.FINISHED, State.ENDED_EARLY)
    state = cell.state_before_end if has_ended else cell.state
    if thread.is_waiting:
        yield _end_event(thread.number, start)
    thread.queued_at, thread.is_waiting = None, False
    if state is None:
        return
    if state == State.PREEMPTED:
        yield _instant_event(thread.number, "preemption", start, {"step": step})
    name: str = state
    args: Event = {"step": step}
    if state in COMPUTED and chunk is not None:
        args |= {"tokens": cell.num_tokens, "start": chunk.start} | _sampled_args(chunk)
        name = state if state == State.DECODE else f"{state} {cell.num_tokens}"
    yield _slice_event(REQUESTS, thread.number, name, start, end, args)


def _sampled_args(chunk: ScheduledChunk) -> Event:
    """Return the token sampled for the chunk's own completion, if there is one."""
    for token in chunk.sampled:
        if token.completion == chunk.completion:
            args = {"token_id": token.token_id, "text": printable(token.text)}
            return args if token.logprob is None else args | {"logprob": token.logprob}
    return {}


def _stage_ticks(record: StepRecord) -> list[int]:
    return [round(record.milliseconds[stage] * TICKS_PER_SECOND / 1000) for stage in STAGES]


def _end_event(thread: int, time: int) -> Event:
    return {"ph": "E", "pid": REQUESTS, "tid": thread, "ts": _microseconds(time)}


def _slice_event(process: int, thread: int, name: str, start: int, end: int, args: Event | None = None) -> Event:
    event = {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": _microseconds(start)}
    return event | {"dur": _microseconds(end - start)} | ({} if args is None else {"args": args})


def _instant_event(thread: int, name: str, time: int, args: Event) -> Event:
    return {"ph": "i", "s": "t", "pid": REQUESTS, "tid": thread, "name": name, "ts": _microseconds(time), "args": args}


def _name_events(kind: str, process: int, thread: int | None, name: str, sort_index: int) -> Iterator[Event]:
    """Return the metadata events that set the name and the order of a process or thread."""
    event: Event = {"ph": "M", "pid": process} | ({} if thread is None else {"tid": thread})
    yield event | {"name": f"{kind}_name", "args": {"name": name}}
    yield event | {"name": f"{kind}_sort_index", "args": {"sort_index": sort_index}}


def _microseconds(ticks: int) -> float:
    return ticks * 1_000_000 / TICKS_PER_SECOND
