"""A step plan from which a chunk is withdrawn."""

from minillm.engine.block_table import FREED, BlockTable
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.trace import BlockCopy


def test_withdrawing_a_chunk_withdraws_its_block_copies():
    plan, sequences = StepPlan(copies=[BlockCopy(7, 1), BlockCopy(7, 2)]), []
    for name, table in (("a", [0, 1]), ("b", [FREED, 2])):
        sequences.append(Sequence.from_prompt(name, [3] * 4, 1))
        sequences[-1].block_tables = [BlockTable(4, 8, table)]
        plan.add_chunk(sequences[-1], 4)
    plan.withdraw(sequences[1])
    assert ([chunk.name for chunk in plan.chunks], plan.num_tokens, plan.copies) == (["a"], 4, [BlockCopy(7, 1)])
    plan.withdraw(sequences[1])
    assert plan.num_tokens == 4
