"""Lesson 7's exercises. `pytest lessons/07_batching` tells you whether they are right."""

from collections.abc import Sequence

from minillm.engine.scheduler import Scheduler
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import Batch, Chunk

ANSWERS = {
    "from_chunks": "minillm.model.batch.Batch.from_chunks",
    "schedule": "minillm.engine.scheduler.Scheduler.schedule",
}


def from_chunks(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Lay the chunks end to end: a `Batch(token_ids, positions, slots, query_starts, block_tables)`.

    A chunk has `token_ids` (at least one), `start`, the position of the first of them in its sequence, and
    `block_table`, a list of the sequence's blocks: position p lies in block `block_table[p // block_size]` at offset
    `p % block_size`. The batch's arrays:

    token_ids, positions: int32 [T], of all chunks, one behind the other.
    slots: int64 [1, T], for each token its block times `block_size`, plus its offset.
    query_starts: int32 [S + 1]; chunk s owns tokens query_starts[s] up to, not including, query_starts[s + 1].
    block_tables: int32 [1, S, length of the longest table], a row a chunk, filled up with -1.

    In front stands the number of groups of layers that have blocks of their own: one, in most models (see lesson 8).

    No chunks at all, a chunk without tokens, one that starts before 0 or whose table ends before its tokens do:
    ValueError.
    """
    raise NotImplementedError("your turn")


def schedule(self: Scheduler) -> StepPlan:
    """Decide the next step, as a method of `Scheduler`: make a `StepPlan()`, fill it with these moves, return it.

    self._decode(plan): every running sequence whose prompt has been computed advances by a token.
    self._prefill(plan): running sequences whose prompt has not been computed to its end go on with it.
    self._admit(plan): as many waiting ones as there is room for start to run, and begin with their prompt.

    Each move stops where the step's token budget ends. `self.policy` says which moves, and in which order:

    "static": nobody joins while anyone runs. "continuous": whoever waits may join in every step. In both, prompts come
    first, and sequences decode only in a step that computes no prompt: see whether `plan.chunks` is still empty.
    "chunked": all three in one step. Decodes come first, then prompts under way, then new ones.

    `self.running` is the list of those that hold blocks.
    """
    raise NotImplementedError("your turn")
