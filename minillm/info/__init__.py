"""What a model is, and what it takes to run it, from its headers and a few rows: nothing is loaded.

facts.py    what is in the file, and what becomes of it in memory
memory.py   what this machine has, and what fits
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
