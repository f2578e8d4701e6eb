"""Trace events: valid for any reader of the format, and complete."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from support.simulated_runs import simulated_runs, single_step_run
from support.traces import FACTS, hostile_texts, step, traces

from minillm import TraceError
from minillm.trace import DECODE, PREFILL, STAGES, Admission, Arrival, Finish, Trace, sequence_name
from minillm.view import Timeline, perfetto_events, write_perfetto
from minillm.view.perfetto import ENGINE, REQUESTS
from minillm.view.printable import printable

TICK = 0.125  # microseconds: the precision of times


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("perfetto") / "trace.json"


def written_events(trace, path):
    """Write the trace, and read its events from the file."""
    write_perfetto(trace, path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def labels(events):
    """The threads of the requests: number -> name."""
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name" and event["pid"] == REQUESTS
    }


def select(events, phase, process):
    return [event for event in events if event["ph"] == phase and event["pid"] == process]


@settings(max_examples=100)
@given(trace=traces() | simulated_runs())
def test_slices_of_a_thread_are_sorted_and_nested(path, trace):
    events = written_events(trace, path)
    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    assert all(time >= 0 and time % TICK == 0 for time in times)
    open_slices = {}  # thread -> the ends of the open slices, outermost first; None if the end is not known yet
    begins = {}
    for event in timed:
        stack = open_slices.setdefault((event["pid"], event.get("tid")), [])
        while stack and stack[-1] is not None and stack[-1] <= event["ts"]:
            stack.pop()
        if event["ph"] == "B":
            assert not stack
            stack.append(None)
            begins[event["tid"]] = event["ts"]
        elif event["ph"] == "E":
            assert stack.pop() is None
            assert begins[event["tid"]] < event["ts"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert None not in stack
            assert not stack or event["ts"] + event["dur"] <= stack[-1]
            assert len(stack) < (2 if event["pid"] == ENGINE else 1)
            stack.append(event["ts"] + event["dur"])
        else:
            assert event["ph"] in "Ci"
    assert not [stack for stack in open_slices.values() if None in stack]
    named = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    assert {thread for thread in open_slices if thread[1] is not None} <= named
    names = labels(events)
    assert len(set(names.values())) == len(names)


@settings(max_examples=100)
@given(trace=traces() | simulated_runs())
def test_steps_stages_and_counters_are_those_of_the_records(path, trace):
    events = written_events(trace, path)
    slices, counters = select(events, "X", ENGINE), select(events, "C", ENGINE)
    assert [event["name"] for event in slices] == [
        name for record in trace for name in (f"step {record.step}", *STAGES)
    ]
    assert len(counters) == 3 * len(trace)
    for number, record in enumerate(trace):
        whole, *stages = slices[6 * number : 6 * number + 6]
        for stage in stages:
            assert stage["dur"] == pytest.approx(1000 * record.milliseconds[stage["name"]], abs=TICK)
        assert whole["dur"] == sum(stage["dur"] for stage in stages)
        counted = {PREFILL: 0, DECODE: 0}
        for chunk in record.chunks:
            counted[chunk.phase] += chunk.num_tokens
        sequences = {"running": len(record.running), "waiting": record.num_waiting}
        blocks = {"held": record.pool.num_held, "cached": record.pool.num_cached}
        shared = {"step": record.step, "tokens": record.num_tokens}
        assert whole["args"].items() >= (shared | counted | sequences | blocks).items()
        values = {event["name"]: event["args"] for event in counters[3 * number : 3 * number + 3]}
        assert values == {"tokens": counted, "sequences": sequences, "blocks": blocks}
        assert whole["ts"] >= 1e6 * record.time - TICK


@settings(max_examples=60)
@given(trace=simulated_runs())
def test_each_thread_shows_the_history_of_its_completion(path, trace):
    """It contains every chunk, token and end. In other steps the completion waits or is stalled."""
    events = written_events(trace, path)
    names = labels(events)
    slices = {(names[e["tid"]], e["args"]["step"]): e for e in select(events, "X", REQUESTS)}
    assert len(slices) == len(select(events, "X", REQUESTS))
    instants = {(names[e["tid"]], e["name"]): e["args"] for e in select(events, "i", REQUESTS)}
    timeline, seen = Timeline(trace.facts), set()
    for record in trace:
        timeline.push(record)
        for chunk in record.chunks:
            name = chunk.name
            event = slices[name, record.step]
            cell = timeline.tracks[name].cells[record.step]
            assert event["name"].rstrip(" 0123456789") == (cell.state_before_end or cell.state)
            assert (event["args"]["start"], event["args"]["tokens"]) == (chunk.start, chunk.num_tokens)
            for token in chunk.sampled:
                own = sequence_name(chunk.request_id, token.completion)
                if own == name:
                    assert (event["args"]["token_id"], event["args"]["text"]) == (token.token_id, printable(token.text))
                if own not in seen:
                    assert instants[own, "first token"] == {"step": record.step}
                    seen.add(own)
            slices.pop((name, record.step))
        for arrival in record.arrived:
            args = instants[arrival.request_id, "arrival"]
            assert (args["prompt_tokens"], args["prompt"]) == (arrival.num_prompt_tokens, printable(arrival.prompt))
        for finish in record.finished:
            args = instants.get((finish.name, "finished")) or instants[finish.name, "ended early"]
            assert args["step"] == record.step
            assert args["reason"] == finish.reason
    running = {(sequence.name, record.step) for record in trace for sequence in record.running}
    preempted = {(preemption.name, record.step) for record in trace for preemption in record.preempted}
    for key, event in slices.items():  # slices without a chunk
        assert event["name"] == ("preempted" if key in preempted else "stalled")
        assert key in running | preempted
    assert preempted <= slices.keys()


def test_a_reused_name_gets_a_new_thread():
    """Request a ends and a new one has the same id; that one is aborted, and a third arrives before the next step."""
    arrival = Arrival("a", 0.0, 3, None, {}, 1, 2, 0)
    trace = Trace(
        FACTS,
        [
            step(0, arrived=[arrival], finished=[Finish("a", 0, "length")]),
            step(1, arrived=[arrival, Arrival("a #2", 0.0, 3, None, {}, 1, 2, 0)]),
            step(2, aborted=["a"], arrived=[arrival], finished=[Finish("a", 0, "abort")]),
            step(3, finished=[Finish("a", 0, "error", "no <b>luck</b>")]),
        ],
    )
    events = list(perfetto_events(trace))
    assert labels(events) == {3: "a", 4: "a #2", 5: "a #2 #2", 6: "a #3"}
    ends = [(e["tid"], e["name"], e["args"]["reason"]) for e in events if e.get("args", {}).get("reason")]
    assert ends == [(3, "finished", "length"), (4, "ended early", "abort"), (6, "ended early", "error")]
    waits = Counter((event["tid"], event["ph"]) for event in events if event["ph"] in "BE")
    assert waits == {(thread, phase): 1 for thread in (4, 5, 6) for phase in "BE"}  # the first one did not wait


@given(name=hostile_texts, prompt=hostile_texts, text=hostile_texts)
def test_hostile_text_is_safe(path, name, prompt, text):
    for event in written_events(single_step_run(name, prompt, text), path):
        strings = [
            event.get("name", ""),
            *(value for value in event.get("args", {}).values() if isinstance(value, str)),
        ]
        assert all(string.isprintable() for string in strings)
    assert path.read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": -1.0}, "step 0: its time is -1 s; trace events can hold 0 to"),
        ({"time": 1e300}, "step 0: its time is 1e\\+300 s"),
        ({"milliseconds": dict.fromkeys(STAGES, 1e300)}, "step 0: its end is 5e\\+297 s"),
        ({"milliseconds": dict.fromkeys(STAGES, -1.0)}, "step 0: (schedule took -1 ms; expected 0|its end is -)"),
    ],
)
def test_times_outside_the_range_of_the_format(tmp_path, change, message):
    record = step(0, admitted=[Admission("a", 0, 4, 0, False)])
    vars(record).update(change)
    with pytest.raises(TraceError, match=message):
        write_perfetto(Trace(FACTS, [record]), tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()
