"""The view in a terminal: every cell says what the record says, whatever the names, texts, widths and heights."""

import ast
import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.builders import random_llama, uncompiled, write_gguf
from test_trace import traces

from minillm.engine import EngineConfig
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.recording import record_of
from minillm.engine.scheduler import POLICIES
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import Sampled
from minillm.trace import STAGES, Arrival, Finish, RunFacts, SampledToken, Trace, sequence_name
from minillm.view import Cell, ConsoleView, State, Timeline, plain_line
from minillm.view.frame import LABEL, TILE, frame
from minillm.view.look import ASCII, COLOURS, UNICODE
from minillm.view.plain import plain_header
from minillm.view.shown import fold, head, shown, tail

EXAMPLE = Path(__file__).parents[2] / "examples" / "batching.py"
BARS = UNICODE.states["prefill"]
WORDS = ("the ", "fox", " 한국", "é", "", "\n", ".")


# --- runs without a model -----------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """A Trace of a real scheduler whose tokens are drawn: preemptions, shared prefixes, aborts, completions."""
    size, budget = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    requests = []
    for number in range(draw(st.integers(1, 7))):
        prompt = [0] * draw(st.integers(0, 9)) + [number + 1] * draw(st.integers(1, 9))
        more = {"max_tokens": draw(st.integers(1, 30)), "num_forks": draw(st.sampled_from([1, 1, 1, 2, 3]))}
        requests.append((draw(st.integers(0, 10)), Sequence.of(f"r{number}", prompt, **more)))
    windows = draw(st.sampled_from([[None], [None], [7], [None, 7]]))
    needed = len(windows) * max(-(-sequence.most_positions // size) for _, sequence in requests)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICIES)), block_size=size, num_blocks=needed + draw(st.integers(0, 6)),
        max_batch_tokens=budget, max_sequences=draw(st.integers(3, 8)),
    )  # fmt: skip
    return served(config, requests, Random(draw(st.integers(0, 2**32))), windows)


def served(config, requests, choose, windows=(None,)):
    """A Trace of requests, (before which step it comes, Sequence) each, whose tokens are drawn from WORDS."""
    scheduler = config.scheduler(BlockAllocator(config.num_blocks, config.block_size, windows))
    pool = config.block_size, config.num_blocks
    facts = RunFacts(
        "none", config.policy, "fcfs", *pool, config.max_batch_tokens, 8, 0.01, True, windows=list(windows)
    )
    trace, step = Trace(facts), 0
    while requests or scheduler.has_unfinished:
        arrived = [sequence for at, sequence in requests if at <= step]
        requests = [(at, sequence) for at, sequence in requests if at > step]
        for sequence in arrived:
            scheduler.add(sequence)
        aborted = choose.choice(scheduler.running) if scheduler.running and choose.random() < 0.005 else None
        ended = scheduler.end(aborted.request_id, "abort") if aborted else []
        plan = scheduler.schedule()
        record = record_of(plan, scheduler, step, float(step))
        record.milliseconds = dict.fromkeys(STAGES, 1.0)
        record.arrived = [
            Arrival(
                s.request_id, 0.0, s.num_prompt_tokens, f"{s.request_id} says ", {}, s.num_forks, s.max_tokens, 0,
                [f"<{token_id}>" for token_id in s.token_ids],
            )
            for s in arrived
        ]  # fmt: skip
        choices = []
        for chunk, scheduled in zip(record.chunks, plan.chunks, strict=True):
            sequence = scheduled.sequence
            last = sequence.num_generated + 1 == sequence.max_tokens
            choices.append([])
            for completion in sequence.completions[: scheduled.num_samples]:
                token_id = choose.randrange(3)
                chunk.sampled.append(SampledToken(completion, token_id, choose.choice(WORDS), None, f"={token_id}"))
                stops = "length" if last else "stop" if choose.random() < 0.02 else None
                choices[-1].append(Sampled(token_id, stops))
        scheduler.commit(plan, choices)
        record.finished = [
            Finish(f.sequence.request_id, completion, f.reason)
            for f in [*ended, *plan.finished]
            for completion in f.sequence.completions
        ]
        trace.append(record)
        step += 1
    return trace


def expected_cell(record, name):
    """What a row's cell of this step must show, from the record alone; None if the record does not know it."""
    reasons = {sequence_name(f.request_id, f.completion): f.reason for f in record.finished}
    if name in reasons:
        return UNICODE.states["finished" if reasons[name] in ("stop", "length") else "ended early"]
    if name in [sequence_name(p.request_id, p.completion) for p in record.preempted]:
        return UNICODE.states["preempted"]
    for chunk in record.chunks:
        if sequence_name(chunk.request_id, chunk.completion) == name:
            return UNICODE.states["decode"] if chunk.phase == "decode" else BARS + UNICODE.states["recompute"]
    if name in [sequence_name(s.request_id, s.completion) for s in record.running]:
        return UNICODE.states["held up"]
    return UNICODE.states["waiting"] if name in record.waiting else None


def rendered(timeline, width, height, look=UNICODE):
    """The frame as a terminal of that size would show it, line by line."""
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), highlight=False, legacy_windows=False
    )
    for line in frame(timeline, width, height, look):
        console.print(line)
    return console.export_text().splitlines()


ROW = re.compile(r"(\w) (\S+) +(\d+)/(\d+) (.*)")


def grid(lines):
    """Of a rendered frame, name -> (letter, tokens answered, cells)."""
    found = [match for line in lines if (match := ROW.fullmatch(line))]
    return {match[2]: (match[1], int(match[3]), match[5]) for match in found}


@settings(max_examples=60)
@given(trace=runs(), width=st.integers(40, 250))
def test_every_cell_says_what_the_record_says(trace, width):
    timeline, history = Timeline(trace.facts), {}
    answered = {}
    for record in trace:
        timeline.push(record)
        lines = rendered(timeline, width, 100)
        rows = grid(lines)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                answered[name] = answered.get(name, 0) + 1
        for name in [*rows, *history]:
            history.setdefault(name, {})[record.step] = expected_cell(record, name)
        assert {name: count for name, (_, count, _) in rows.items() if count} == answered
        assert set(record.waiting) <= set(rows)
        ruler = next(line for line in lines if re.match(r"\d+ rows?", line))
        for name, (_, _, cells) in rows.items():
            line = next(line for line in lines if ROW.fullmatch(line) and line.split()[1] == name)
            columns = width - (len(line) - len(cells))
            first = max(0, record.step - columns + 1)
            for step in range(first, record.step + 1):
                shown_glyph = cells[step - first : step - first + 1] or " "
                wanted = history[name].get(step)
                assert shown_glyph in wanted if wanted else shown_glyph == " ", (name, step)
            assert len(cells.rstrip()) <= record.step - first + 1
        for number in re.finditer(r"\d+", ruler[7:] if rows else ""):
            assert number.start() + 7 == width - columns + int(number[0]) - first


@pytest.mark.parametrize("look", [UNICODE, ASCII])
def test_states_differ_in_glyph_and_in_colour(look):
    glyphs = [glyph for state in State for glyph in look.states[state]]
    assert len(set(glyphs)) == len(glyphs)
    assert all(cell_len(glyph) == 1 for glyph in [*glyphs, look.cached, look.free, look.more])
    assert look is UNICODE or "".join(glyphs).isascii()
    told_apart = [State.PREFILL, State.RECOMPUTE, State.DECODE, State.PREEMPTED, State.FINISHED, State.WAITING]
    assert len({COLOURS[state] for state in told_apart}) == len(told_apart)
    for state in State:
        heights = [look.cell(Cell(state, count), 16) for count in range(17)]
        assert {style for _, style in heights} == {COLOURS[state]}
        assert [look.states[state].index(glyph) for glyph, _ in heights] == sorted(
            look.states[state].index(glyph) for glyph, _ in heights
        )
        assert heights[-1][0] == look.states[state][-1]  # the whole budget: the highest
    assert look.cell(None, 16) == (" ", "")


@settings(max_examples=60)
@given(trace=runs())
def test_prefills_that_repeat_are_told_apart(trace):
    """A prefill chunk is drawn as a recompute exactly if part of it had been computed before."""
    timeline, furthest = Timeline(trace.facts), {}
    for record in trace:
        timeline.push(record)
        for chunk in record.chunks:
            name = sequence_name(chunk.request_id, chunk.completion)
            stop = chunk.start + chunk.num_tokens
            cell = timeline.rows[name].cells[record.step]
            assert cell.num_tokens == chunk.num_tokens
            if cell.state in ("prefill", "recompute"):
                assert (cell.state == "recompute") == (chunk.start < furthest.get(name, 0))
            furthest[name] = max(furthest.get(name, 0), stop)
            for token in chunk.sampled:  # further completions part from the first, with all that it has computed
                furthest.setdefault(sequence_name(chunk.request_id, token.completion), stop)


@given(trace=traces() | runs())
def test_nobody_is_forgotten_where_nobody_is_to_be(trace):
    """A timeline without limits holds all rows and all their cells, of names that were used again as well."""
    timeline, seen = Timeline(trace.facts, history=None, kept_finished=None), {}
    for record in trace:
        timeline.push(record)
        seen |= {row.number: row for row in timeline.rows.values()}
    rows = timeline.everyone()
    assert [row.number for row in rows] == list(range(len(rows)))
    assert all(rows[number] is row for number, row in seen.items())
    short = Timeline(trace.facts, history=1, kept_finished=0)
    for record in trace:
        short.push(record)
    assert all(len(row.cells) <= 1 and row.reason is None for row in short.everyone())


@settings(max_examples=60)
@given(trace=runs(), width=st.integers(60, 250))
def test_header_batch_and_pool_are_those_of_the_record(trace, width):
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        lines = rendered(timeline, width, 100)
        letters = {name: letter for name, (letter, _, _) in grid(lines).items()}
        assert lines[0].startswith(f"step {record.step} · {trace.facts.policy} · {record.num_tokens}/")
        if width >= 80:
            assert f"{len(record.running)} running, {record.num_waiting} waiting" in lines[0]
            assert f"{record.pool.num_held}/{record.pool.num_blocks} blocks held" in lines[0]
        batch = "".join(
            letters[sequence_name(chunk.request_id, chunk.completion)] * chunk.num_tokens for chunk in record.chunks
        )
        assert lines[1].removeprefix("batch ") == batch.ljust(trace.facts.max_batch_tokens, UNICODE.free)

        start = next(number for number, line in enumerate(lines) if line.startswith("pool  "))
        a_line = (width - LABEL) // TILE  # of a hundred lines, twelve are the pool's: so many tiles need no more
        for block, state in enumerate(record.pool.states()):
            line = lines[start + block // a_line].ljust(width)
            place = LABEL + block % a_line * TILE
            tile = line[place : place + TILE].strip()
            owners = [s for s in record.running if block in s.block_table]
            names = [letters[sequence_name(s.request_id, s.completion)] for s in owners]
            assert len(owners) == record.pool.references[block]
            if state == "held":
                assert tile == ("".join(names) if len(names) < 3 else f"{names[0]}+{len(names) - 1}")
            else:
                assert tile == {"cached": UNICODE.cached, "free": UNICODE.free}[state]


def underlined(lines):
    """What stands out as new."""
    return [
        line.plain[span.start : span.end] for line in lines for span in line.spans if "underline" in str(span.style)
    ]


@settings(max_examples=30)
@given(trace=runs())
def test_the_answers_grow_as_the_records_say(trace):
    timeline, texts = Timeline(trace.facts), {}
    for record in trace:
        timeline.push(record)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                texts.setdefault(name, f"{chunk.request_id} says ")
                texts[name] += token.text.replace("\n", "⏎")
        lines = rendered(timeline, 200, 100)
        rows = grid(lines)
        assert sorted(underlined(frame(timeline, 200, 100))) == sorted(
            token.text.replace("\n", "⏎") for chunk in record.chunks for token in chunk.sampled if token.text
        )
        for name, text in texts.items():
            letter = rows[name][0]
            ending = f" {text.rstrip()}"
            assert [line for line in lines if line.startswith(f"{letter} ") and line.rstrip().endswith(ending)]


# --- anything at all ----------------------------------------------------------------------------------------------

hostile = st.text(
    st.characters() | st.sampled_from("\x1b[]\u202e\u200d\ufe0f\ud83d👩한\u0301\n\t\x00\x9b"), max_size=30
)


@settings(max_examples=150)
@given(trace=traces(), width=st.integers(1, 250), height=st.integers(1, 60), look=st.sampled_from([UNICODE, ASCII]))
def test_any_records_fit_any_terminal(trace, width, height, look):
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        lines = frame(timeline, width, height, look, hint="space: next")
        assert 0 < len(lines) <= height
        assert all(line.cell_len <= width and line.plain.isprintable() for line in lines)
        assert len(rendered(timeline, width, height, look)) == len(lines)  # none is wrapped


@given(name=hostile, prompt=hostile, text=hostile, width=st.integers(40, 250))
def test_hostile_text_drives_nothing(name, prompt, text, width):
    trace = spoken(name, prompt, text)
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        for line in frame(timeline, width, 24):
            assert line.plain.isprintable()
            assert line.cell_len <= width
        assert plain_line(record).isprintable()
    file = io.StringIO()
    with ConsoleView(trace.facts, Console(file=file, width=width)) as view:
        for record in trace:
            view.push(record)
    assert file.getvalue().splitlines() == [plain_header(trace.facts), *map(plain_line, trace)]


def spoken(name, prompt, text):
    """A run of one step, in which a request of that name and prompt answers that text."""
    facts = RunFacts(name, "chunked", "fcfs", 4, 2, 8, 2, 0.0, True)
    scheduler = EngineConfig(block_size=4, num_blocks=2).scheduler(BlockAllocator(2, 4))
    scheduler.add(Sequence.of(name, [1, 2, 3], 2))
    record = record_of(scheduler.schedule(), scheduler, 0, 0.0)
    record.milliseconds = dict.fromkeys(STAGES, 0.5)
    record.arrived = [Arrival(name, 0.0, 3, prompt, {}, 1, 2, 0)]
    record.chunks[0].sampled = [SampledToken(0, 7, text, None)]
    return Trace(facts, [record])


def test_markup_and_emoji_codes_are_shown_as_they_stand():
    trace = spoken("[bold]x[/bold]", "[red]", " :smile: [/]")
    timeline = Timeline(trace.facts)
    timeline.push(trace.steps[0])
    lines = rendered(timeline, 100, 24)
    assert [line for line in lines if line.startswith("A [bold]x[/bo")]
    assert [line for line in lines if line.endswith("[red] :smile: [/]")]


def test_the_newest_text_stands_out():
    trace = spoken("r", "the prompt", " and more")
    timeline = Timeline(trace.facts)
    timeline.push(trace.steps[0])
    line = next(line for line in frame(timeline, 80, 24) if "and more" in line.plain)
    styles = {line.plain[span.start : span.end]: str(span.style) for span in line.spans}
    assert styles[" and more"] == "bold underline"
    assert styles["the prompt"] == "bright_black"


@given(text=hostile, width=st.integers(1, 40))
def test_what_is_shown_can_be_cut_to_any_width(text, width):
    safe = shown(text)
    assert safe.isprintable()
    assert shown(safe) == safe
    assert len(safe) <= len(text)
    pieces = [safe[piece] for piece in fold(safe, width)]
    assert "".join(pieces) == safe
    assert all(len(piece) == 1 or sum(map(cell_len, piece)) <= width for piece in pieces)
    assert all(len(pieces) == 1 or piece for piece in pieces)
    for part, longer in ((head(safe, width), safe[: len(head(safe, width)) + 1]), (safe[tail(safe, width)], None)):
        longer = safe[-len(part) - 1 :] if longer is None else longer
        assert sum(map(cell_len, part)) <= width
        assert part == safe or sum(map(cell_len, longer)) > width


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain, 한국어, عربي, 👩", "plain, 한국어, عربي, 👩"),
        ("a\nb\tc\r\x1b[2J\x07\x7f", "a⏎b⇥c␍␛[2J␇␡"),
        ("\u202eevil\u2066", "\ufffdevil\ufffd"),
        ("\ud83d \x9b", "\ufffd \ufffd"),
        ("👩\u200d🚀❤\ufe0f\u00a0.", "👩🚀❤ ."),
    ],
)
def test_stand_ins(text, safe):
    assert shown(text) == safe


# --- plain lines --------------------------------------------------------------------------------------------------

ITEM = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"])+"""


def fields(line):
    """A plain line's fields, each a list of its items."""
    found = re.findall(rf"(?:^| )(\w+)=({ITEM}(?:,{ITEM})*)(?= |$)", line)
    assert line.endswith(" ".join(f"{key}={value}" for key, value in found))  # nothing but fields
    return {key: [] if value == "-" else re.findall(ITEM, value) for key, value in found}


def unquoted(item):
    """The name an item begins with, and the rest of it."""
    match = re.match(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(.*)""", item)
    return (ast.literal_eval(match[1]), match[2]) if match else re.match(r"([A-Za-z0-9_.-]*)(.*)", item).groups()


@settings(max_examples=100)
@given(trace=traces() | runs())
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

        def named(parts):
            return [sequence_name(part.request_id, part.completion) for part in parts]

        for phase in ("prefill", "decode"):
            chunks = [chunk for chunk in record.chunks if chunk.phase == phase]
            ranges = [f"[{c.start}:{c.start + c.num_tokens}]" if phase == "prefill" else "" for c in chunks]
            assert [unquoted(item) for item in got[phase]] == list(zip(named(chunks), ranges, strict=True))
        assert [unquoted(item)[0] for item in got["arrived"]] == [a.request_id for a in record.arrived]
        assert [unquoted(item)[0] for item in got["admitted"]] == named(record.admitted)
        assert [unquoted(item)[0] for item in got["preempted"]] == named(record.preempted)
        finished = [(name, f.reason) for name, f in zip(named(record.finished), record.finished, strict=True)]
        ends = [unquoted(item) for item in got["finished"]]
        assert [(name, unquoted(rest[1:])[0]) for name, rest in ends] == finished
        assert [unquoted(item)[0] for item in got["queue"]] == record.waiting
        assert [int(block) for block in got["evicted"]] == pool.evicted
        texts = [
            (sequence_name(chunk.request_id, token.completion), token.text)
            for chunk in record.chunks
            for token in chunk.sampled
        ]
        assert [(name, ast.literal_eval(rest[1:])) for name, rest in map(unquoted, got["text"])] == texts


# --- the example --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_gguf(path, random_llama(vocab_size=262, max_position_embeddings=1024), with_tokenizer=True))


def run_example(model_file, *arguments, **more):
    command = [sys.executable, EXAMPLE, "--model", model_file, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, **more)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_example_prints_a_line_a_step_and_compares(model_file, policy, tmp_path):
    saved = tmp_path / "trace.jsonl"
    process = run_example(model_file, "--policy", policy, "--save", saved)
    assert (process.returncode, uncompiled(process.stderr)) == (0, "")
    trace = Trace.read(saved)
    assert trace.facts.policy == policy
    lines = process.stdout.splitlines()
    assert lines[: len(trace) + 1] == [plain_header(trace.facts), *map(plain_line, trace)]
    table = lines[len(trace) + 1 :]
    assert [line.split()[0] for line in table if line.split() and line.split()[0] in POLICIES] == list(POLICIES)
    assert "Whatever the policy, every answer is the same, token for token." in table
    names = ["fox", "count", "opens", "dogs", "trains", "colours"]
    assert [arrival.request_id for record in trace for arrival in record.arrived] == names
    assert sorted(finish.request_id for record in trace for finish in record.finished) == sorted(names)
    assert any(record.preempted for record in trace) or policy == "static"
    assert any(count > 1 for record in trace for count in record.pool.references) or policy == "static"


def test_the_table_says_what_the_runs_were(model_file):
    process = run_example(model_file, "--fast", "--backend", "numpy")
    assert process.returncode == 0
    (line,) = [line for line in process.stdout.splitlines() if line.split()[:1] == ["chunked"]]
    steps, *times, recomputed, peak = line.split()[1:]
    counted = [fields(line) for line in process.stdout.splitlines() if line.startswith("step=")]
    assert int(steps) == len([step for step in counted if step["tokens"] != ["0"]])
    held, of = peak.split("/")
    assert int(held) == max(int(step["held"][0]) for step in counted) <= int(of)
    assert all(float(number) > 0 for number in times)
    assert int(recomputed) >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "greedy"], "invalid choice: 'greedy'"),
        (["--step", "--fast"], "not allowed with argument"),
        (["--step"], "error: keys are read one by one from a POSIX terminal, which standard input is not here"),
        (["--save", "no/such/folder/t.jsonl"], "error: .*no/such/folder"),
        (["--model", "no/such.gguf"], "error: model 'no/such.gguf': no such file"),
        (["--backend", "numpy", "--threads", "2"], "error: threads is 2, but backend 'numpy'"),
    ],
)
def test_bad_arguments_of_the_example_are_one_line_and_status_2(model_file, arguments, message):
    process = run_example(model_file, *arguments)
    assert process.returncode == 2
    assert re.search(message, process.stderr)
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


class Terminal:
    """The example in a terminal of its own, driven by keys."""

    def __init__(self, *arguments, size=(24, 80), term="xterm-256color"):
        self.ours, self.its = pty.openpty()
        termios.tcsetwinsize(self.its, size)
        self.before, self.seen = termios.tcgetattr(self.its), ""
        environment = os.environ | {"TERM": term}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLE, *arguments],
            stdin=self.its,
            stdout=self.its,
            stderr=self.its,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def wait_for(self, text):
        """Read on until `text` has been written; a minute without any output is a failure."""
        while text not in self.seen:
            assert self._read(60), f"no {text!r} in {self.seen[-2000:]!r}"
        self.seen = self.seen.partition(text)[2]

    def end(self):
        """Its exit status, once it has ended; all that was written is in `seen`, from what was waited for last."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.seen[-2000:]!r}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def is_as_before(self):
        return termios.tcgetattr(self.its) == self.before

    def _read(self, timeout):
        ready, _, _ = select.select([self.ours], [], [], timeout)
        if ready:
            self.seen += os.read(self.ours, 65536).decode("utf-8", "replace")
        return bool(ready)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.its)


@pytest.fixture
def terminal(request, model_file):
    opened = []

    def open_terminal(*arguments, **more):
        opened.append(Terminal("--model", model_file, *arguments, **more))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


SCREEN, SHOWN_AGAIN = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen, there and gone


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (lambda driven: driven.press("q"), 0),
        (lambda driven: driven.press("\x04"), 0),
        (lambda driven: driven.press("\x03"), 130),
        (lambda driven: driven.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda driven: driven.process.send_signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "Ctrl-D", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_step_by_step(terminal, tmp_path, leave, status):
    saved = tmp_path / "trace.jsonl"
    driven = terminal("--step", "--save", str(saved))
    driven.wait_for(SCREEN)
    driven.wait_for("step 0\x1b")
    driven.press("x")  # no key that means anything
    driven.press(" ")
    driven.wait_for("step 1\x1b")
    driven.press("\r")
    driven.wait_for("step 2\x1b")
    assert not driven.is_as_before()  # keys come one by one, unseen
    leave(driven)
    assert driven.end() == status
    assert driven.is_as_before()
    assert SHOWN_AGAIN in driven.seen
    assert "\x1b[?25h" in driven.seen  # the cursor is there again, too
    assert "Traceback" not in driven.seen
    assert "step 3\x1b" not in driven.seen
    assert "three policies" not in driven.seen
    assert len(Trace.read(saved)) == 3  # what was seen is kept


def test_to_the_end_in_a_terminal(terminal):
    driven = terminal("--fast", size=(40, 120))
    assert driven.end() == 0
    assert driven.is_as_before()
    before, _, after = driven.seen.partition(SHOWN_AGAIN)
    assert "step 0\x1b" in before
    assert "A fox" in re.sub(r"\x1b\[[^a-zA-Z]*m", "", after)  # the last picture stays
    assert "three policies" in after


def test_a_terminal_that_changes_its_size(terminal):
    driven = terminal("--step")
    driven.wait_for("step 0\x1b")
    termios.tcsetwinsize(driven.its, (50, 200))
    driven.wait_for("tiny.gguf")  # the model's name finds room only now
    driven.press("q")
    assert driven.end() == 0


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(terminal):
    driven = terminal("--fast", term="dumb")
    assert driven.end() == 0
    assert driven.seen.startswith("run model=")
    assert "\x1b" not in driven.seen
    assert "three policies" in driven.seen


def test_colours_that_are_forced_put_no_pictures_into_a_pipe(model_file):
    process = run_example(model_file, "--fast", env=os.environ | {"FORCE_COLOR": "1"})
    assert process.stdout.startswith("run model=")
    assert SCREEN not in process.stdout
