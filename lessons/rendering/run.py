"""Running a lesson's cells, in order, in one namespace, keeping what each shows: as a notebook does."""

import ast
import contextlib
import io
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cells import Cell, LessonError
from .figures import Figure, take_figures

PAGE_WIDTH = 100  # characters: what rich prints into


@dataclass(frozen=True)
class Shown:
    """What a cell showed: the text it printed, the value of its last expression included, and its figures."""

    text: str = ""
    figures: tuple[Figure, ...] = ()


def run_cells(script: Path, cells: list[Cell]) -> list[Shown]:
    """Run a lesson; return what each of its cells showed (nothing, for prose).

    Raises `LessonError` with the script's line when a cell raises, or shows what no second run would.
    """
    with _standing_in_for(script) as namespace:
        return [Shown() if cell.markdown else _run(script, cell, namespace) for cell in cells]


def _run(script: Path, cell: Cell, namespace: dict) -> Shown:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            value = _execute(cell, script, namespace)
            if value is not None:
                print(repr(value))
        figures = tuple(take_figures(timing="timing" in cell.tags))
    except (Exception, SystemExit) as error:
        raise LessonError(_where_and_why(error, script, cell)) from error
    text = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
    if address := re.search(r" at 0x[0-9a-f]+", text):
        raise LessonError(
            f"{script}:{cell.line}: the cell shows a memory address ('{address[0]}'), never the same twice"
        )
    return Shown(text, figures)


def _execute(cell: Cell, script: Path, namespace: dict) -> object:
    """Run a cell's statements; return the value of the last, if that is an expression.

    The empty lines in front give the code its place in the script, for tracebacks and for breakpoints.
    """
    tree = ast.parse("\n" * (cell.line - 1) + cell.text, str(script))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(script), "exec"), namespace)
    return eval(compile(ast.Expression(last.value), str(script), "eval"), namespace) if last else None


@contextlib.contextmanager
def _standing_in_for(script: Path) -> Iterator[dict]:
    """Give the lesson what a script would have: it is `__main__`, and its folder comes first on the path."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    before = sys.modules["__main__"], list(sys.path), os.environ.copy()
    sys.modules["__main__"] = module
    sys.path.insert(0, str(script.parent))
    os.environ |= {"COLUMNS": str(PAGE_WIDTH), "NO_COLOR": "1"}
    os.environ.pop("FORCE_COLOR", None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # plt.show() on a page
            yield vars(module)
    finally:
        sys.modules["__main__"], sys.path[:], environment = before
        os.environ.clear()
        os.environ.update(environment)


def _where_and_why(error: BaseException, script: Path, cell: Cell) -> str:
    """Say which line of the lesson failed and how, with the traceback from that line on."""
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return f"{script}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if frame.filename == str(script)]
    line = frames[ours[0]].lineno if ours else cell.line
    below = "".join(traceback.format_list(frames[ours[0] :])) if ours else ""
    return f"{script}:{line}: {type(error).__name__}: {error}\n{below}".rstrip()
