"""Pages that people read: every link has a target, and every quoted line exists."""

import importlib.util
import re
from pathlib import Path

import pytest

from minillm.checkpoints.hf_architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def anchors(page):
    """The fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not re.match(r"https?:", link):
            path, _, fragment = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            if fragment and target.suffix == ".md":
                assert fragment in anchors(target), link


def test_the_table_of_models_links_to_the_lines_it_quotes():
    spec = importlib.util.spec_from_file_location("relink", ROOT / "docs" / "relink.py")
    relink = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(relink)
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert len(relink.LINK.findall(page)) > 30
    assert relink.relinked(page, ROOT / "docs") == page, "run python docs/relink.py"
    architectures = set(re.findall(r"\| `(\w+)` \| ", page.partition("| --- |")[2]))
    assert architectures == set(ARCHITECTURES)  # one row per architecture


def test_the_readme_has_both_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("run", "test"):
        assert re.search(rf"<!-- {name} -->\n```bash\n(.+\n)+?```", text)


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_the_test_extra_pins_one_version_of_each_tool_that_ci_runs(tool):
    pinned = re.findall(rf'"({tool}==[0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(pinned) == 1  # .ci/run reads it with the same pattern


def words_of_the_code():
    """Every word in the package, its tests and the configuration of the project."""
    paths = [*(ROOT / "minillm").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml"]
    return set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in paths)))


def test_the_contributing_guide_names_things_that_exist():
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {name for quoted in re.findall(r"`([A-Za-z_][\w.]*)`", text) for name in quoted.split(".")}
    paths = [path for folder in ("minillm", "tests", "lessons", "docs") for path in (ROOT / folder).rglob("*.*")]
    files = {path.suffix[1:] for path in paths} | {path.stem for path in paths}
    assert len(names) > 30
    assert names <= words_of_the_code() | files, names - words_of_the_code() - files


def glossary_rows():
    """The cells of each row of the glossary: term, meaning, vLLM's name, llama.cpp's name, Korean term."""
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("| --- |")[2].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_glossary_is_sorted_and_complete():
    rows = glossary_rows()
    terms = [re.sub(r"\s*\(`.*", "", row[0]).casefold() for row in rows]
    assert len(rows) > 100
    assert terms == sorted(set(terms))
    for row in rows:
        assert len(row) == 5, row
        assert all(row), row
        assert re.fullmatch(r"[A-Z0-9].*[^.]\.", row[1]), row  # one sentence


def test_the_code_has_every_name_that_the_glossary_gives_it():
    names = {name for row in glossary_rows() for name in re.findall(r"`(\w+)`", row[0])}
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "minillm").rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    assert len(names) > 50
    assert names <= words, names - words


def test_the_public_ci_ignores_only_files_that_exist():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    ignored = re.findall(r"--ignore (\S+)", workflow)
    assert ignored
    assert all((ROOT / path).exists() for path in ignored)
