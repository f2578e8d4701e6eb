"""How the exercises are tested: a `test_exercises.py` asks for `exercises`, the functions of its own lesson.

pytest lessons/01_tokens              # your functions
pytest lessons/01_tokens --answers    # the library's in their place
"""

import importlib.util
import os
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --answers."""
    parser.addoption("--answers", action="store_true", help="test the library's functions, not the exercises")


@pytest.fixture
def exercises(request: pytest.FixtureRequest) -> ModuleType:
    """The lesson's `exercises.py`; with --answers, what its `ANSWERS` names is put in their place."""
    path = request.path.with_name("exercises.py")
    spec = importlib.util.spec_from_file_location(f"exercises of {path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if request.config.getoption("--answers"):
        for name, answer in module.ANSWERS.items():
            setattr(module, name, pkgutil.resolve_name(answer))
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Report an exercise that is still to do in one line, not in a traceback."""
    report = yield
    if call.excinfo and call.excinfo.errisinstance(NotImplementedError):
        at = call.excinfo.traceback[-1]
        path = os.path.relpath(at.path, item.config.invocation_params.dir)
        report.longrepr = f"{at.name}() is yours to write: {path}:{at.lineno + 1}"
    return report
