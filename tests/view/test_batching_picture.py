"""The animated picture of `examples/batching.py`: every frame can be recovered from it, and it is self-contained."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from support.simulated_runs import simulate

from minillm.engine import EngineConfig
from minillm.engine.sequence import Sequence

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorder():
    spec = importlib.util.spec_from_file_location("record_batching", ROOT / "docs" / "record_batching.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def frames(recorder):
    config = EngineConfig(policy="chunked", block_size=4, num_blocks=12, max_batch_tokens=16, max_sequences=4)
    requests = [(number, Sequence.from_prompt(f"r{number}", [0] * 8 + [number], 10)) for number in range(5)]
    trace = simulate(config, requests, Random(1))
    return list(recorder.screens(trace.facts, trace))


def test_every_frame_can_be_recovered_from_the_intervals(recorder, frames):
    runs = recorder.runs_by_interval(frames)
    for number, frame in enumerate(frames):
        screen = [[recorder.Cell()] * recorder.COLUMNS for _ in range(recorder.LINES)]
        for (start, stop), visible in runs.items():
            for run in visible if start <= number < stop else []:
                screen[run.line][run.column : run.column + len(run.cells)] = run.cells
        assert [[visible_part(cell) for cell in line] for line in screen] == [
            [visible_part(cell) for cell in line] for line in frame
        ]


def visible_part(cell):
    """A cell without the properties that a viewer cannot see: the foreground of a space."""
    is_blank = cell.character == " " and not cell.underline
    return ("" if is_blank else cell.character, "" if is_blank else cell.colour, cell.background)


def test_the_svg_is_well_formed_and_self_contained(recorder, frames):
    text = recorder.animated_svg(frames, "a <title>", "a & b")
    root = ElementTree.fromstring(text)
    assert root.get("data-frames") == str(len(frames))
    assert (root.find(f"{SVG}title").text, root.find(f"{SVG}desc").text) == ("a <title>", "a & b")
    check_self_contained(root, text)


def test_the_stored_picture_is_a_complete_run(recorder):
    text = recorder.OUTPUT.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    lines = last_frame(recorder, root)
    assert lines[0].startswith(f"step {int(root.get('data-frames')) - 1} ")
    requests = runpy.run_path(str(ROOT / "examples" / "batching.py"))["REQUESTS"]
    for number, request in enumerate(requests):
        line = next(line for line in lines if line.startswith(f"{'ABCDEF'[number]} {request.name} "))
        assert line.split()[2] == f"{request.max_tokens}/{request.max_tokens}"
        assert line.rstrip().endswith("✓")
    assert len(text) < 400_000
    check_self_contained(root, text)


def last_frame(recorder, root):
    """The text of the lines in the last frame, without the glyphs that are drawn as shapes."""
    lines = [[" "] * recorder.COLUMNS for _ in range(recorder.LINES)]
    screen = root.findall(f"{SVG}g")[-1]
    for group in screen:
        if "h" not in group.get("class", "").split():
            for element in group.iter(f"{SVG}text"):
                column = round(float(element.get("x")) / recorder.CELL_WIDTH)
                line = lines[int(float(element.get("y")) // recorder.LINE_HEIGHT)]
                line[column : column + len(element.text)] = element.text
    return ["".join(line) for line in lines]


def check_self_contained(root, text):
    """It refers to nothing outside, runs no script, and has keyframes for every animated group."""
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    groups = {element.get("class").split()[0][1:] for element in root.iter(f"{SVG}g") if element.get("class")}
    assert groups == set(re.findall(r"@keyframes k(\d+)\{", text)) == set(re.findall(r"animation-name:k(\d+)", text))
