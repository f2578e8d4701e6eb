"""Point every link of docs/models.md at the line its title quotes: `python docs/relink.py`, when code has moved."""

import re
from pathlib import Path

PAGE = Path(__file__).parent / "models.md"
LINK = re.compile(r"""\((?P<path>[^()\s#]+)#L(?P<line>\d+) '(?P<code>[^']+)'\)""")


def line_of(path: Path, code: str) -> int:
    """The number of the one line of a file that has `code` in it; ValueError if there is none, or more."""
    lines = [number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if code in line]
    if len(lines) != 1:
        raise ValueError(f"{path.name} has {code!r} on {len(lines)} lines, wanted one: {lines}")
    return lines[0]


def relinked(page: str, folder: Path) -> str:
    """The page with the line numbers that are right now."""

    def right(link: re.Match) -> str:
        return f"({link['path']}#L{line_of(folder / link['path'], link['code'])} '{link['code']}')"

    return LINK.sub(right, page)


if __name__ == "__main__":
    PAGE.write_text(relinked(PAGE.read_text(encoding="utf-8"), PAGE.parent), encoding="utf-8")
