"""Frames: every cell, tile and text agrees with the records, whatever the names, texts, widths and heights."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.simulated_runs import simulated_runs, single_step_run
from support.traces import FACTS, hostile_texts, traces

from minillm.trace import sequence_name
from minillm.view import Cell, State, Timeline
from minillm.view.frame import LABEL, TILE, frame
from minillm.view.glyphs import ASCII, STATE_STYLES, UNICODE

BARS = UNICODE.states["prefill"]
TRACK = re.compile(r"(\w) (\S+) +(\d+)/(\d+) (.*)")


def expected_glyphs(record, name):
    """The glyphs that a sequence's cell may have in this step, from the record alone; None if it is not mentioned."""
    reasons = {finish.name: finish.reason for finish in record.finished}
    if name in reasons:
        return UNICODE.states["finished" if reasons[name] in ("stop", "length") else "ended early"]
    if name in [preemption.name for preemption in record.preempted]:
        return UNICODE.states["preempted"]
    for chunk in record.chunks:
        if chunk.name == name:
            return UNICODE.states["decode"] if chunk.phase == "decode" else BARS + UNICODE.states["recompute"]
    if name in [sequence.name for sequence in record.running]:
        return UNICODE.states["stalled"]
    return UNICODE.states["waiting"] if name in record.waiting else None


def rendered(timeline, width, height, glyphs=UNICODE):
    """The frame, line by line, as a terminal of that size would show it."""
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), highlight=False, legacy_windows=False
    )
    for line in frame(timeline, width, height, glyphs):
        console.print(line)
    return console.export_text().splitlines()


def track_lines(lines):
    """From a rendered frame: name -> (letter, number of generated tokens, cells)."""
    matches = [match for line in lines if (match := TRACK.fullmatch(line))]
    return {match[2]: (match[1], int(match[3]), match[5]) for match in matches}


@settings(max_examples=30)
@given(trace=simulated_runs(), width=st.integers(40, 250))
def test_every_cell_agrees_with_its_record(trace, width):
    timeline, history = Timeline(trace.facts), {}
    generated = {}
    for record in trace:
        timeline.push(record)
        lines = rendered(timeline, width, 100)
        tracks = track_lines(lines)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                generated[name] = generated.get(name, 0) + 1
        for name in [*tracks, *history]:
            history.setdefault(name, {})[record.step] = expected_glyphs(record, name)
        assert {name: count for name, (_, count, _) in tracks.items() if count} == generated
        assert set(record.waiting) <= set(tracks)
        ruler = next(line for line in lines if re.match(r"\d+ seqs?", line))
        for name, (_, _, cells) in tracks.items():
            line = next(line for line in lines if TRACK.fullmatch(line) and line.split()[1] == name)
            columns = width - (len(line) - len(cells))
            first = max(0, record.step - columns + 1)
            for step in range(first, record.step + 1):
                glyph = cells[step - first : step - first + 1] or " "
                expected = history[name].get(step)
                assert glyph in expected if expected else glyph == " ", (name, step)
            assert len(cells.rstrip()) <= record.step - first + 1
        for number in re.finditer(r"\d+", ruler[7:] if tracks else ""):
            assert number.start() + 7 == width - columns + int(number[0]) - first


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_states_differ_in_glyph_and_in_colour(glyphs):
    characters = [glyph for state in State for glyph in glyphs.states[state]]
    assert len(set(characters)) == len(characters)
    assert all(cell_len(glyph) == 1 for glyph in [*characters, glyphs.cached, glyphs.free, glyphs.ellipsis])
    assert glyphs is UNICODE or "".join(characters).isascii()
    coloured = [State.PREFILL, State.RECOMPUTE, State.DECODE, State.PREEMPTED, State.FINISHED, State.WAITING]
    assert len({STATE_STYLES[state] for state in coloured}) == len(coloured)
    for state in State:
        cells = [glyphs.cell(Cell(state, count), 16) for count in range(17)]
        assert {style for _, style in cells} == {STATE_STYLES[state]}
        heights = [glyphs.states[state].index(glyph) for glyph, _ in cells]
        assert heights == sorted(heights)
        assert cells[-1][0] == glyphs.states[state][-1]  # the whole budget has the highest bar
    assert glyphs.cell(None, 16) == (" ", "")


@settings(max_examples=30)
@given(trace=simulated_runs(), width=st.integers(60, 250))
def test_header_batch_and_pool_agree_with_the_record(trace, width):
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        lines = rendered(timeline, width, 100)
        letters = {name: letter for name, (letter, _, _) in track_lines(lines).items()}
        assert lines[0].startswith(f"step {record.step} · {trace.facts.policy} · {record.num_tokens}/")
        if width >= 80:
            assert f"{len(record.running)} running, {record.num_waiting} waiting" in lines[0]
            assert f"{record.pool.num_held}/{record.pool.num_blocks} blocks held" in lines[0]
        batch = "".join(letters[chunk.name] * chunk.num_tokens for chunk in record.chunks)
        assert lines[1].removeprefix("batch ") == batch.ljust(trace.facts.max_batch_tokens, UNICODE.free)

        start = next(number for number, line in enumerate(lines) if line.startswith("pool  "))
        per_line = (width - LABEL) // TILE  # the pool may take 12 of the 100 lines, which is enough for wide tiles
        for block, state in enumerate(record.pool.states()):
            line = lines[start + block // per_line].ljust(width)
            left = LABEL + block % per_line * TILE
            tile = line[left : left + TILE].strip()
            owners = [s for s in record.running if any(block in table for table in s.block_tables)]
            names = [letters[sequence.name] for sequence in owners]
            assert len(owners) == record.pool.references[block]
            if state == "held":
                assert tile == ("".join(names) if len(names) < 3 else f"{names[0]}+{len(names) - 1}")
            else:
                assert tile == {"cached": UNICODE.cached, "free": UNICODE.free}[state]


def underlined(lines):
    """The parts of the lines that are marked as new."""
    return [
        line.plain[span.start : span.end] for line in lines for span in line.spans if "underline" in str(span.style)
    ]


@settings(max_examples=30)
@given(trace=simulated_runs())
def test_answers_grow_by_the_sampled_texts(trace):
    timeline, texts = Timeline(trace.facts), {}
    for record in trace:
        timeline.push(record)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                texts.setdefault(name, f"{chunk.request_id} says ")
                texts[name] += token.text.replace("\n", "⏎")
        lines = rendered(timeline, 200, 100)
        tracks = track_lines(lines)
        assert sorted(underlined(frame(timeline, 200, 100))) == sorted(
            token.text.replace("\n", "⏎") for chunk in record.chunks for token in chunk.sampled if token.text
        )
        for name, text in texts.items():
            letter = tracks[name][0]
            ending = f" {text.rstrip()}"
            assert [line for line in lines if line.startswith(f"{letter} ") and line.rstrip().endswith(ending)]


def test_new_text_is_highlighted():
    trace = single_step_run("r", "the prompt", " and more")
    timeline = Timeline(trace.facts)
    timeline.push(trace.steps[0])
    line = next(line for line in frame(timeline, 80, 24) if "and more" in line.plain)
    styles = {line.plain[span.start : span.end]: str(span.style) for span in line.spans}
    assert styles[" and more"] == "bold underline"
    assert styles["the prompt"] == "bright_black"


# --- any records, any text ----------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(trace=traces(), width=st.integers(1, 250), height=st.integers(1, 60), glyphs=st.sampled_from([UNICODE, ASCII]))
def test_any_records_fit_any_terminal(trace, width, height, glyphs):
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        lines = frame(timeline, width, height, glyphs, hint="space: next")
        assert 0 < len(lines) <= height
        assert all(line.cell_len <= width and line.plain.isprintable() for line in lines)
        assert len(rendered(timeline, width, height, glyphs)) == len(lines)  # no line wraps


@given(name=hostile_texts, prompt=hostile_texts, text=hostile_texts, width=st.integers(40, 250))
def test_hostile_text_cannot_control_the_terminal(name, prompt, text, width):
    trace = single_step_run(name, prompt, text)
    timeline = Timeline(trace.facts)
    for record in trace:
        timeline.push(record)
        for line in frame(timeline, width, 24):
            assert line.plain.isprintable()
            assert line.cell_len <= width


def test_markup_and_emoji_codes_are_shown_literally():
    trace = single_step_run("[bold]x[/bold]", "[red]", " :smile: [/]")
    timeline = Timeline(trace.facts)
    timeline.push(trace.steps[0])
    lines = rendered(timeline, 100, 24)
    assert [line for line in lines if line.startswith("A [bold]x[/bo")]
    assert [line for line in lines if line.endswith("[red] :smile: [/]")]


def test_an_empty_timeline_cannot_be_drawn():
    with pytest.raises(ValueError, match="push a record before drawing"):
        frame(Timeline(FACTS), 80, 24)
