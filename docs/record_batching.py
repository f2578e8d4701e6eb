"""Record `examples/batching.py` with the default model as an animated picture, `docs/images/batching.svg`.

    python docs/record_batching.py

The script serves the example's requests, draws the console view after each step, and writes all frames into one SVG
file. The file needs no script: CSS animations show and hide its parts. Equal terminal cells of successive frames are
stored once, together with the interval of steps in which they are visible. Viewers that prefer reduced motion see the
last frame.
"""

from __future__ import annotations

import argparse
import io
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.text import Text

from minillm import LLM
from minillm.trace import RunFacts, StepRecord
from minillm.view import Timeline
from minillm.view.frame import TILE, frame

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "images" / "batching.svg"

COLUMNS, LINES = 94, 30  # size of the terminal
SECONDS_PER_STEP = 0.22
PAUSE = 3.0  # seconds for which the last frame stays

CELL_WIDTH, LINE_HEIGHT, FONT_SIZE = 8.4, 18, 14  # pixels
MARGIN, TITLE_HEIGHT = 18, 34
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
WINDOW, BORDER, TITLE_BAR = "#0d1117", "#30363d", "#161b22"
TEXT, DIM = "#e6edf3", "#8b949e"

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Cell:
    """One character of a terminal with its style. The empty string follows a character of two cells."""

    character: str = " "
    colour: str = TEXT
    background: str | None = None
    bold: bool = False
    underline: bool = False

    @property
    def style(self) -> tuple[str, str | None, bool, bool]:
        """Everything but the character."""
        return self.colour, self.background, self.bold, self.underline


Screen = list[list[Cell]]  # [LINES][COLUMNS]
Interval = tuple[int, int]  # the first frame in which something is visible, and the first in which it no longer is


@dataclass(frozen=True)
class Run:
    """Adjacent cells of one line that have the same style and are visible in the same frames."""

    line: int
    column: int
    cells: tuple[Cell, ...]


# --- frames -------------------------------------------------------------------------------------------------------


def screens(facts: RunFacts, records: Iterable[StepRecord]) -> Iterator[Screen]:
    """Return the console view after each step."""
    timeline = Timeline(facts)
    console = Console(width=COLUMNS, height=LINES, file=io.StringIO(), color_system="truecolor", legacy_windows=False)
    for record in records:
        timeline.push(record)
        yield screen(frame(timeline, COLUMNS, LINES), console)


def screen(lines: Sequence[Text], console: Console) -> Screen:
    """Return lines of styled text as cells."""
    rows = []
    for line in lines:
        cells: list[Cell] = []
        for segment in console.render(line, console.options.update(no_wrap=True)):
            style = segment.style
            for character in segment.text.rstrip("\n"):
                cell = Cell(
                    character,
                    _hex(style.color if style else None) or TEXT,
                    _hex(style.bgcolor if style else None),
                    bool(style and style.bold),
                    bool(style and style.underline),
                )
                cells += [cell, Cell("", *cell.style)][: cell_len(character)]
        rows.append((cells + [Cell()] * COLUMNS)[:COLUMNS])
    return (rows + [[Cell()] * COLUMNS for _ in range(LINES)])[:LINES]


def _hex(colour: Color | None) -> str | None:
    if colour is None or colour.is_default:
        return None
    return DIM if colour.name == "bright_black" else colour.get_truecolor().hex


def runs_by_interval(frames: Sequence[Screen]) -> dict[Interval, list[Run]]:
    """Return what is visible in each interval of frames. Spaces without a background are left out."""
    runs: dict[Interval, list[Run]] = defaultdict(list)
    for line in range(LINES):
        columns = [_intervals([screen[line][column] for screen in frames]) for column in range(COLUMNS)]
        for interval in sorted({interval for column in columns for interval in column}):
            start = 0
            while start < COLUMNS:
                cell = columns[start].get(interval)
                stop = start + 1
                if cell is not None:
                    while stop < COLUMNS and (other := columns[stop].get(interval)) and other.style == cell.style:
                        stop += 1
                    cells = tuple(columns[column][interval] for column in range(start, stop))
                    if cell.background or "".join(each.character for each in cells).strip():
                        runs[interval].append(Run(line, start, cells))
                start = stop
    return runs


def _intervals(cells: Sequence[Cell]) -> dict[Interval, Cell]:
    """Return the intervals in which one position of the screen does not change."""
    intervals, start = {}, 0
    for stop in range(1, len(cells) + 1):
        if stop == len(cells) or cells[stop] != cells[start]:
            intervals[start, stop] = cells[start]
            start = stop
    return intervals


# --- the picture --------------------------------------------------------------------------------------------------


def animated_svg(frames: Sequence[Screen], title: str, description: str) -> str:
    """Return an SVG picture that shows the frames in a terminal window, in a loop.

    Parameters
    ----------
    title : the text in the window's title bar.
    description : a text alternative for screen readers.
    """
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, LINES * LINE_HEIGHT + TITLE_HEIGHT + 1.5 * MARGIN
    duration = len(frames) * SECONDS_PER_STEP + PAUSE
    rules = [
        f"text{{font:{FONT_SIZE}px {FONT};white-space:pre;fill:{TEXT}}}",
        ".b{font-weight:700}.u{text-decoration:underline}.h{visibility:hidden}",
    ]
    animations = [
        f"g[class]{{animation-duration:{duration:g}s;animation-iteration-count:infinite;"
        "animation-timing-function:step-end}"
    ]
    groups = []
    for number, (interval, runs) in enumerate(sorted(runs_by_interval(frames).items())):
        body = "".join(element for run in runs for element in _elements(run))
        if interval == (0, len(frames)):
            groups.append(f"<g>{body}</g>")
            continue
        hidden = "" if interval[1] == len(frames) else " h"
        groups.append(f'<g class="a{number}{hidden}">{body}</g>')
        animations.append(f".a{number}{{animation-name:k{number}}}")
        rules.append(f"@keyframes k{number}{{{_keyframes(interval, len(frames), duration)}}}")
    rules.append(f"@media (prefers-reduced-motion:no-preference){{{''.join(animations)}}}")
    lights = "".join(
        f'<circle cx="{MARGIN + 4 + 20 * index}" cy="{TITLE_HEIGHT / 2:g}" r="6" fill="{colour}"/>'
        for index, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" data-frames="{len(frames)}" aria-label={quoteattr(title)}>\n'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>\n"
        f"<style>{''.join(rules)}</style>\n"
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="9" fill="{WINDOW}" '
        f'stroke="{BORDER}"/>\n'
        f'<path d="M1 {TITLE_HEIGHT}V9.5A8.5 8.5 0 0 1 9.5 1H{width - 9.5:g}A8.5 8.5 0 0 1 {width - 1:g} 9.5'
        f'V{TITLE_HEIGHT}Z" fill="{TITLE_BAR}"/>{lights}\n'
        f'<text x="{width / 2:g}" y="{TITLE_HEIGHT / 2 + 4.5:g}" text-anchor="middle" style="fill:{DIM}">'
        f"{escape(title)}</text>\n"
        f'<g transform="translate({MARGIN} {TITLE_HEIGHT + MARGIN / 2:g})">\n' + "\n".join(groups) + "\n</g>\n</svg>\n"
    )


def _keyframes(interval: Interval, num_frames: int, duration: float) -> str:
    """Return CSS keyframes that make a group visible in an interval of frames."""
    start, stop = interval
    steps = ["0%{visibility:hidden}"] if start else []
    steps.append(f"{start * SECONDS_PER_STEP / duration:.3%}{{visibility:visible}}")
    if stop < num_frames:
        steps.append(f"{stop * SECONDS_PER_STEP / duration:.3%}{{visibility:hidden}}")
    return "".join(steps)


def _elements(run: Run) -> Iterator[str]:
    """Return the SVG elements of a run: its background, the glyphs that are drawn as shapes, and its text."""
    x, y = run.column * CELL_WIDTH, run.line * LINE_HEIGHT
    first = run.cells[0]
    if first.background:
        is_tiled = len(run.cells) % TILE == 0 and all(cell.character == " " for cell in run.cells[::TILE])
        size, gap = (TILE, 1.5) if is_tiled else (len(run.cells), 0)  # blocks of the pool, or a part of the batch
        boxes = [
            _box(x + start * CELL_WIDTH, y + 1, size * CELL_WIDTH - gap, LINE_HEIGHT - 2)
            for start in range(0, len(run.cells), size)
        ]
        yield f'<path fill="{first.background}" d="{"".join(boxes)}"/>'
    shapes = [_shape(cell.character, x + n * CELL_WIDTH, y) for n, cell in enumerate(run.cells)]
    if any(shapes):
        yield f'<path fill="{first.colour}" d="{"".join(filter(None, shapes))}"/>'
    text = "".join(" " if shape else cell.character for cell, shape in zip(run.cells, shapes, strict=True))
    if text.strip():
        start = len(text) - len(text.lstrip())
        text, length = text.strip(), cell_len(text.strip())
        classes = " ".join(["b"] * first.bold + ["u"] * first.underline)
        attributes = f' class="{classes}"' if classes else ""
        if first.colour != TEXT:
            attributes += f' style="fill:{first.colour}"'
        if length > 1:
            attributes += f' textLength="{length * CELL_WIDTH:g}"'
        yield f'<text x="{x + start * CELL_WIDTH:g}" y="{y + 13.5:g}"{attributes}>{escape(text)}</text>'


def _shape(character: str, x: float, y: float) -> str | None:
    """Return the path of a glyph that fonts draw with gaps or in different sizes; None for all other characters."""
    middle_x, middle_y = x + CELL_WIDTH / 2, y + LINE_HEIGHT / 2
    if character and character in BARS:
        height = (LINE_HEIGHT - 3) * (BARS.index(character) + 1) / len(BARS)
        return _box(x + 0.4, y + LINE_HEIGHT - 1.5 - height, CELL_WIDTH - 0.8, height)
    if character == "▒":
        return "".join(_box(x + 0.4, y + 2 + 4 * stripe, CELL_WIDTH - 0.8, 2.2) for stripe in range(4))
    if character == "─":
        return _box(x, middle_y - 0.75, CELL_WIDTH, 1.5)
    if character == "•":
        return _circle(middle_x, middle_y, 2.7)
    if character == "·":
        return _circle(middle_x, middle_y, 1.1)
    if character == "○":
        return _circle(middle_x, middle_y, 3.6) + _circle(middle_x, middle_y, 2.4, clockwise=False)
    return None


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.5g} {y:.5g}h{width:.4g}v{height:.3g}h-{width:.4g}z"


def _circle(x: float, y: float, radius: float, clockwise: bool = True) -> str:
    arc = f"a{radius:g} {radius:g} 0 1 {int(clockwise)}"
    return f"M{x - radius:.5g} {y:.5g}{arc} {2 * radius:g} 0{arc} {-2 * radius:g} 0z"


def main() -> None:
    """Serve the example's requests with the default model, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: docs/images/batching.svg")
    options = parser.parse_args()

    example = runpy.run_path(str(ROOT / "examples" / "batching.py"))
    llm, requests = LLM(), example["REQUESTS"]
    list(example["serve"](llm, example["make_engine"](llm, "chunked"), requests))  # compiles the kernels
    engine = example["make_engine"](llm, "chunked")
    frames = list(screens(engine.facts, example["serve"](llm, engine, requests)))
    names = ", ".join(request.name for request in requests)
    description = (
        f"A terminal shows {len(frames)} steps of the scheduler, which serves {len(requests)} requests ({names}) with "
        "a small KV cache: the batch, one row per request with one cell per step, the block pool, and the answers."
    )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(animated_svg(frames, "python examples/batching.py", description), encoding="utf-8")
    print(f"{options.output}: {len(frames)} frames, {options.output.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
