"""The exercises of lesson 7. Run `pytest lessons/07_batching` to test your solutions."""

from collections.abc import Sequence

from minillm.engine.scheduler import Scheduler
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import Batch, Chunk

ANSWERS = {
    "from_chunks": "minillm.model.batch.Batch.from_chunks",
    "schedule": "minillm.engine.scheduler.Scheduler.schedule",
}


def from_chunks(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Lay the T tokens of S chunks end to end, and return `Batch(token_ids, positions, slots, ...)`.

    Parameters
    ----------
    chunks : each chunk has `token_ids`, `start` and `block_tables`. `start` is the position of the first token in its
        sequence. `block_tables[0]` lists the sequence's blocks: position p is stored in block
        `block_tables[0][p // block_size]`, at offset `p % block_size`.
    block_size : positions per block.

    Returns
    -------
    A Batch of the arrays below. The leading 1 is the number of KV-cache groups; lesson 8 covers models with several.

    token_ids, positions : int32 [T], one entry per token, in the order of the chunks.
    slots : int64 [1, T], `block * block_size + offset` of each token.
    query_starts : int32 [S + 1]. Chunk s owns the tokens from `query_starts[s]` up to, but excluding,
        `query_starts[s + 1]`.
    block_tables : int32 [1, S, length of the longest table]. Shorter tables are padded with -1.

    Raises
    ------
    ValueError
        There are no chunks, a chunk has no tokens, a chunk starts before position 0, or its block table does not cover
        its tokens.
    """
    raise NotImplementedError("your turn")


def schedule(self: Scheduler) -> StepPlan:
    """Decide the next step: create a `StepPlan()`, fill it and return it. This is a method of `Scheduler`.

    Three methods fill a plan. Each one stops when the step's token budget is used up:

    self._decode(plan) : advance every running sequence that is past its prompt by one token.
    self._prefill(plan) : advance the running sequences whose prompts are not fully computed.
    self._admit(plan) : admit as many waiting sequences as there is room for, and start their prompts.

    `self.policy` determines which methods to call, and in which order:

    "static" : admit sequences only when none is running.
    "continuous" : admit sequences in every step.
    "chunked" : call all three methods in every step: first decodes, then prompts in progress, then new prompts.

    Under "static" and "continuous", prompts come first: sequences decode only in a step that computes no prompt. So
    check whether `plan.chunks` is still empty. `self.running` lists the running sequences.
    """
    raise NotImplementedError("your turn")
