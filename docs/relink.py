"""Update the line numbers of the links in docs/models.md: `python docs/relink.py`, after code has moved.

Each link quotes a piece of code as its title. The link must lead to the one line of the file that contains the quote.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parent / "models.md"
LINK = re.compile(r"""\((?P<path>[^()\s#]+)#L(?P<line>\d+) '(?P<code>[^']+)'\)""")


def line_of(path: Path, code: str) -> int:
    """Return the number of the one line of a file that contains `code`.

    Raises
    ------
    ValueError
        No line contains it, or several do.
    """
    lines = [number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if code in line]
    if len(lines) != 1:
        raise ValueError(f"expected {code!r} on one line of {path.name}, found it on {len(lines)}: {lines}")
    return lines[0]


def relinked(page: str, folder: Path) -> str:
    """Return the page with current line numbers. Paths in links are relative to `folder`."""

    def with_current_line(link: re.Match[str]) -> str:
        return f"({link['path']}#L{line_of(folder / link['path'], link['code'])} '{link['code']}')"

    return LINK.sub(with_current_line, page)


if __name__ == "__main__":
    PAGE.write_text(relinked(PAGE.read_text(encoding="utf-8"), PAGE.parent), encoding="utf-8")
