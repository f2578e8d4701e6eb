"""Traces: what is written is read back equal, and a file that says something else is told apart, line by line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import TraceError
from minillm.trace import (
    STAGES,
    Admission,
    Arrival,
    BlockCopy,
    ChunkRecord,
    Finish,
    PoolState,
    Preemption,
    RunFacts,
    RunningSequence,
    SampledToken,
    StepRecord,
    Trace,
    percentile,
    request_metrics,
    run_metrics,
    to_json,
)
from minillm.trace.roofline import ModelCosts

N = 8  # blocks
TWO = [RunningSequence("a", 0, 3, 3, [0, 1]), RunningSequence("b", 0, 2, 2, [1])]  # who share a block
FACTS = RunFacts("tiny", "chunked", "fcfs", 4, N, 64, 4, 0.01, True, ModelCosts(100, 8, 200, 50, 16))

names = st.text(max_size=5)
counts = st.integers(0, 100)
numbers = st.floats(0, 1e6)
blocks = st.integers(0, N - 1)
held = st.lists(blocks, max_size=4)


@st.composite
def tables(draw, groups):
    """A block table, of each group of layers side by side; the first of each may have been given back."""
    rows = draw(st.integers(0, 5))
    parts = []
    for _ in range(groups):
        gone = draw(st.integers(0, rows))
        parts.append([-1] * gone + draw(st.lists(blocks, min_size=rows - gone, max_size=rows - gone)))
    return [block for row in zip(*parts, strict=True) for block in row]


tokens = st.builds(SampledToken, counts, counts, names, st.none() | st.floats(-50, 0), st.none() | names)


def chunks(groups):
    phases, token_ids = st.sampled_from(["prefill", "decode"]), st.lists(counts, min_size=1, max_size=5)
    sampled = st.lists(tokens, max_size=3)
    return st.builds(ChunkRecord, names, counts, phases, counts, token_ids, tables(groups), sampled)


params = st.dictionaries(names, counts | names | st.lists(counts, max_size=2), max_size=2)


@st.composite
def pools(draw, running):
    """The pool while those run: a block is held by as many as name it."""
    references = [sum(sequence.block_table.count(block) for sequence in running) for block in range(N)]
    cached = [block for block, count in enumerate(references) if count == 0 and draw(st.booleans())]
    copies = st.builds(BlockCopy, blocks, blocks)
    return PoolState(references, cached, draw(held), draw(st.lists(copies, max_size=2)))


def few(strategy):
    return st.lists(strategy, max_size=2)


@st.composite
def traces(draw):
    windows = draw(st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3))
    trace, first, time, groups = Trace(replace(FACTS, windows=windows)), draw(counts), 0.0, len(windows)
    for step in range(draw(st.integers(0, 3))):
        time += draw(numbers)
        running = draw(few(st.builds(RunningSequence, names, counts, counts, counts, tables(groups))))
        waiting = draw(few(names))
        trace.append(
            StepRecord(
                step=first + step,
                time=time,
                milliseconds={stage: draw(numbers) for stage in STAGES},
                arrived=draw(
                    few(
                        st.builds(
                            Arrival,
                            names,
                            st.floats(0, time),
                            counts,
                            st.none() | names,
                            params,
                            counts,
                            counts,
                            counts,
                            st.none() | few(names),
                        )
                    )
                ),
                aborted=draw(few(names)),
                admitted=draw(few(st.builds(Admission, names, counts, counts, counts, st.booleans()))),
                preempted=draw(few(st.builds(Preemption, names, counts, counts))),
                finished=draw(
                    few(st.builds(Finish, names, counts, names, st.none() | names, st.just(ValueError("kept apart"))))
                ),
                chunks=draw(few(chunks(groups))),
                running=running,
                waiting=waiting,
                num_waiting=len(waiting) + draw(counts),
                pool=draw(pools(running)),
            )
        )
    return trace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "trace.jsonl"


@given(traces())
def test_what_is_written_is_read_back(path, trace):
    trace.write(path)
    again = Trace.read(path)
    assert again == trace
    assert list(again.lines()) == list(trace.lines()) == path.read_text(encoding="utf-8").splitlines()
    for record in again:
        assert record.pool.num_held + record.pool.num_cached + record.pool.num_free == N
        assert record.pool.states().count("cached") == record.pool.num_cached
        assert f"StepRecord({record.step}: " in repr(record)


@settings(max_examples=200)
@given(trace=traces(), cut=st.integers(1, 10_000))
def test_a_file_that_was_cut_off_says_so(path, trace, cut):
    trace.write(path)
    whole = path.read_bytes()
    left = whole[: max(0, len(whole) - cut)]
    path.write_bytes(left)
    if left.endswith(b"\n"):  # only whole steps are missing
        assert Trace.read(path).steps == trace.steps[: len(left.splitlines()) - 1]
    else:
        with pytest.raises(TraceError, match=rf"line {left.count(10) + 1} (has no end|is missing: the file is empty)"):
            Trace.read(path)


def test_a_trace_replaces_traces_only(tmp_path):
    """Not the model that runs, whose file somebody names by mistake."""
    trace, path = Trace(FACTS, [step(0)]), tmp_path / "file"
    for there in ("GGUF...", '{"step": 0}\n', "\n"):
        path.write_text(there)
        with pytest.raises(TraceError, match="file is there, and is no trace; it would be lost"):
            trace.write(path)
        assert path.read_text() == there
    for there in ("", '{"minillm', '{"minillm_trace": 1, "run": {}}\n', "\n".join(trace.lines())):
        path.write_text(there)
        trace.write(path)
        assert path.read_text().splitlines() == list(trace.lines())


def places(value, path=()):
    """Every place in a JSON value, as the keys that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@settings(max_examples=300)
@given(trace=traces(), data=st.data())
def test_a_field_changed_by_hand_is_named_or_harmless(path, trace, data):
    """Whatever is put in place of any value: a trace that holds together, or an error that names the line."""
    lines = [json.loads(line) for line in trace.lines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    *way, last = data.draw(st.sampled_from(list(places(lines[number]))))
    place = lines[number]
    for key in way:
        place = place[key]
    wild = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | names | st.lists(counts, max_size=2)
    place[last] = data.draw(wild | st.just({}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    message = ""
    try:
        again = Trace.read(path)
        for record in again:
            assert repr(record)
            assert len(record.pool.states()) == record.pool.num_blocks
        assert run_metrics(again).num_requests == len(request_metrics(again))
    except TraceError as error:
        message = str(error)
    assert not message or f"line {number + 1}" in message or f"line {number + 2}" in message  # the next no longer fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["milliseconds"].update(forward=-1.0), "a stage took"),
        (lambda s: s.update(time=1.7e308, milliseconds=dict.fromkeys(STAGES, 1.7e308)), "come to no number"),
        (
            lambda s: s.update(num_waiting=2**53),
            "line 2, num_waiting is 9007199254740992; wanted an integer of at most 2\^53",
        ),
        (
            lambda s: s["pool"].update(references=[-(2**60)] * N),
            "line 2, pool, references is .*; wanted an integer of at most 2\^53",
        ),
        (lambda s: s["running"].append(["r", 0, 1, 1, [0]]), "line 2, running is .*; wanted an object with request_id"),
        (lambda s: s["pool"].update(cached=[3, N]), "line 2: blocks are 0 to 7, but it names 8"),
        (lambda s: s["pool"].update(references=[0] * 10_000), "line 2: 10000 blocks, but the header has 8"),
        (lambda s: s["pool"].update(cached=[2, 1]), "line 2: a cached block is held as well"),
        (lambda s: s["pool"].update(cached=[-1]), "line 2: blocks are 0 to 7, but it names -1"),
        (
            lambda s: s["running"][0].update(block_table=[-1, 0, -1, 1]),
            "line 2: a block table names block 0 before one given back \(-1\); those come first",
        ),
        (lambda s: s["running"][0].update(block_table=[-2, 0, 1]), "line 2: blocks are 0 to 7, but it names -2"),
        (lambda s: s["running"][0].update(block_table=[-1, 1]), "line 2: block 0 has 1 references, but 0 tables name"),
        (lambda s: s["pool"].update(evicted=[-1]), "line 2: blocks are 0 to 7, but it names -1"),
        (lambda s: s["pool"].update(copies=[{"source": 1, "target": N}]), "line 2: blocks are 0 to 7, but it names 8"),
        (lambda s: s["pool"].update(references=[1, 2, 0, 1] + [0] * 4), "line 2: block 3 has 1 references, but 0"),
        (lambda s: s["pool"].update(references=[0] * N), "line 2: block 0 has 0 references, but 1 tables name it"),
        (lambda s: s.update(waiting=["a", "b"], num_waiting=1), "line 2: 2 wait by name, but only 1 in all"),
        (lambda s: s.update(num_waiting=-1), "line 2: 0 wait by name, but only -1 in all"),
        (lambda s: s.update(time=-0.5), "line 2: time -0.5 is before the engine was made"),
        (lambda s: s["arrived"].append(arrival(time=0.5)), "line 2: request 'a' arrived at 0.5, after the step"),
        (lambda s: s["arrived"].append(arrival(time=-1.0)), "line 2: request 'a' arrived at -1.0, before the engine"),
        (
            lambda s: s["arrived"].append(arrival(params={"deep": json.loads("[" * 300 + "]" * 300)})),
            "line 2, arrived, params, deep has lists or objects in each other more than 20 deep",
        ),
    ],
)
def test_what_cannot_be(path, change, message):
    line = to_json(step(0, running=TWO))
    change(line)
    header = next(Trace(FACTS).lines())
    path.write_text(f"{header}\n{json.dumps(line)}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=message):
        Trace.read(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0, 1, 2], "line 2: a block table has 3 blocks, of 2 groups of layers"),
        ([0, -1, -1, -1], "line 2: a block table names block 0 before one given back"),
        ([-1, 0, -1, -1], "line 2: a block table names block 0 before one given back"),
    ],
)
def test_what_cannot_be_of_two_groups_of_layers(path, table, message):
    trace = Trace(replace(FACTS, windows=[5, None]), [step(0, running=[RunningSequence("a", 0, 3, 3, table)])])
    trace.write(path)
    with pytest.raises(TraceError, match=message):
        Trace.read(path)


@pytest.mark.parametrize("version", [2, 3])
def test_the_versions_before_are_read_as_well(path, version):
    trace = Trace(FACTS, [step(0, running=TWO)])
    header, *steps = trace.lines()
    older = header.replace('"minillm_trace": 4', f'"minillm_trace": {version}').replace(', "windows": [null]', "")
    assert "windows" not in older
    path.write_text("".join(f"{line}\n" for line in (older, *steps)), encoding="utf-8")
    assert Trace.read(path) == trace


def test_what_is_no_trace(path):
    header = next(Trace(FACTS).lines())
    step = '{"step": 0}'
    other = header.replace('"minillm_trace": 4', '"minillm_trace": 1')
    for text, message in (
        ("", "line 1 is missing: the file is empty"),
        (step + "\n", "line 1 is no trace's header"),
        ("TIMESTAMP,ContextTokens\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 holds a JSON list; wanted an object"),
        (other + "\n", "line 1: a trace of version 1, but this minillm reads version 4"),
        (header.replace("[null]", "[]") + "\n", "line 1, run, windows is \[\]; wanted one for each group of layers"),
        (header.replace("[null]", "[null, 0]") + "\n", "line 1, run, windows is .*; wanted one .*, 1 or more"),
        ('{"minillm_trace": 4}\n', "line 1, run is None; wanted an object with model"),
        (
            header.replace('"max_sequences": 4', '"max_sequences": 0') + "\n",
            "line 1, run, max_sequences is 0; wanted 1",
        ),
        (
            header.replace('"head_flops": 50', '"head_flops": -50') + "\n",
            "line 1, run, costs, head_flops is -50; wanted 0",
        ),
        (f"{header}\n{step}\n", r"line 2: a StepRecord lacks fields \['aborted', .*unknown ones \[\]"),
        (f"{header}\n{other}\n", "line 2 is another header"),
        (f"{header}\n\xff\n", "line 2 is not JSON"),
        (f"{header}\n{'[' * 100_000}\n", "line 2 is not JSON"),
    ):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(TraceError, match=message):
            Trace.read(path)
    with pytest.raises(FileNotFoundError):
        Trace.read(path.with_name("absent.jsonl"))


def arrival(**more):
    return to_json(Arrival("a", 0.0, 3, None, {}, 1, 2, 0)) | more


def step(number, **more):
    """A step of a second, of which the forward pass takes half; blocks 0 and 1 are held, the second by two."""
    defaults = {name: [] for name in ("arrived", "aborted", "admitted", "preempted", "finished", "chunks", "running")}
    milliseconds = dict.fromkeys(STAGES, 0.0) | {"forward": 500.0}
    pool = PoolState([1, 2] + [0] * (N - 2))
    return StepRecord(
        step=number,
        time=float(number),
        milliseconds=milliseconds,
        waiting=[],
        num_waiting=0,
        pool=pool,
        **(defaults | more),
    )


def chunk(request_id, start, tokens, sampled=(), completion=0):
    out = [SampledToken(which, 7, "g", None) for which in sampled]
    return ChunkRecord(request_id, completion, "prefill", start, [5] * tokens, [0], out)


def test_metrics_of_a_run_small_enough_to_work_out_by_hand():
    """a: two completions, of which the second is preempted after three tokens. b: waits a step, half of it is cached.
    c: is aborted while it waits."""
    trace = Trace(
        FACTS,
        [
            step(
                0,
                arrived=[Arrival(name, 0.0, 4, None, {}, n, 9, 0) for name, n in (("a", 2), ("b", 1), ("c", 1))],
                admitted=[Admission("a", 0, 4, 0, False)],
                chunks=[chunk("a", 0, 4, sampled=[0, 1])],
            ),
            step(
                1,
                aborted=["c"],
                finished=[Finish("c", 0, "abort")],
                admitted=[Admission("b", 0, 4, 2, False)],
                chunks=[chunk("a", 4, 1, [0]), chunk("a", 4, 1, [1], 1), chunk("b", 2, 2, [0])],
            ),
            step(
                2,
                preempted=[Preemption("a", 1, 5)],
                finished=[Finish("a", 0, "stop"), Finish("b", 0, "length")],
                chunks=[chunk("a", 5, 1, [0]), chunk("b", 4, 1, [0])],
            ),
            step(3),  # nothing to do: left out of all means
            step(
                4,
                admitted=[Admission("a", 1, 6, 1, True)],
                finished=[Finish("a", 1, "length")],
                chunks=[chunk("a", 1, 5, [1], 1)],
            ),
        ],
    )
    requests = request_metrics(trace)
    assert list(requests) == ["a", "b", "c"]
    a, b, c = requests.values()
    assert (a.queue_time, a.ttft, a.end_to_end, a.finish_reason) == (0.0, 0.5, 4.5, "length")
    assert a.inter_token_latencies == [1.0, 1.0, 1.0, 3.0]
    assert a.tpot == 1.5
    assert (a.num_generated_tokens, a.num_preemptions, a.num_recomputed_tokens) == (6, 1, 4)  # positions 1 to 4
    assert (b.queue_time, b.ttft, b.tpot, b.end_to_end) == (1.0, 1.5, 1.0, 2.5)
    assert (b.num_cached_tokens, b.num_recomputed_tokens) == (2, 0)
    assert (c.queue_time, c.ttft, c.tpot, c.end_to_end, c.finish_reason) == (None, None, None, 1.0, "abort")
    run = run_metrics(trace)
    assert (run.num_requests, run.num_finished, run.num_steps, run.seconds) == (3, 2, 4, 4.5)
    assert (run.num_computed_tokens, run.num_generated_tokens) == (4 + 4 + 2 + 5, 8)
    assert run.throughput == 8 / 4.5
    assert (run.mean_batch_sequences, run.batch_occupancy) == (7 / 4, 7 / 16)
    assert (run.kv_utilisation, run.peak_blocks, run.hit_rate) == (2 / 8, 2, 2 / 8)
    assert (run.num_preemptions, run.num_recomputed_tokens) == (1, 4)
    assert (run.median_ttft, run.median_tpot) == (1.0, 1.25)


def test_metrics_of_nothing():
    run = run_metrics(Trace(FACTS))
    assert (run.num_requests, run.seconds, run.throughput, run.median_ttft) == (0, 0.0, 0.0, None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    np.testing.assert_allclose(percentile(values, percent), np.percentile(values, percent), rtol=1e-9, atol=1e-6)
    assert percentile([], percent) is None
