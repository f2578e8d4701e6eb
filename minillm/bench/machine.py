"""The machine: its name, and its measured limits."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from minillm.bench.client import Worker
from minillm.bench.turns import Spread
from minillm.trace.roofline import Roofline

LIMITS = Path(__file__).parent / "engines" / "machine.py"
MIN_READ = 512 * 2**20  # bytes; many times the cache of any one core

# Environment variables that set the number of threads of the BLAS libraries that NumPy may use.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass
class Machine:
    """A machine's name and measured limits. The lists have one figure per measurement."""

    cpu: str
    cores: int  # available to this process
    threads: int  # used by every engine
    system: str
    versions: dict[str, str]
    load_average: float | None  # at the start, over the last minute
    bandwidths: list[float] = field(default_factory=list)  # bytes per second
    peaks: list[float] = field(default_factory=list)  # float32 operations per second

    @property
    def bandwidth(self) -> Spread:
        """Memory read bandwidth, bytes per second."""
        return Spread.of(self.bandwidths)

    @property
    def peak(self) -> Spread:
        """Float32 operations per second in a large matrix product."""
        return Spread.of(self.peaks)

    @property
    def roofline(self) -> Roofline:
        """The best measured values, which serve as the limits."""
        return Roofline(self.bandwidth.high, self.peak.high)

    @property
    def is_busy(self) -> bool:
        """Whether other programs used a quarter of the machine or more at the start."""
        return self.load_average is not None and self.load_average > 0.25 * self.cores


def describe_machine(threads: int) -> Machine:
    """Return the machine's description, before anything is measured."""
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        threads=threads,
        system=platform.platform(),
        versions={"python": platform.python_version()},
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def measure_machine(machine: Machine, *, quick: bool = False) -> None:
    """Measure memory bandwidth and float32 peak, each in its own process, and add the figures to `machine`.

    In one process, the threads of NumPy's BLAS and of the reading loop would disturb each other by spinning.

    Raises
    ------
    BenchmarkError
        One of the processes failed.
    """
    num_bytes = 64 * 2**20 if quick else max(MIN_READ, 4 * last_level_cache_bytes())
    with Worker(LIMITS) as worker:
        machine.versions |= worker.call("versions")
        machine.bandwidths += worker.call(
            "bandwidth", num_bytes=num_bytes, threads=machine.threads, repeats=3 if quick else 10
        )
    with Worker(LIMITS, environment=dict.fromkeys(BLAS_THREADS, str(machine.threads))) as worker:
        machine.peaks += worker.call("matrix_product", size=512 if quick else 2048, repeats=3 if quick else 10)


def usable_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's name, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """Return the total size of all last-level caches in bytes; 0 if unknown. Only Linux reports it."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared_by = (index / "shared_cpu_list").read_text()
            sizes[shared_by] = int((index / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(sizes.values())
