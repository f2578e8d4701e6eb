"""Facts about a model and the memory that it needs, from its headers and a few rows, without loading it.

facts.py    the tensors in the file and in memory
memory.py   the memory of this machine, and what fits into it
report.py   both as tables
command.py  `minillm info`
"""

from minillm.info.command import run
from minillm.info.facts import TensorGroup, count_parameters, tensor_groups
from minillm.info.memory import Memory, contexts, find_memory, positions_held, sequence_bytes, sequences_that_fit

__all__ = [
    "Memory",
    "TensorGroup",
    "contexts",
    "count_parameters",
    "find_memory",
    "positions_held",
    "run",
    "sequence_bytes",
    "sequences_that_fit",
    "tensor_groups",
]
