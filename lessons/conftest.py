"""Fixtures for tests of the exercises. The fixture `exercises` is the `exercises.py` module of the test's lesson.

pytest lessons/01_tokens              # test your functions
pytest lessons/01_tokens --answers    # test the library's functions instead
"""

import importlib.util
import os
import pkgutil
from collections.abc import Generator
from types import ModuleType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --answers."""
    parser.addoption("--answers", action="store_true", help="test the library's functions instead of yours")


@pytest.fixture
def exercises(request: pytest.FixtureRequest) -> ModuleType:
    """Load the lesson's `exercises.py`. With --answers, use the library functions named in its `ANSWERS`."""
    path = request.path.with_name("exercises.py")
    spec = importlib.util.spec_from_file_location(f"exercises of {path.parent.name}", path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if request.config.getoption("--answers"):
        for name, answer in module.ANSWERS.items():
            setattr(module, name, pkgutil.resolve_name(answer))
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report an unwritten exercise in one line instead of a traceback."""
    report = yield
    if call.excinfo and call.excinfo.errisinstance(NotImplementedError):
        entry = call.excinfo.traceback[-1]
        path = os.path.relpath(entry.path, item.config.invocation_params.dir)
        report.longrepr = f"{entry.name}() is not written yet: {path}:{entry.lineno + 1}"
    return report
