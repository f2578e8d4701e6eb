"""Plain lines: every field can be read back, and no text can break a line."""

import ast
import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.plain_lines import fields, unquoted
from support.simulated_runs import simulated_runs, single_step_run
from support.traces import hostile_texts, traces

from minillm.trace import sequence_name
from minillm.view import ConsoleView, plain_line
from minillm.view.plain import plain_header


@settings(max_examples=100)
@given(trace=traces() | simulated_runs())
def test_plain_lines_read_back_as_the_record(trace):
    for record in trace:
        line = plain_line(record)
        assert line.isprintable()
        got, pool = fields(line), record.pool
        numbers = ("step", "tokens", "running", "waiting", "held", "cached", "free")
        assert [int(got[key][0]) for key in numbers] == [
            record.step, record.num_tokens, len(record.running), record.num_waiting,
            pool.num_held, pool.num_cached, pool.num_free,
        ]  # fmt: skip
        for phase in ("prefill", "decode"):
            chunks = [chunk for chunk in record.chunks if chunk.phase == phase]
            ranges = [f"[{chunk.start}:{chunk.stop}]" if phase == "prefill" else "" for chunk in chunks]
            names = [chunk.name for chunk in chunks]
            assert [unquoted(item) for item in got[phase]] == list(zip(names, ranges, strict=True))
        assert [unquoted(item)[0] for item in got["arrived"]] == [a.request_id for a in record.arrived]
        assert [unquoted(item)[0] for item in got["admitted"]] == [a.name for a in record.admitted]
        hits = [(a.name, f":{a.num_cached_tokens}") for a in record.admitted if a.num_cached_tokens]
        assert [unquoted(item) for item in got["hits"]] == hits
        assert [unquoted(item)[0] for item in got["preempted"]] == [p.name for p in record.preempted]
        ends = [unquoted(item) for item in got["finished"]]
        assert [(name, unquoted(rest[1:])[0]) for name, rest in ends] == [(f.name, f.reason) for f in record.finished]
        assert [unquoted(item)[0] for item in got["queue"]] == record.waiting
        assert [int(block) for block in got["evicted"]] == pool.evicted
        texts = [
            (sequence_name(chunk.request_id, token.completion), token.text)
            for chunk in record.chunks
            for token in chunk.sampled
        ]
        assert [(name, ast.literal_eval(rest[1:])) for name, rest in map(unquoted, got["text"])] == texts


@given(name=hostile_texts, prompt=hostile_texts, text=hostile_texts, width=st.integers(40, 250))
def test_hostile_text_stays_within_its_line(name, prompt, text, width):
    trace = single_step_run(name, prompt, text)
    file = io.StringIO()
    with ConsoleView(trace.facts, Console(file=file, width=width)) as view:
        for record in trace:
            assert plain_line(record).isprintable()
            view.push(record)
    assert file.getvalue().splitlines() == [plain_header(trace.facts), *map(plain_line, trace)]
