"""minillm bench: how fast, beside what the machine can do, and beside other engines in the same run.

A figure alone says little: machines differ, and wander by a third from hour to hour. So each is shown beside its
limit (`minillm.trace.roofline`), worked out from what the machine was measured to do (`machine`), and beside what others
need for the same work (`engines`), taken turn by turn (`turns`). Every engine runs in a process of its own
(`worker`, `client`), so that no pool of threads gets in the way of another's.
"""

from minillm.bench.benchmark import Benchmark, Settings, run_benchmark
from minillm.bench.command import run

__all__ = ["Benchmark", "Settings", "run", "run_benchmark"]
