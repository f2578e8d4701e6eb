"""How kernels are compiled, and on how many threads they run."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# A thread that has done its share of a loop waits for the others by spinning, for long by default: another busy
# program on the machine then makes decode 50 times slower, since the spinner takes the core that the last share
# needs. Spinning briefly and then sleeping costs 5 % on an idle machine. Read once, when OpenMP is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
from numba import njit
from numba.core import event

from minillm.errors import SlowThreadsWarning

OPTIONS = {
    "cache": True,
    "nogil": True,
    # Nothing may reorder a sum: `contract` fuses a multiply and an add into one rounding, `nsz` ignores the sign of
    # zero. `reassoc`, which would split sums over SIMD lanes, and with it `fastmath=True`, is never on.
    "fastmath": {"contract", "nsz"},
    # Dividing by zero gives infinity, as in NumPy; testing every divisor for it would keep loops from becoming SIMD.
    "error_model": "numpy",
}


def _sources() -> str:
    """A fingerprint of every file that kernels are made of."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _sources()


def _kernel(**options: object) -> Callable[[Callable], Callable]:
    def compile_with_options(function: Callable) -> Callable:
        kernel = njit(**OPTIONS, **options)(function)
        if not numba.config.DISABLE_JIT:
            # Numba keeps a kernel until its own file changes; but what it calls may stand in another.
            kernel._cache._cache_file._source_stamp = SOURCES
        return kernel

    return compile_with_options


# Asking starts the threads. Numba does so when it compiles a parallel kernel or loads one from the cache, but not for a
# kernel from the cache that was compiled around one from the cache: its first parallel loop would end the process.
numba.get_num_threads()

compiled = _kernel()
compiled_parallel = _kernel(parallel=True)
inlined = _kernel(inline="always")  # for what a kernel's innermost loops call, where a call would cost too much


SLOW_THREADS = (
    "Numba found neither OpenMP nor TBB, or was told not to look, and uses its own threads ('workqueue'): starting a "
    "parallel loop takes them some 100 microseconds instead of 2, so text comes a third as fast, and two models that "
    "run at once end the process. Install OpenMP (Debian, Ubuntu: apt install libgomp1) or TBB (pip install tbb), and "
    "leave NUMBA_THREADING_LAYER unset; see https://numba.readthedocs.io/en/stable/user/threading-layer.html"
)


def set_num_threads(threads: int | None) -> None:
    """Let this thread's parallel loops use so many cores; None means all there are. It changes no result's bits.

    Raises
    ------
    ValueError
        Fewer than one, or more than there are.
    """
    most = numba.config.NUMBA_NUM_THREADS
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"threads is {threads}; this machine has 1 to {most} to give")
    numba.set_num_threads(threads or most)


def check_threads() -> None:
    """Warn with SlowThreadsWarning where Numba has only slow threads to give. To be called after `set_num_threads`.

    That is when Numba chooses a threading layer, if no parallel loop has run before.
    """
    if numba.threading_layer() == "workqueue" and not numba.config.DISABLE_JIT:
        warnings.warn(SLOW_THREADS, SlowThreadsWarning, stacklevel=3)  # the line that makes an LLM


@contextmanager
def announcing_compilation(announce: Callable[[str], None]) -> Iterator[None]:
    """While the `with` block runs, say so, once, when a kernel has to be compiled: that takes a while.

    Kernels are compiled when first called, for the machine they run on, and kept beside their source (or, if that
    folder cannot be written, in the user's cache folder). Later processes load them in milliseconds.
    """

    class Listener(event.Listener):
        announced = False

        def on_start(self, compilation):
            if not self.announced:
                announce("compiling the kernels for this machine (once, about a minute) ...")
                self.announced = True

        def on_end(self, compilation):
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
