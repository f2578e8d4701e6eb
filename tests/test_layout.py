"""The layout of the tests: the folders of minillm/, and shared helpers only in support/ and conftest.py."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "minillm"
MODULES = sorted(TESTS.rglob("*.py"))

# Folders of tests without a package of the same name: helpers, the lessons, comparisons with other implementations, and
# the tests of the module llm.py.
OTHER_FOLDERS = {"support", "lessons", "oracle", "llm"}


def imported_modules(path):
    """Return the dotted names of all modules that a file imports, functions included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_module_imports_a_test_module(path):
    test_modules = {module.stem for module in MODULES if module.stem.startswith("test_")} | {"conftest"}
    imported = {part for name in imported_modules(path) for part in name.split(".")}
    assert not imported & test_modules, "move what both use into tests/support or a conftest.py"


def test_folders_mirror_the_package():
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("*.py"))}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - OTHER_FOLDERS == packages


def test_test_modules_have_different_names():
    """pytest imports test modules by their file names, without the folders."""
    names = [path.name for path in MODULES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
