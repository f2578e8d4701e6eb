"""Split a lesson's script into cells. VS Code and Jupytext open this percent format as a notebook.

# %% [markdown]
# Prose in Markdown. Python treats it as a comment.

# %% tags=["timing"]
print("code")
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

CELL_MARK = re.compile(r'# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\["\w+"(?:, ?"\w+")*\]))?\s*')

TAGS = {
    "timing": "output and figures depend on the machine's speed; they appear on the page but are not compared",
    "hidden": "the cell runs but does not appear on the page",
}


class LessonError(Exception):
    """A lesson cannot be rendered. The message gives the line in the script and the reason."""


@dataclass(frozen=True)
class Cell:
    """One cell of a script.

    Attributes
    ----------
    text : the code, or the Markdown without its comment signs.
    line : the line of the script on which the text starts, counted from 1.
    markdown : whether the text is Markdown.
    tags : keys of TAGS.
    """

    text: str
    line: int
    markdown: bool
    tags: frozenset[str]


def read_cells(script: Path) -> list[Cell]:
    """Split a script into its cells.

    Raises
    ------
    LessonError
        A cell mark is malformed, a tag is unknown, a line precedes the first mark, or a markdown cell contains code.
    """
    lines = script.read_text(encoding="utf-8").splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("# %%")]
    before = lines[: starts[0]] if starts else lines
    if not starts or any(line.strip() for line in before):
        raise LessonError(f"{script}:1: a lesson must start with a cell mark, such as '# %% [markdown]'")
    return [
        _read_cell(script, lines[start:end], start + 1)
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def _read_cell(script: Path, lines: list[str], number: int) -> Cell:
    """Read the cell that starts with the mark on line `number` of the script."""
    mark = CELL_MARK.fullmatch(lines[0])
    if mark is None:
        expected = "'# %%' or '# %% [markdown]', optionally followed by tags=[\"timing\"]"
        raise LessonError(f"{script}:{number}: malformed cell mark {lines[0]!r}: expected {expected}")
    tags = frozenset(json.loads(mark["tags"] or "[]"))
    if unknown := tags - TAGS.keys():
        raise LessonError(f"{script}:{number}: unknown tag {min(unknown)!r}: expected one of {sorted(TAGS)}")
    body = lines[1:]
    if mark["markdown"]:
        body = [_uncomment(script, line, number + 1 + index) for index, line in enumerate(body)]
    return Cell("\n".join(body).rstrip(), number + 1, mark["markdown"] is not None, tags)


def _uncomment(script: Path, line: str, number: int) -> str:
    if line.strip() and not line.startswith("#"):
        raise LessonError(f"{script}:{number}: code in a markdown cell: {line!r}; start a new cell with '# %%'")
    return line.removeprefix("#").removeprefix(" ")
