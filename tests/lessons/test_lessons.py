"""Tests of every lesson: its page, its sections and its exercises; and of the table that lists the lessons."""

import ast
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "lessons"
FOLDERS = sorted(path for path in LESSONS.glob("[0-9][0-9]_*") if path.is_dir())
TO_DO = 'raise NotImplementedError("your turn")'
MAX_LINES = 400  # of a lesson's script

# A lesson must run with the core dependencies alone; its figures also need Matplotlib.
OPTIONAL = ("torch", "transformers", "accelerate", "gguf", "hypothesis", "pytest", "huggingface_hub")
WITHOUT_OPTIONAL = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OPTIONAL}, None))  # importing one of these now raises ImportError
del sys.argv[0]
sys.path.insert(0, {str(LESSONS)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""

each_lesson = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run Python with this checkout's minillm; `stdout` of the result has all output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=cwd, env=environment, **output)


def run_exercises(lessons: Path, *arguments: object) -> subprocess.CompletedProcess:
    return run("-m", "pytest", "-p", "no:cacheprovider", lessons, *arguments, cwd=lessons)


def without_code(markdown: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)


def section(markdown: str, title: str) -> str:
    """Return the text under a second-level heading; '' if there is no such heading."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |^---$|\Z)", markdown, flags=re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def read_table() -> dict[str, tuple[str, str]]:
    """Return the table of lessons in lessons/README.md: number -> (name or link, question)."""
    rows = re.findall(r"^\| (\d\d) \| (.+?) \| (.+?) \|$", (LESSONS / "README.md").read_text(), flags=re.MULTILINE)
    return {number: (lesson, question) for number, lesson, question in rows}


def load_exercises(folder: Path):
    spec = importlib.util.spec_from_file_location("exercises", folder / "exercises.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_lists_all_lessons_and_links_the_ones_that_exist():
    rows = read_table()
    assert list(rows) == [f"{number:02}" for number in range(1, 15)]
    linked = [re.fullmatch(r"\[.+\]\((.+)/README\.md\)", lesson) for lesson, _ in rows.values()]
    assert [link[1] for link in linked if link] == [folder.name for folder in FOLDERS]
    for (number, (lesson, question)), link in zip(rows.items(), linked, strict=True):
        assert question.endswith("?")
        assert link[1].startswith(f"{number}_") if link else lesson.endswith(" *(planned)*")


@each_lesson
def test_the_page_is_up_to_date(folder):
    done = run("-c", WITHOUT_OPTIONAL, LESSONS / "render.py", "--check", folder.name)
    assert done.returncode == 0, done.stdout


def names(nodes: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    """Return the names that these statements read (`ast.Load`) or assign (`ast.Store`)."""
    found = (node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, context)}


@each_lesson
def test_matplotlib_is_used_only_under_if_plt(folder):
    """Without Matplotlib, the code under `if plt:` is skipped, so no other code may use a name that it assigns."""
    top = ast.parse((folder / "lesson.py").read_text()).body
    guards = [node for node in top if isinstance(node, ast.If) and ast.unparse(node.test) == "plt"]
    imports = [node for node in top if isinstance(node, ast.Try) and "plt = None" in ast.unparse(node)]
    others = [node for node in top if node not in guards and node not in imports]
    guarded = [statement for node in guards for statement in node.body]
    assert not any("matplotlib" in ast.unparse(node) or "import plots" in ast.unparse(node) for node in others)
    assigned = names(guarded, ast.Store) - names(others, ast.Store)
    assert not names(others, ast.Load) & (assigned | {"plt"})


@each_lesson
def test_the_page_has_the_sections_of_a_lesson(folder):
    markdown = without_code((folder / "README.md").read_text())
    assert re.findall(r"^# (\d+)\. \S", markdown, flags=re.MULTILINE) == [str(int(folder.name[:2]))]
    assert len(re.findall(r"^# ", markdown, flags=re.MULTILINE)) == 1
    question = re.search(r"^# .*\n\n\*\*(.+?)\*\*$", markdown, flags=re.MULTILINE)
    assert question, "the question must follow the title, in bold"
    assert question[1] == read_table()[folder.name[:2]][1]
    production = section(markdown, "What production systems do differently")
    assert re.search(r"\]\(https?://", production), "the section about production systems cites no source"
    exercises = section(markdown, "Exercises")
    for name in load_exercises(folder).ANSWERS:
        assert f"`{name}`" in exercises


@each_lesson
def test_every_link_within_the_repository_has_a_target(folder):
    markdown = without_code((folder / "README.md").read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", markdown):
        if not link.startswith(("http://", "https://", "#")):
            assert (folder / link.partition("#")[0]).exists(), link


@each_lesson
def test_the_script_is_short(folder):
    assert len((folder / "lesson.py").read_text().splitlines()) <= MAX_LINES


@each_lesson
def test_each_exercise_has_a_docstring_and_an_answer_of_the_same_parameters(folder):
    exercises = load_exercises(folder)
    assert 2 <= len(exercises.ANSWERS) <= 3
    tree = ast.parse((folder / "exercises.py").read_text())
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == list(exercises.ANSWERS)
    for name, answer in exercises.ANSWERS.items():
        exercise = getattr(exercises, name)
        assert inspect.getdoc(exercise)
        assert TO_DO in inspect.getsource(exercise)
        assert answer.startswith("minillm.")
        parameters = inspect.signature(pkgutil.resolve_name(answer)).parameters
        required = [parameter for parameter in parameters if parameters[parameter].default is inspect.Parameter.empty]
        assert list(inspect.signature(exercise).parameters) in (
            list(parameters),
            required,
        )  # optional ones may be omitted


@each_lesson
def test_the_answers_in_the_library_pass_the_tests(folder):
    done = run_exercises(folder, "--answers")
    assert done.returncode == 0, done.stdout


@each_lesson
def test_no_exercise_passes_unwritten_or_returning_nothing(folder, tmp_path):
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(LESSONS / name, tmp_path)
    for kind, body in (("unwritten", TO_DO), ("returning_nothing", "return None")):
        copy = shutil.copytree(folder, tmp_path / f"{folder.name}_{kind}") / "exercises.py"
        copy.write_text(copy.read_text().replace(TO_DO, body))
    done = run_exercises(tmp_path)
    assert done.returncode == 1, done.stdout
    assert " passed" not in done.stdout
    for name in load_exercises(folder).ANSWERS:
        assert f"{name}() is not written yet" in done.stdout
