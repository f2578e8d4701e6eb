"""A lesson's page: prose, code, what the code showed, and the library's code where the prose quotes it."""

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
from .run import Shown, run_cells

QUOTE = re.compile(r"\{\{ source: (minillm(?:\.\w+)+) \}\}")
TIMING_BLOCK = re.compile(r"^(`{3,})text timing\n.*?^\1$", re.DOTALL | re.MULTILINE)
TIMING_NOTE = "<sub>Measured on the machine that made this page; yours will differ.</sub>"


@dataclass(frozen=True)
class Page:
    """A page: its Markdown, and the SVG of each figure by name."""

    markdown: str
    figures: dict[str, str]


def render(folder: Path) -> Page:
    """Run the lesson in `folder` and set its page. Raises `LessonError` when the script is at fault."""
    script = folder / "lesson.py"
    cells = read_cells(script)
    blocks = ["<!-- Made from lesson.py by lessons/render.py: edit that, not this. -->"]
    figures: dict[str, str] = {}
    for cell, shown in zip(cells, run_cells(script, cells), strict=True):
        if "hidden" in cell.tags or not cell.text.strip():
            continue
        blocks += _prose(cell, script) if cell.markdown else _code(cell, shown)
        for figure in shown.figures:
            if figure.name in figures:
                raise LessonError(f"{script}:{cell.line}: a second figure named {figure.name!r}")
            figures[figure.name] = figure.svg
    return Page("\n\n".join([*blocks, *_footer(folder)]) + "\n", figures)


def read_page(folder: Path) -> Page:
    """Read the page that lies in `folder` (an empty one if there is none)."""
    page = folder / "README.md"
    figures = sorted((folder / "figures").glob("*.svg"))
    return Page(
        page.read_text(encoding="utf-8") if page.exists() else "",
        {path.stem: path.read_text(encoding="utf-8") for path in figures},
    )


def write_page(folder: Path, page: Page) -> None:
    """Write a page and its figures into `folder`, and remove figures that it no longer has."""
    (folder / "README.md").write_text(page.markdown, encoding="utf-8")
    drawings = folder / "figures"
    if page.figures:
        drawings.mkdir(exist_ok=True)
    for name, svg in page.figures.items():
        (drawings / f"{name}.svg").write_text(svg, encoding="utf-8")
    for path in drawings.glob("*.svg"):
        if path.stem not in page.figures:
            path.unlink()


def difference(old: Page, new: Page, name: str) -> str:
    """Return a unified diff of what two pages say ('' if they say the same), whatever was timed left out."""
    names = f"{name} (the page)", f"{name} (the script)"
    return "\n".join(difflib.unified_diff(_says(old), _says(new), *names, lineterm=""))


def _says(page: Page) -> list[str]:
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


def _code(cell: Cell, shown: Shown) -> list[str]:
    timing = "timing" in cell.tags
    blocks = [_fenced(cell.text.strip("\n"), "python")]
    if shown.text:
        blocks.append(_fenced(shown.text, "text timing" if timing else "text"))
    blocks += [_image(figure) for figure in shown.figures]
    return [*blocks, TIMING_NOTE] if timing else blocks


def _image(figure: Figure) -> str:
    alternative = figure.title.translate(str.maketrans({"[": r"\[", "]": r"\]"}))
    return f"![{alternative}](figures/{figure.name}.svg)"


def _fenced(text: str, language: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _quote(line: str, where: str) -> str:
    """Set a library function's source in place of a ``{{ source: minillm.room.name }}`` line."""
    found = QUOTE.fullmatch(line.strip())
    if found is None:
        raise LessonError(f"{where}: cannot read {line!r}: want '{{{{ source: minillm.module.name }}}}'")
    try:
        quoted = inspect.unwrap(pkgutil.resolve_name(found[1]))
        lines, first = inspect.getsourcelines(quoted)
        file = Path(inspect.getfile(quoted)).relative_to(Path(minillm.__file__).parents[1]).as_posix()
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise LessonError(f"{where}: {found[1]} has no source to quote: {error}") from error
    code = _fenced(textwrap.dedent("".join(lines)).rstrip(), "python")
    return f"{code}\n\n<sub>[`{file}`, line {first}](../../{file}#L{first})</sub>"


def _footer(folder: Path) -> list[str]:
    """Say how to run the lesson, and link the lessons around it."""
    lessons = find_lessons(folder.parent)
    place = lessons.index(folder)
    links = [f"Previous: {_link(lesson)}" for lesson in lessons[:place][-1:]]
    links += ["[All lessons](../README.md)"]
    links += [f"Next: {_link(lesson)}" for lesson in lessons[place + 1 :][:1]]
    run = f"python lessons/{folder.name}/lesson.py"
    return ["---", f"This page is what [lesson.py](lesson.py) says when it runs: `{run}`.", " · ".join(links)]


def find_lessons(root: Path) -> list[Path]:
    """Return the folders of the lessons under `root` (``NN_topic/`` with a ``lesson.py``), in order."""
    return sorted(path.parent for path in root.glob("[0-9][0-9]_*/lesson.py"))


def _link(lesson: Path) -> str:
    return f"[{lesson.name.replace('_', ' ')}](../{lesson.name}/README.md)"
