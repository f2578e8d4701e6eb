"""The exercises of lesson 4. Run `pytest lessons/04_kv_cache` to test your solutions."""

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
    """Write each token's key and value [T, G, K] to layer `layer_in_block` of the blocks; change nothing else.

    key_blocks is [N, layers, G, K, B] and value_blocks is [N, layers, G, B, K]; both are changed in place. Note that
    their last two axes are in opposite order. slots is [T]: token t belongs at offset `slots[t] % B` of block
    `slots[t] // B`.
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
    """Compute attention of T tokens, each over its own sequence: [T, H, K] -> [T, H, K].

    queries is [T, H, K]. key_blocks and value_blocks are the cache, as in `write_kv`. positions is [T].
    query_starts is [S + 1]: sequence s owns tokens query_starts[s] up to, not including, query_starts[s + 1].
    block_tables is [S, maximum blocks]: row s lists the blocks of positions 0 to B - 1, B to 2B - 1, and so on, of
    sequence s. Unused entries at the end of a row are -1. The part of a sequence's last block after its last token has
    no meaning.

    `minillm.ops.reference.attend(queries, keys, values, positions)` of lesson 2 computes attention for one sequence
    whose keys and values are contiguous, [G, m, K].
    """
    raise NotImplementedError("your turn")
