"""minillm bench: speed, compared with the limits of the machine and with other engines in the same run.

A single figure means little, because machines differ, and vary by a third from hour to hour. Each figure is therefore
shown with its limit (`minillm.trace.roofline`), which follows from measurements of the machine (`machine`), and with
the time that other engines take for the same work (`engines`), measured in alternating turns (`turns`). Every engine
runs in its own process (`worker`, `client`), so that their thread pools do not disturb each other.
"""

from minillm.bench.benchmark import Benchmark, Settings, run_benchmark
from minillm.bench.command import run

__all__ = ["Benchmark", "Settings", "run", "run_benchmark"]
