"""Settings and fixtures of all tests: threads, Hypothesis, the order of the tests, and real model files."""

import os
import signal
from pathlib import Path

# Set before OpenMP is loaded, so that PyTorch's idle threads sleep instead of spinning; see ops/jit/compiling.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # OpenBLAS has no such setting, and its threads would spin

# Some tests compare one thread with two, even on one core. Numba reads this variable when it is imported.
if (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) == 1:
    os.environ.setdefault("NUMBA_NUM_THREADS", "2")

import pytest
from hypothesis import HealthCheck, settings

from minillm import catalog
from minillm.catalog.fetch import has_size
from minillm.checkpoints import Checkpoint, open_checkpoint

# A shell makes background jobs ignore Ctrl-C. The programs that tests start and interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# transformers and tokenizers must not use the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples in every run. No deadline, because the first call of a kernel compiles it.
settings.register_profile(
    "minillm", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("minillm")


MAX_WORKERS = 2  # processes that run tests; each of them holds a model in memory


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return min(MAX_WORKERS, os.cpu_count() or 1) if config.option.usepdb is False else 0


# The tests that compile most kernels come first, in one worker's half of the tests, so that two workers rarely compile
# the same kernel at the same time, and no long test is the last.
COMPILING_FILES = ["test_generic_cpu.py", "test_kernels.py", "test_ops.py", "test_architectures.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(COMPILING_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, downloaded if it is not in the cache."""
    return catalog.resolve()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    """A GGUF file with a tiny random Llama, in Q8_0, and a tokenizer."""
    from support.builders import random_llama, write_gguf  # imports torch, which few tests of the engine need

    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", random_llama(), "Q8_0", with_tokenizer=True)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """The Gemma 3 270M file. The model has terms of use, so only CI downloads it; elsewhere the cache must hold it."""
    entry = catalog.CATALOG["gemma3-270m"]
    is_cached = has_size(catalog.cache_folder() / entry.file_name, entry.num_bytes)
    if not is_cached and not os.environ.get("CI"):
        pytest.skip(f"{entry.name} is not in the cache; to accept its terms and download it: minillm info {entry.name}")
    return catalog.resolve(entry.name)


@pytest.fixture(scope="session")
def default_checkpoint(default_gguf) -> Checkpoint:
    return open_checkpoint(default_gguf)
