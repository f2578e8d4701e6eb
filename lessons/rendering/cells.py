"""A lesson's script, cut into cells: the percent format that VS Code and Jupytext open as a notebook.

# %% [markdown]
# Prose, a comment to Python.

# %% tags=["timing"]
print("code")
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

CELL_MARK = re.compile(r'# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\["\w+"(?:, ?"\w+")*\]))?\s*')

TAGS = {
    "timing": "what the cell prints and draws depends on the machine's speed: shown, never compared",
    "hidden": "the cell runs, but the page shows nothing of it",
}


class LessonError(Exception):
    """A lesson cannot be rendered: the message says where in its script, and why."""


@dataclass(frozen=True)
class Cell:
    """One cell: its text, and the number of the script's line on which that text starts (the first is 1)."""

    text: str
    line: int
    markdown: bool
    tags: frozenset[str]


def read_cells(script: Path) -> list[Cell]:
    """Cut a script into its cells; prose comes out without its comment signs.

    Raises `LessonError` for a mark that cannot be read, an unknown tag, anything before the first mark, or
    code in a markdown cell.
    """
    lines = script.read_text(encoding="utf-8").splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("# %%")]
    before = lines[: starts[0]] if starts else lines
    if not starts or any(line.strip() for line in before):
        raise LessonError(f"{script}:1: a lesson starts with a cell: '# %% [markdown]'")
    return [
        _read_cell(script, lines[start:end], start + 1)
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def _read_cell(script: Path, lines: list[str], number: int) -> Cell:
    """Read the cell whose mark is the script's line `number`."""
    mark = CELL_MARK.fullmatch(lines[0])
    if mark is None:
        wanted = "'# %%' or '# %% [markdown]', then perhaps tags=[\"timing\"]"
        raise LessonError(f"{script}:{number}: cannot read {lines[0]!r}: want {wanted}")
    tags = frozenset(json.loads(mark["tags"] or "[]"))
    if unknown := tags - TAGS.keys():
        raise LessonError(f"{script}:{number}: unknown tag {min(unknown)!r}: there are {sorted(TAGS)}")
    body = lines[1:]
    if mark["markdown"]:
        body = [_uncomment(script, line, number + 1 + index) for index, line in enumerate(body)]
    return Cell("\n".join(body).rstrip(), number + 1, mark["markdown"] is not None, tags)


def _uncomment(script: Path, line: str, number: int) -> str:
    if line.strip() and not line.startswith("#"):
        raise LessonError(f"{script}:{number}: code in a markdown cell (start a new cell with '# %%'): {line!r}")
    return line.removeprefix("#").removeprefix(" ")
