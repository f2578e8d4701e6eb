"""Trace files: a trace that is written can be read back; any other content is reported, with its line."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_runs import single_step_run
from support.traces import FACTS, NUM_BLOCKS, counts, names, step, traces

from minillm import TraceError
from minillm.trace import STAGES, Arrival, RunningSequence, Trace, request_metrics, run_metrics, to_json

SHARING = [RunningSequence("a", 0, 3, 3, [[0, 1]]), RunningSequence("b", 0, 2, 2, [[1]])]  # both list block 1


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
        assert record.pool.num_held + record.pool.num_cached + record.pool.num_free == NUM_BLOCKS
        assert record.pool.states().count("cached") == record.pool.num_cached
        assert f"StepRecord({record.step}: " in repr(record)


@settings(max_examples=200)
@given(trace=traces(), num_bytes=st.integers(1, 10_000))
def test_a_truncated_file(path, trace, num_bytes):
    trace.write(path)
    whole = path.read_bytes()
    rest = whole[: max(0, len(whole) - num_bytes)]
    path.write_bytes(rest)
    if rest.endswith(b"\n"):  # only whole steps are missing
        assert Trace.read(path).steps == trace.steps[: len(rest.splitlines()) - 1]
    else:
        with pytest.raises(
            TraceError, match=rf"line {rest.count(10) + 1} (has no line end|is missing: the file is empty)"
        ):
            Trace.read(path)


def test_only_a_trace_is_overwritten(tmp_path):
    """Any other file, such as the model, is kept if it is named by mistake."""
    trace, path = Trace(FACTS, [step(0)]), tmp_path / "file"
    for content in ("GGUF...", '{"step": 0}\n', "\n"):
        path.write_text(content)
        with pytest.raises(TraceError, match="file exists and is not a trace; name another file"):
            trace.write(path)
        assert path.read_text() == content
    for content in ("", '{"minillm', '{"minillm_trace": 1, "run": {}}\n', "\n".join(trace.lines())):
        path.write_text(content)
        trace.write(path)
        assert path.read_text().splitlines() == list(trace.lines())


def key_paths(value, path=()):
    """All paths of keys and indices in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from key_paths(item, (*path, key))


@settings(max_examples=300)
@given(trace=traces(), data=st.data())
def test_a_changed_value_is_reported_or_harmless(path, trace, data):
    """Replacing any value by any other gives a consistent trace, or an error that names the line."""
    lines = [json.loads(line) for line in trace.lines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    *keys, last = data.draw(st.sampled_from(list(key_paths(lines[number]))))
    container = lines[number]
    for key in keys:
        container = container[key]
    anything = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | names | st.lists(counts, max_size=2)
    container[last] = data.draw(anything | st.just({}))
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
    assert (
        not message or f"line {number + 1}" in message or f"line {number + 2}" in message
    )  # or the next line no longer follows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["milliseconds"].update(forward=-1.0), "line 2: a duration is negative"),
        (lambda s: s.update(time=1.7e308, milliseconds=dict.fromkeys(STAGES, 1.7e308)), "is not finite"),
        (
            lambda s: s.update(num_waiting=2**53),
            "line 2, num_waiting is 9007199254740992; expected an integer of magnitude at most 2\^53 - 1",
        ),
        (
            lambda s: s["pool"].update(references=[-(2**60)] * NUM_BLOCKS),
            "line 2, pool, references is .*; expected an integer of magnitude at most 2\^53 - 1",
        ),
        (
            lambda s: s["running"].append(["r", 0, 1, 1, [0]]),
            "line 2, running is .*; expected an object with request_id",
        ),
        (lambda s: s["pool"].update(cached=[3, NUM_BLOCKS]), "line 2: there is no block 8"),
        (
            lambda s: s["pool"].update(references=[0] * 10_000),
            "line 2: the pool has 10000 blocks, but the header has 8",
        ),
        (lambda s: s["pool"].update(cached=[2, 1]), "line 2: a cached block is also held"),
        (lambda s: s["pool"].update(cached=[-1]), "line 2: there is no block -1"),
        (
            lambda s: s["running"][0].update(block_tables=[[-1, 0, -1, 1]]),
            "line 2: a block table lists block 0 before a freed one \(-1\); freed blocks come first",
        ),
        (lambda s: s["running"][0].update(block_tables=[[-2, 0, 1]]), "line 2: there is no block -2"),
        (
            lambda s: s["running"][0].update(block_tables=[[-1, 1]]),
            "line 2: block 0 has 1 references, but 0 block tables",
        ),
        (lambda s: s["pool"].update(evicted=[-1]), "line 2: there is no block -1"),
        (
            lambda s: s["pool"].update(copies=[{"source": 1, "target": NUM_BLOCKS}]),
            "line 2: there is no block 8; expected 0 to 7",
        ),
        (lambda s: s["pool"].update(references=[1, 2, 0, 1] + [0] * 4), "line 2: block 3 has 1 references, but 0"),
        (
            lambda s: s["pool"].update(references=[0] * NUM_BLOCKS),
            "line 2: block 0 has 0 references, but 1 block tables list it",
        ),
        (
            lambda s: s.update(waiting=["a", "b"], num_waiting=1),
            "line 2: 2 waiting sequences are named, but .* is 1",
        ),
        (lambda s: s.update(num_waiting=-1), "line 2: 0 waiting sequences are named, but num_waiting is -1"),
        (lambda s: s.update(time=-0.5), "line 2: time -0.5 is negative"),
        (lambda s: s["arrived"].append(arrival(time=0.5)), "line 2: request 'a' arrived at 0.5, after the step"),
        (lambda s: s["arrived"].append(arrival(time=-1.0)), "line 2: the arrival time -1.0 of request 'a' is negative"),
        (
            lambda s: s["arrived"].append(arrival(params={"deep": json.loads("[" * 300 + "]" * 300)})),
            "line 2, arrived, params, deep is nested more than 20 levels deep",
        ),
    ],
)
def test_inconsistent_steps_are_rejected(path, change, message):
    line = to_json(step(0, running=SHARING))
    change(line)
    header = next(Trace(FACTS).lines())
    path.write_text(f"{header}\n{json.dumps(line)}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=message):
        Trace.read(path)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0, 1]], "line 2: 1 block tables, but 2 KV-cache groups"),
        ([[0, 1], [2]], r"line 2: the block tables of a sequence have different lengths: \[1, 2\]"),
        ([[0, -1], [-1, -1]], "line 2: a block table lists block 0 before a freed one"),
        ([[-1, -1], [0, -1]], "line 2: a block table lists block 0 before a freed one"),
    ],
)
def test_inconsistent_block_tables_of_two_groups_are_rejected(path, tables, message):
    trace = Trace(replace(FACTS, windows=[5, None]), [step(0, running=[RunningSequence("a", 0, 3, 3, tables)])])
    trace.write(path)
    with pytest.raises(TraceError, match=message):
        Trace.read(path)


def older_lines(trace, version):
    """The lines of a trace in an older version: the blocks of all groups side by side; up to version 3 no windows."""
    header, *steps = map(json.loads, trace.lines())
    header["minillm_trace"] = version
    if version < 4:
        del header["run"]["windows"]
    for line in steps:
        for entry in line["chunks"] + line["running"]:
            tables = entry.pop("block_tables")
            entry["block_table"] = [block for blocks in zip(*tables, strict=True) for block in blocks]
    return "".join(f"{json.dumps(line)}\n" for line in (header, *steps))


@pytest.mark.parametrize("version", [2, 3])
def test_versions_without_groups_are_converted(path, version):
    trace = Trace(FACTS, [step(0, running=SHARING)])
    path.write_text(older_lines(trace, version), encoding="utf-8")
    assert Trace.read(path) == trace


@given(trace=traces())
def test_version_4_is_converted(path, trace):
    path.write_text(older_lines(trace, 4), encoding="utf-8")
    assert Trace.read(path) == trace


def test_a_block_table_of_version_4_must_be_whole(path):
    trace = Trace(replace(FACTS, windows=[5, None]), [step(0, running=[RunningSequence("a", 0, 3, 3, [[0], [1]])])])
    path.write_text(older_lines(trace, 4).replace("[0, 1]", "[0, 1, 2]"), encoding="utf-8")
    with pytest.raises(TraceError, match="line 2: a block table has 3 blocks; expected a multiple of 2"):
        Trace.read(path)


def test_other_files_are_rejected(path):
    header = next(Trace(FACTS).lines())
    step = '{"step": 0}'
    other = header.replace('"minillm_trace": 5', '"minillm_trace": 1')
    for text, message in (
        ("", "line 1 is missing: the file is empty"),
        (step + "\n", "line 1 is not the header of a trace"),
        ("TIMESTAMP,ContextTokens\n", "line 1 is not JSON"),
        ("[1]\n", "line 1: expected a JSON object, got a list"),
        (other + "\n", "line 1: the trace has version 1, but this minillm reads versions 2 to 5"),
        (header.replace("[null]", "[]") + "\n", "line 1, run, windows is \[\]; expected one per KV-cache group"),
        (header.replace("[null]", "[null, 0]") + "\n", "line 1, run, windows is .*; expected one .*, each 1 or more"),
        ('{"minillm_trace": 5}\n', "line 1, run is None; expected an object with model"),
        (
            header.replace('"max_sequences": 4', '"max_sequences": 0') + "\n",
            "line 1, run, max_sequences is 0; expected 1",
        ),
        (
            header.replace('"head_flops": 50', '"head_flops": -50') + "\n",
            "line 1, run, costs, head_flops is -50; expected 0",
        ),
        (f"{header}\n{step}\n", r"line 2 is not a StepRecord: missing fields \['aborted', .*unknown fields \[\]"),
        (f"{header}\n{other}\n", "line 2 is a second header"),
        (f"{header}\n\xff\n", "line 2 is not JSON"),
        (f"{header}\n{'[' * 100_000}\n", "line 2 is not JSON"),
    ):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(TraceError, match=message):
            Trace.read(path)
    with pytest.raises(FileNotFoundError):
        Trace.read(path.with_name("absent.jsonl"))


def arrival(**fields):
    return to_json(Arrival("a", 0.0, 3, None, {}, 1, 2, 0)) | fields


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    trace = single_step_run("a", "b", "c")
    trace.write(path)
    before = path.read_bytes()

    def lines(self):
        yield "the first line"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trace, "lines", lines)
    with pytest.raises(OSError, match="No space left"):
        trace.write(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_trace_replaces_the_file_that_a_link_names(tmp_path):
    link, path = tmp_path / "link.jsonl", tmp_path / "run.jsonl"
    single_step_run("a", "b", "c").write(path)
    link.symlink_to(path)
    single_step_run("x", "y", "z").write(link)
    assert link.is_symlink()
    assert Trace.read(path).steps[0].arrived[0].request_id == "x"
