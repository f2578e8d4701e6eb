"""The default model: 32 random prompts in one batch get the same bits as each prompt alone."""

import numpy as np

from minillm import LLM
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache


def test_prompts_get_the_same_bits_in_one_batch_as_alone(default_gguf):
    llm, rng = LLM(default_gguf), np.random.default_rng(0)
    assert llm.transformer.fused_layers
    prompts = [rng.integers(0, llm.config.vocab_size, length).tolist() for length in rng.integers(1, 40, 32)]
    cache = KVCache(llm.config, num_blocks=32 * 4)
    tables = [[[row, row + 32, row + 64]] for row in range(32)]  # scattered blocks, enough for 48 positions

    def forward(chunks, cache):
        return llm.transformer.forward(Batch.from_chunks(chunks, cache.block_size), cache)

    prefilled = forward([Chunk(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)], cache)
    chosen = prefilled.argmax(axis=1).tolist()
    decoded = forward(
        [Chunk([token], len(ids), table) for token, ids, table in zip(chosen, prompts, tables, strict=True)], cache
    )
    for row, (ids, token) in enumerate(zip(prompts, chosen, strict=True)):
        own_cache = KVCache.contiguous(llm.config, len(ids) + 1)
        np.testing.assert_array_equal(forward([Chunk(ids, 0, [[0]])], own_cache)[0], prefilled[row])
        np.testing.assert_array_equal(forward([Chunk([token], len(ids), [[0]])], own_cache)[0], decoded[row])
        cut = int(rng.integers(1, len(ids) + 1))  # also in two chunks, the second with tokens of prompt and answer
        forward([Chunk(ids[:cut], 0, [[0]])], own_cache)
        np.testing.assert_array_equal(forward([Chunk([*ids[cut:], token], cut, [[0]])], own_cache)[0], decoded[row])
