"""What the machine is, and what it can do at best."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from minillm.bench.client import Worker
from minillm.bench.turns import Spread
from minillm.trace.roofline import Roofline

ENGINE = Path(__file__).parent / "engines" / "machine.py"
SMALLEST_READ = 512 * 2**20  # bytes; many times what any one core has for a cache

# How the libraries that may be under NumPy are told how many threads to use.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass
class Machine:
    """A machine's name and measures. Figures of several measurements stand side by side."""

    cpu: str
    cores: int  # that this process may use
    threads: int  # that the engines were given
    system: str
    versions: dict[str, str]
    load_average: float | None  # programs running at the start, over the last minute
    bandwidths: list[float] = field(default_factory=list)  # bytes a second
    peaks: list[float] = field(default_factory=list)  # float32 operations a second

    @property
    def bandwidth(self) -> Spread:
        """Bytes a second that can be read."""
        return Spread.of(self.bandwidths)

    @property
    def peak(self) -> Spread:
        """Float32 operations a second in a large matrix product."""
        return Spread.of(self.peaks)

    @property
    def roofline(self) -> Roofline:
        """The best that was seen: a limit that is rarely reached is still one."""
        return Roofline(self.bandwidth.high, self.peak.high)

    @property
    def is_busy(self) -> bool:
        """Whether others were using it at the start, a quarter of it or more."""
        return self.load_average is not None and self.load_average > 0.25 * self.cores


def describe_machine(threads: int) -> Machine:
    """The machine as it is before anything is measured."""
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        threads=threads,
        system=platform.platform(),
        versions={"python": platform.python_version()},
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def measure_machine(machine: Machine, *, quick: bool = False) -> None:
    """Add measures of memory bandwidth and float32 peak, each taken in a process of its own.

    Threads of NumPy's BLAS and of the reading loop would otherwise spin in each other's way.

    Raises
    ------
    BenchmarkError
        One of the processes failed.
    """
    num_bytes = 64 * 2**20 if quick else max(SMALLEST_READ, 4 * last_level_cache_bytes())
    with Worker(ENGINE) as worker:
        machine.versions |= worker.call("versions")
        machine.bandwidths += worker.call(
            "bandwidth", num_bytes=num_bytes, threads=machine.threads, repeats=3 if quick else 10
        )
    with Worker(ENGINE, environment=dict.fromkeys(BLAS_THREADS, str(machine.threads))) as worker:
        machine.peaks += worker.call("matrix_product", size=512 if quick else 2048, repeats=3 if quick else 10)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """What the processor calls itself, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """All last-level caches together, in bytes; 0 where the system does not tell (only Linux does)."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared_by = (index / "shared_cpu_list").read_text()
            sizes[shared_by] = int((index / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(sizes.values())
