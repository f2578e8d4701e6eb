"""Run lessons and write the page of each, or check that the pages still say what the scripts do.

python lessons/render.py             # every lesson
python lessons/render.py 01 03       # some
python lessons/render.py --check     # write nothing; print what differs, and fail if anything does
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rendering.cells import LessonError
from rendering.page import difference, find_lessons, read_page, render, write_page

ROOT = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--check] [NN ...]",
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="a lesson's number or folder (default: all of them)")
    parser.add_argument("--check", action="store_true", help="compare with the pages instead of writing them")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(find_lessons(ROOT), options.lessons)
        if len(chosen) == 1:
            return update(chosen[0], options.check)
    except LessonError as error:
        print(error, file=sys.stderr)
        return 1
    # A page is what its lesson says in a process of its own, whatever the other lessons did.
    again = [sys.executable, __file__, *(["--check"] if options.check else [])]
    statuses = [subprocess.run([*again, folder.name]).returncode for folder in chosen]
    return int(any(statuses))


def choose(lessons: list[Path], names: list[str]) -> list[Path]:
    """Pick the lessons that were asked for ('1', '01', '01_tokens', 'lessons/01_tokens'), else all."""
    by_name = {folder.name: folder for folder in lessons}
    by_name |= {folder.name[:2]: folder for folder in lessons}
    keys = [Path(name).name.zfill(2) for name in names]
    if unknown := [key for key in keys if key not in by_name]:
        there = ", ".join(folder.name for folder in lessons)
        raise LessonError(f"no lesson {unknown[0]!r} in {ROOT}: there are {there or 'none'}")
    return [by_name[key] for key in keys] or lessons


def update(folder: Path, check: bool) -> int:
    """Run one lesson; write its page, or compare with the one on disk. Return the exit status."""
    start = time.perf_counter()
    page = render(folder)
    took = f"({time.perf_counter() - start:.1f} s)"
    if not check:
        write_page(folder, page)
        print(f"{folder.name}: page written {took}")
        return 0
    if differs := difference(read_page(folder), page, f"{folder.name}/README.md"):
        print(f"{differs}\n\n{folder.name}: the page no longer says what the script does {took}.")
        print(f"If the script is right: python lessons/render.py {folder.name[:2]}")
        return 1
    print(f"{folder.name}: the page says what the script does {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
