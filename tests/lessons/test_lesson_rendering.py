"""Tests of rendering lessons, on small lessons written here: what a page shows, and when it is out of date."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from matplotlib import pyplot

LESSONS = Path(__file__).parents[2] / "lessons"
sys.path.insert(0, str(LESSONS))
cells = importlib.import_module("rendering.cells")
page = importlib.import_module("rendering.page")


@pytest.fixture
def lesson(tmp_path):
    """Return a function that writes a lesson's script to its own folder and returns the folder."""

    def write(text: str, name: str = "01_small") -> Path:
        folder = tmp_path / "lessons" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lesson.py").write_text(dedent(text))
        return folder

    yield write
    pyplot.close("all")


def run(*arguments: object, cwd: Path) -> tuple[int, str]:
    """Run Python with this checkout's minillm; return the exit status and the output."""
    environment = os.environ | {"PYTHONPATH": str(LESSONS.parent)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def difference_after(folder: Path, old: str, new: str) -> str:
    """Write the page, replace `old` by `new` in the script, and return the difference between page and new script."""
    page.write_page(folder, page.render(folder))
    script = folder / "lesson.py"
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))
    return page.difference(page.read_page(folder), page.render(folder), "small")


def test_a_page_has_prose_code_and_output(lesson):
    folder = lesson("""\
        # %% [markdown]
        # # 1. Small
        #
        # Prose, with a `#`: # kept.

        # %%
        x = 20
        print("printed  ")
        x + 1

        # %%
        None

        # %% tags=["hidden"]
        print("unseen"); x = 3

        # %%
        print("```")
        __name__, __file__[-9:], x
        """)
    text = page.render(folder).markdown
    assert text.splitlines()[2:5] == ["# 1. Small", "", "Prose, with a `#`: # kept."]
    assert '```python\nx = 20\nprint("printed  ")\nx + 1\n```\n\n```text\nprinted\n21\n```\n' in text
    assert "```python\nNone\n```\n\n````python" in text
    assert "unseen" not in text
    assert "````text\n```\n('__main__', 'lesson.py', 3)\n````" in text


def test_rendering_twice_gives_the_same_bytes(lesson):
    folder = lesson("""\
        # %%
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots(num="twice")
        axes.plot([1, 2], [3, 4], clip_on=True)
        axes.set_title("A line");
        """)
    first, second = page.render(folder), page.render(folder)
    assert first == second
    page.write_page(folder, first)
    assert page.read_page(folder) == first
    assert page.difference(first, second, "small") == ""


def test_an_outdated_page_is_reported_as_a_diff(lesson):
    folder = lesson("""\
        # %%
        total = 6
        total * 7
        """)
    assert page.difference(page.read_page(folder), page.render(folder), "small") != ""  # no page yet
    lines = difference_after(folder, "total = 6", "total = 5").splitlines()
    assert lines[:2] == ["--- small (the page)", "+++ small (the script)"]
    assert {"-total = 6", "+total = 5", "-42", "+35"} <= set(lines)


def test_output_and_figures_of_a_timing_cell_are_shown_but_not_compared(lesson):
    script = """\
        # %% [markdown]
        # # 1. Timed
        # %% tags=["timing"]
        import matplotlib.pyplot as plt
        from pathlib import Path

        speed = float(Path(__file__).with_name("speed").read_text())
        print(f"{speed} tokens/s\\n" * int(speed))
        figure, axes = plt.subplots(num="speed")
        axes.bar([0], [speed])
        axes.set_title("Speed")
        plt.show()
        """
    folder = lesson(script)
    pages = []
    for speed in ("1.5", "3.5"):
        (folder / "speed").write_text(speed)
        pages.append(page.render(folder))
        assert f"{speed} tokens/s" in pages[-1].markdown
        assert page.TIMING_NOTE in pages[-1].markdown
    assert pages[0] != pages[1]
    assert page.difference(*pages, "small") == ""

    lesson(script.replace(' tags=["timing"]', ""))
    untimed = page.render(folder)
    (folder / "speed").write_text("1.5")
    diff = page.difference(page.render(folder), untimed, "small")
    assert "-1.5 tokens/s" in diff
    assert "-figures/speed.svg:     Rectangle: 5x2: -0.4 .. 0.4 (mean -0.08), 0 .. 1.5 (mean 0.6)" in diff


@pytest.mark.parametrize(
    ("draw", "other"),
    [
        ("axes.plot([1, 2, 3], [4, 5, 6])", "axes.plot([1, 2, 3], [4, 5, 7])"),
        ("axes.bar(['a', 'b'], [1, 2])", "axes.bar(['a', 'b'], [1, 3])"),
        ("axes.scatter([1, 2], [3, 4], c=[0, 1])", "axes.scatter([1, 2], [3, 4], c=[0, 2])"),
        ("axes.imshow([[1, 2], [3, 4]])", "axes.imshow([[1, 2], [3, 5]])"),
        ("axes.fill_between([0, 1], [1, 2])", "axes.fill_between([0, 1], [1, 3])"),
        ("axes.text(0, 0, 'here')", "axes.text(0, 0, 'there')"),
        ("axes.set_xlabel('ms')", "axes.set_xlabel('s')"),
    ],
)
def test_figures_are_compared_by_their_data(lesson, draw, other):
    folder = lesson("""\
        # %% tags=["hidden"]
        import matplotlib.pyplot as plt
        from pathlib import Path
        draw = Path(__file__).with_name("draw").read_text()
        # %%
        figure, axes = plt.subplots(num="drawing")
        exec(draw)
        axes.set_title("A [title]")
        plt.show()
        # %%
        plt.get_fignums()
        """)
    (folder / "draw").write_text(draw)
    page.write_page(folder, page.render(folder))
    assert r"![A \[title\]](figures/drawing.svg)" in (folder / "README.md").read_text()
    assert "```text\n[]\n```" in (folder / "README.md").read_text(), "figures must be closed after their cell"
    (folder / "draw").write_text(f"{draw}; figure.set_size_inches(5, 3)")
    assert page.difference(page.read_page(folder), page.render(folder), "small") == "", "only the SVG differs"
    (folder / "draw").write_text(other)
    diff = page.difference(page.read_page(folder), page.render(folder), "small")
    assert "+figures/drawing.svg: " in diff


def test_rounding_errors_do_not_change_the_summary_of_a_figure(lesson):
    folder = lesson("""\
        # %%
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots(num="noise")
        axes.plot([-3, 3], [1e-17, 1.0])
        axes.set_title("Noise");
        """)
    diff = difference_after(folder, "[-3, 3], [1e-17, 1.0]", "[-3 - 1e-15, 3], [0, 1 + 1e-12]")
    assert not [line for line in diff.splitlines() if "figures/" in line and line[0] in "+-"]


def test_a_missing_and_a_stale_figure_are_reported_and_fixed(lesson):
    folder = lesson("""\
        # %%
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots(num="one")
        axes.set_title("One");
        """)
    fresh = page.render(folder)
    page.write_page(folder, fresh)
    figure = folder / "figures" / "one.svg"
    figure.rename(figure.with_name("two.svg"))
    diff = page.difference(page.read_page(folder), fresh, "small")
    assert "-figures/two.svg: One" in diff
    assert "+figures/one.svg: One" in diff
    page.write_page(folder, fresh)
    assert [path.name for path in figure.parent.iterdir()] == ["one.svg"]


def test_prose_quotes_the_library(lesson):
    folder = lesson("""\
        # %% [markdown]
        # Before.
        #
        # {{ source: minillm.errors.CheckpointError }}
        """)
    errors = (LESSONS.parent / "minillm" / "errors.py").read_text().splitlines()
    line = errors.index("class CheckpointError(MinillmError):") + 1
    text = page.render(folder).markdown
    assert "Before.\n\n```python\nclass CheckpointError(MinillmError):\n    " in text
    assert f"<sub>[`minillm/errors.py`, line {line}](../../minillm/errors.py#L{line})</sub>" in text


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        ("# %%\nx = 1\n\n# %%\ny = 2\n1 / 0\n", 6, "ZeroDivisionError: division by zero"),
        ("# %%\ndef f():\n    return missing\n\n# %%\nf()\n", 6, "NameError: name 'missing' is not defined"),
        ("# %%\nx = 1\nif x\n", 3, "SyntaxError"),
        ("# %%\nraise SystemExit(3)\n", 2, "SystemExit: 3"),
        ("# %%\nobject()\n", 2, "memory address"),
        ("x = 1\n# %%\n", 1, "must start with a cell mark"),
        ("# nothing\n", 1, "must start with a cell mark"),
        ("# %%\n# %% [markdwn]\n", 2, "malformed cell mark '# %% [markdwn]'"),
        ('# %% tags=["timed"]\n', 1, "unknown tag 'timed'"),
        ("# %% [markdown]\n# prose\nx = 1\n", 3, "code in a markdown cell"),
        (
            "# %% [markdown]\n# {{ source: minillm.errors.Nothing }}\n",
            2,
            "minillm.errors.Nothing has no source",
        ),
        ("# %% [markdown]\n#\n# {{ source: os.path.join }}\n", 3, "malformed quote '{{ source: os.path.join }}'"),
        ("# %%\nimport matplotlib.pyplot as p\np.figure('A b');\n", 2, "figure 1 is named 'A b'"),
        ("# %%\nimport matplotlib.pyplot as p\np.figure('a');\n", 2, "figure 'a' has no title"),
    ],
)
def test_an_error_names_the_line_of_the_script(lesson, body, line, reason):
    folder = lesson(body)
    with pytest.raises(cells.LessonError) as raised:
        page.render(folder)
    first = str(raised.value).splitlines()[0]
    assert first.startswith(f"{folder / 'lesson.py'}:{line}: ")
    assert reason in first


def test_rendering_restores_the_state_of_the_process(lesson):
    before = sys.modules["__main__"], list(sys.path)
    page.render(lesson("# %%\nimport sys\nsys.path.append('here'); x = 1\n"))
    assert (sys.modules["__main__"], sys.path) == before


def test_pages_link_to_their_neighbours(lesson):
    for name in ("01_first", "02_second_thing", "04_fourth"):
        folder = lesson("# %% [markdown]\n# # 1. Small\n", name)
    root = folder.parent
    last_lines = [page.render(folder).markdown.splitlines()[-1] for folder in page.find_lessons(root)]
    assert last_lines == [
        "[All lessons](../README.md) · Next: [02 second thing](../02_second_thing/README.md)",
        "Previous: [01 first](../01_first/README.md) · [All lessons](../README.md) · "
        "Next: [04 fourth](../04_fourth/README.md)",
        "Previous: [02 second thing](../02_second_thing/README.md) · [All lessons](../README.md)",
    ]


def test_the_command_writes_and_checks_pages(lesson, tmp_path):
    for number in ("01", "02"):
        folder = lesson(f"# %%\nprint({number!r})\n", f"{number}_small")
    shutil.copytree(LESSONS / "rendering", folder.parent / "rendering")
    shutil.copy(LESSONS / "render.py", folder.parent)

    def command(*arguments: str) -> tuple[int, str]:
        return run(folder.parent / "render.py", *arguments, cwd=tmp_path)

    status, output = command("1")
    assert (status, (folder.parent / "01_small" / "README.md").exists()) == (0, True), output
    assert not (folder / "README.md").exists()
    status, output = command("--check", "01")
    assert (status, "01_small: the page is up to date" in output) == (0, True), output
    status, output = command("--check")
    assert status == 1
    assert "02_small: the page is out of date" in output
    assert "python lessons/render.py 02" in output
    assert not (folder / "README.md").exists(), "--check must not write a page"
    assert command()[0] == 0
    assert command("--check")[0] == 0
    (folder / "lesson.py").write_text("# %%\n1 / 0\n")
    status, output = command("02")
    assert (status, "lesson.py:2: ZeroDivisionError" in output) == (1, True), output
    status, output = command("3")
    assert (status, "no lesson '03'" in output) == (1, True), output


def test_an_exercise_is_reported_as_missing_wrong_or_right(lesson):
    for name, error in (("01_small", "CheckpointError"), ("02_small", "RequestError")):
        folder = lesson("# %%\n", name)
        (folder / "exercises.py").write_text(
            f'ANSWERS = {{"error": "minillm.errors.{error}"}}\n\n\n'
            'def error(text):\n    raise NotImplementedError("your turn")\n'
        )
        (folder / "test_exercises.py").write_text(
            f'def test_error(exercises):\n    assert type(exercises.error("text")).__name__ == "{error}"\n'
        )
    lessons = folder.parent
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(LESSONS / name, lessons)

    def test(*arguments: str) -> tuple[int, str]:
        return run("-m", "pytest", "-p", "no:cacheprovider", "lessons", *arguments, cwd=lessons.parent)

    status, output = test()
    assert status == 1
    assert f"error() is not written yet: {Path('lessons/01_small/exercises.py')}:5" in output
    assert "NotImplementedError" not in output
    status, output = test("--answers")
    assert (status, "2 passed" in output) == (0, True), output
    exercise = folder / "exercises.py"
    exercise.write_text(exercise.read_text().replace("raise NotImplementedError", "return ValueError"))
    status, output = test()
    assert status == 1
    assert "assert 'ValueError' == 'RequestError'" in output
