"""Render a lesson's page: its prose, its code, the output of the code, and the library source that the prose quotes."""

import difflib
import inspect
import pkgutil
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import minillm

from .cells import Cell, LessonError, read_cells
from .figures import Figure, description
from .run import Output, run_cells

QUOTE = re.compile(r"\{\{ source: (minillm(?:\.\w+)+) \}\}")
TIMING_BLOCK = re.compile(r"^(`{3,})text timing\n.*?^\1$", re.DOTALL | re.MULTILINE)
TIMING_NOTE = "<sub>Measured on the machine that rendered this page; yours will differ.</sub>"


@dataclass(frozen=True)
class Page:
    """A rendered lesson.

    Attributes
    ----------
    markdown : the content of the lesson's README.md.
    figures : the SVG of each figure, by name.
    """

    markdown: str
    figures: dict[str, str]


def render(folder: Path) -> Page:
    """Run the lesson in `folder` and return its page.

    Raises
    ------
    LessonError
        The script is malformed, fails, quotes a name that has no source, or has two figures with the same name.
    """
    script = folder / "lesson.py"
    cells = read_cells(script)
    blocks = ["<!-- Rendered from lesson.py by lessons/render.py. Edit lesson.py instead. -->"]
    figures: dict[str, str] = {}
    for cell, output in zip(cells, run_cells(script, cells), strict=True):
        if "hidden" in cell.tags or not cell.text.strip():
            continue
        blocks += _prose(cell, script) if cell.markdown else _code(cell, output)
        for figure in output.figures:
            if figure.name in figures:
                raise LessonError(
                    f"{script}:{cell.line}: a second figure is named {figure.name!r}: choose another name"
                )
            figures[figure.name] = figure.svg
    return Page("\n\n".join([*blocks, *_footer(folder)]) + "\n", figures)


def read_page(folder: Path) -> Page:
    """Read the page in `folder`; return an empty page if there is none."""
    page = folder / "README.md"
    figures = sorted((folder / "figures").glob("*.svg"))
    return Page(
        page.read_text(encoding="utf-8") if page.exists() else "",
        {path.stem: path.read_text(encoding="utf-8") for path in figures},
    )


def write_page(folder: Path, page: Page) -> None:
    """Write a page and its figures to `folder`, and delete figures that the page no longer has."""
    (folder / "README.md").write_text(page.markdown, encoding="utf-8")
    figures = folder / "figures"
    if page.figures:
        figures.mkdir(exist_ok=True)
    for name, svg in page.figures.items():
        (figures / f"{name}.svg").write_text(svg, encoding="utf-8")
    for path in figures.glob("*.svg"):
        if path.stem not in page.figures:
            path.unlink()


def difference(old: Page, new: Page, name: str) -> str:
    """Return a unified diff of two pages, ignoring timed output; '' if the pages are equal."""
    names = f"{name} (the page)", f"{name} (the script)"
    return "\n".join(difflib.unified_diff(_compared(old), _compared(new), *names, lineterm=""))


def _compared(page: Page) -> list[str]:
    """Return the lines of a page that are compared: Markdown without timed output, and the figures' summaries."""
    lines = TIMING_BLOCK.sub("(timed)", page.markdown).splitlines()
    for name, svg in sorted(page.figures.items()):
        lines += [f"figures/{name}.svg: {line}" for line in description(svg).splitlines()]
    return lines


def _prose(cell: Cell, script: Path) -> list[str]:
    lines = [
        _quote(line, f"{script}:{cell.line + index}") if line.startswith("{{") else line
        for index, line in enumerate(cell.text.splitlines())
    ]
    return ["\n".join(lines).strip("\n")]


def _code(cell: Cell, output: Output) -> list[str]:
    timing = "timing" in cell.tags
    blocks = [_fenced(cell.text.strip("\n"), "python")]
    if output.text:
        blocks.append(_fenced(output.text, "text timing" if timing else "text"))
    blocks += [_image(figure) for figure in output.figures]
    return [*blocks, TIMING_NOTE] if timing else blocks


def _image(figure: Figure) -> str:
    alternative = figure.title.replace("[", r"\[").replace("]", r"\]")
    return f"![{alternative}](figures/{figure.name}.svg)"


def _fenced(text: str, language: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _quote(line: str, location: str) -> str:
    """Return the library source that replaces a ``{{ source: minillm.module.name }}`` line, and a link to it."""
    found = QUOTE.fullmatch(line.strip())
    if found is None:
        raise LessonError(f"{location}: malformed quote {line!r}: expected '{{{{ source: minillm.module.name }}}}'")
    try:
        quoted = inspect.unwrap(pkgutil.resolve_name(found[1]))
        lines, first = inspect.getsourcelines(quoted)
        file = Path(inspect.getfile(quoted)).relative_to(Path(minillm.__file__).parents[1]).as_posix()
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise LessonError(f"{location}: {found[1]} has no source to quote: {error}") from error
    code = _fenced(textwrap.dedent("".join(lines)).rstrip(), "python")
    return f"{code}\n\n<sub>[`{file}`, line {first}](../../{file}#L{first})</sub>"


def _footer(folder: Path) -> list[str]:
    """Return the end of a page: the command that runs the lesson, and links to the neighbouring lessons."""
    lessons = find_lessons(folder.parent)
    index = lessons.index(folder)
    links = [f"Previous: {_link(lesson)}" for lesson in lessons[:index][-1:]]
    links += ["[All lessons](../README.md)"]
    links += [f"Next: {_link(lesson)}" for lesson in lessons[index + 1 :][:1]]
    run = f"python lessons/{folder.name}/lesson.py"
    return ["---", f"This page is rendered from [lesson.py](lesson.py). To run the script: `{run}`.", " · ".join(links)]


def find_lessons(root: Path) -> list[Path]:
    """Return the lesson folders under `root` in order: each ``NN_topic/`` with a ``lesson.py``."""
    return sorted(path.parent for path in root.glob("[0-9][0-9]_*/lesson.py"))


def _link(lesson: Path) -> str:
    return f"[{lesson.name.replace('_', ' ')}](../{lesson.name}/README.md)"
