"""What every test may lean on: reproducible hypothesis runs, and the default model."""

import os
import signal
from pathlib import Path

# Before anything loads OpenMP: PyTorch's threads, too, should sleep rather than spin; see ops/jit/compiling.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's have no such setting, and would spin against them

import pytest
from hypothesis import HealthCheck, settings

from minillm import catalog
from minillm.checkpoints import Checkpoint, open_checkpoint

# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing a test loads may come from the network, or be looked for there.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples on every run; no deadline, for the first call of a kernel compiles it.
settings.register_profile(
    "minillm", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("minillm")


WORKERS = 2  # processes that run tests, each of which holds a model


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return min(WORKERS, os.cpu_count() or 1) if config.option.usepdb is False else 0


# Where most kernels are compiled. These come first, in one worker's half of the tests, while the other is at tests that
# need few: two that come to the same kernel at once both compile it. Nor is a long test then the last.
COMPILING = ["test_generic_cpu.py", "test_ops.py", "test_architectures.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(COMPILING)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, fetched if this machine has not got it yet."""
    return catalog.resolve()


@pytest.fixture(scope="session")
def default_checkpoint(default_gguf) -> Checkpoint:
    return open_checkpoint(default_gguf)
