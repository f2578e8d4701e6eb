"""Compiler options of the kernels, and the number of threads that they run on."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# A thread that has finished its share of a loop waits for the others by spinning, by default for a long time. If
# another program is busy on the machine, decode then gets 50 times slower, because the spinning thread occupies the
# core that the last share needs. Spinning briefly and then sleeping costs 5 % on an idle machine. OpenMP reads this
# when loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
from numba import njit
from numba.core import event

from minillm.errors import SlowThreadsWarning

OPTIONS = {
    "cache": True,
    "nogil": True,
    # Nothing may reorder a sum. `contract` fuses a multiply and an add into one rounding; `nsz` ignores the sign of
    # zero. `reassoc`, which would split sums over SIMD lanes, is never on, and so `fastmath=True` is not used.
    "fastmath": {"contract", "nsz"},
    # Dividing by zero gives infinity, as in NumPy. A test of every divisor would keep loops from becoming SIMD.
    "error_model": "numpy",
}


def _sources() -> str:
    """Return a hash of all source files of the kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _sources()


def _kernel(**options: object) -> Callable[[Callable], Callable]:
    def compile_with_options(function: Callable) -> Callable:
        kernel = njit(**OPTIONS, **options)(function)
        if not numba.config.DISABLE_JIT:
            # Numba recompiles a kernel only when its own file changes, but it may call kernels of other files.
            kernel._cache._cache_file._source_stamp = SOURCES
        return kernel

    return compile_with_options


# This call starts the threads. Numba starts them when it compiles a parallel kernel or loads one from its cache, but
# not when a cached kernel contains another cached kernel: without this call, the first parallel loop would then crash.
numba.get_num_threads()

compiled = _kernel()
compiled_parallel = _kernel(parallel=True)
inlined = _kernel(inline="always")  # for functions called in innermost loops, where a call would cost too much


SLOW_THREADS = (
    "Numba found neither OpenMP nor TBB, or is configured not to use them, and runs its own threads ('workqueue'). "
    "These take about 100 microseconds instead of 2 to start a parallel loop, so decoding is three times slower, and "
    "two models that run at once crash the process. Install OpenMP (Debian, Ubuntu: apt install libgomp1) or TBB (pip "
    "install tbb), and leave NUMBA_THREADING_LAYER unset; see https://numba.readthedocs.io/en/stable/user/threading-layer.html"
)


def set_num_threads(threads: int | None) -> None:
    """Set the number of cores for the parallel loops of this thread; None for all. The results do not change.

    Raises
    ------
    ValueError
        `threads` is below 1, or above the number of cores.
    """
    num_cores = numba.config.NUMBA_NUM_THREADS
    if threads is not None and not 1 <= threads <= num_cores:
        raise ValueError(f"threads is {threads}; on this machine it can be 1 to {num_cores}")
    numba.set_num_threads(threads or num_cores)


def check_threads() -> None:
    """Warn with SlowThreadsWarning if Numba has only its slow threads. Call this after `set_num_threads`.

    Numba chooses its threading layer in that call, or in an earlier parallel loop.
    """
    if numba.threading_layer() == "workqueue" and not numba.config.DISABLE_JIT:
        warnings.warn(SLOW_THREADS, SlowThreadsWarning, stacklevel=3)  # reported for the line that creates an LLM


@contextmanager
def announcing_compilation(announce: Callable[[str], None]) -> Iterator[None]:
    """Call `announce` once if a kernel has to be compiled within the `with` block.

    Kernels are compiled at their first call, for the processor of this machine, and cached beside their source or, if
    that folder is read-only, in the user's cache folder. Later processes load them in milliseconds.
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
