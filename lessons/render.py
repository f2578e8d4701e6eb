"""Run lessons and write their pages, or check that the pages agree with the scripts.

python lessons/render.py             # all lessons
python lessons/render.py 01 03       # lessons 1 and 3
python lessons/render.py --check     # write nothing; print the differences, and fail if a page differs
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
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--check] [NN ...]",
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="number or folder of a lesson (default: all lessons)")
    parser.add_argument("--check", action="store_true", help="compare pages and scripts, and write nothing")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(find_lessons(ROOT), options.lessons)
        if len(chosen) == 1:
            return update(chosen[0], options.check)
    except LessonError as error:
        print(error, file=sys.stderr)
        return 1
    # Each lesson runs in its own process, so that no lesson affects another.
    command = [sys.executable, __file__, *(["--check"] if options.check else [])]
    statuses = [subprocess.run([*command, folder.name]).returncode for folder in chosen]
    return int(any(statuses))


def choose(lessons: list[Path], names: list[str]) -> list[Path]:
    """Return the lessons with these names ('1', '01', '01_tokens', 'lessons/01_tokens'), or all if no names are given.

    Raises
    ------
    LessonError
        A name matches no lesson.
    """
    by_name = {folder.name: folder for folder in lessons}
    by_name |= {folder.name[:2]: folder for folder in lessons}
    keys = [Path(name).name.zfill(2) for name in names]
    if unknown := [key for key in keys if key not in by_name]:
        available = ", ".join(folder.name for folder in lessons)
        raise LessonError(f"no lesson {unknown[0]!r} in {ROOT}; available: {available or 'none'}")
    return [by_name[key] for key in keys] or lessons


def update(folder: Path, check: bool) -> int:
    """Run one lesson, then write its page or compare the page with the one on disk. Return the exit status."""
    start = time.perf_counter()
    page = render(folder)
    duration = f"({time.perf_counter() - start:.1f} s)"
    if not check:
        write_page(folder, page)
        print(f"{folder.name}: page written {duration}")
        return 0
    if diff := difference(read_page(folder), page, f"{folder.name}/README.md"):
        print(f"{diff}\n\n{folder.name}: the page is out of date {duration}.")
        print(f"To update it: python lessons/render.py {folder.name[:2]}")
        return 1
    print(f"{folder.name}: the page is up to date {duration}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
