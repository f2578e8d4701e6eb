"""Lesson 4's exercises. `pytest lessons/04_kv_cache` tells you whether they are right."""

import numpy as np

ANSWERS = {
    "write_kv": "minillm.ops.reference.write_kv",
    "attention": "minillm.ops.reference.attention",
}


def write_kv(
    keys: np.ndarray,
    values: np.ndarray,
    key_blocks: np.ndarray,
    value_blocks: np.ndarray,
    layer_in_block: int,
    slots: np.ndarray,
) -> None:
    """Store each token's key and value [T, G, K] in layer `layer_in_block` of the blocks; change nothing else.

    key_blocks: [N, L, G, K, B], written in place. value_blocks: [N, L, G, B, K], too; mind that the last two axes are
    the other way round. slots [T]: token t belongs at offset `slots[t] % B` of block `slots[t] // B`.
    """
    raise NotImplementedError("your turn")


def attention(
    queries: np.ndarray,
    key_blocks: np.ndarray,
    value_blocks: np.ndarray,
    layer_in_block: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
) -> np.ndarray:
    """What each of T tokens gathers from the tokens before it, in its own sequence: [T, H, K] -> [T, H, K].

    queries: [T, H, K]. key_blocks, value_blocks: the cache, as in `write_kv`. positions: [T].
    query_starts: [S + 1]; sequence s owns tokens query_starts[s] up to, not including, query_starts[s + 1].
    block_tables: [S, most blocks]; row s names the blocks of positions 0 .. B - 1, B .. 2B - 1, and so on, of sequence
    s. Where a sequence needs fewer blocks than the row has places, the rest is -1 and means nothing; and what lies in
    its last block behind its last token means nothing either.

    `minillm.ops.reference.attend(queries, keys, values, positions)` of lesson 2 does the attending, for one sequence
    whose keys and values lie side by side, [G, m, K].
    """
    raise NotImplementedError("your turn")
