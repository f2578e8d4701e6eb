"""Run a lesson's cells in order in one namespace, as a notebook does, and capture the output of each cell."""

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
from typing import Any

from .cells import Cell, LessonError
from .figures import Figure, take_figures

PAGE_WIDTH = 100  # characters; the console width that rich uses


@dataclass(frozen=True)
class Output:
    """The output of a cell.

    Attributes
    ----------
    text : the printed text, followed by the value of the last expression unless the value is None.
    figures : the figures that the cell left open.
    """

    text: str = ""
    figures: tuple[Figure, ...] = ()


def run_cells(script: Path, cells: list[Cell]) -> list[Output]:
    """Run a lesson and return the output of each cell. A Markdown cell has no output.

    Raises
    ------
    LessonError
        A cell raises an exception, or displays a memory address, which differs in every run.
    """
    with _script_environment(script) as namespace:
        return [Output() if cell.markdown else _run(script, cell, namespace) for cell in cells]


def _run(script: Path, cell: Cell, namespace: dict[str, Any]) -> Output:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            value = _execute(cell, script, namespace)
            if value is not None:
                print(repr(value))
        figures = tuple(take_figures(timing="timing" in cell.tags))
    except (Exception, SystemExit) as error:
        raise LessonError(_error_message(error, script, cell)) from error
    text = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
    if address := re.search(r" at 0x[0-9a-f]+", text):
        raise LessonError(
            f"{script}:{cell.line}: the cell displays a memory address ('{address[0]}'), which differs in every run"
        )
    return Output(text, figures)


def _execute(cell: Cell, script: Path, namespace: dict[str, Any]) -> object:
    """Run a cell's statements. Return the value of the last statement if it is an expression, else None.

    Empty lines are prepended so that tracebacks and breakpoints use the script's line numbers.
    """
    tree = ast.parse("\n" * (cell.line - 1) + cell.text, str(script))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(script), "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), str(script), "eval"), namespace)


@contextlib.contextmanager
def _script_environment(script: Path) -> Iterator[dict[str, Any]]:
    """Make the lesson `__main__` and put its folder first on `sys.path`, as Python does for a script."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    main, path, environment = sys.modules["__main__"], list(sys.path), os.environ.copy()
    sys.modules["__main__"] = module
    sys.path.insert(0, str(script.parent))
    os.environ |= {"COLUMNS": str(PAGE_WIDTH), "NO_COLOR": "1"}
    os.environ.pop("FORCE_COLOR", None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # a warning from plt.show()
            yield vars(module)
    finally:
        sys.modules["__main__"], sys.path[:] = main, path
        os.environ.clear()
        os.environ.update(environment)


def _error_message(error: BaseException, script: Path, cell: Cell) -> str:
    """Return the line of the script that failed, the error, and the traceback from that line on."""
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return f"{script}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if frame.filename == str(script)]
    line = frames[own[0]].lineno if own else cell.line
    below = "".join(traceback.format_list(frames[own[0] :])) if own else ""
    return f"{script}:{line}: {type(error).__name__}: {error}\n{below}".rstrip()
