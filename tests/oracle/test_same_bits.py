"""The default model: 32 random prompts in one batch answer with the bits of each prompt alone."""

import numpy as np

from minillm import LLM
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache


def test_prompts_in_one_batch_and_each_alone(default_gguf):
    llm, random = LLM(default_gguf), np.random.default_rng(0)
    assert llm.transformer.fused_layers
    prompts = [random.integers(0, llm.config.vocab_size, length).tolist() for length in random.integers(1, 40, 32)]
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
        alone = KVCache.contiguous(llm.config, len(ids) + 1)
        np.testing.assert_array_equal(forward([Chunk(ids, 0, [[0]])], alone)[0], prefilled[row])
        np.testing.assert_array_equal(forward([Chunk([token], len(ids), [[0]])], alone)[0], decoded[row])
        cut = int(random.integers(1, len(ids) + 1))  # and in two chunks, the second mixing prompt and answer
        forward([Chunk(ids[:cut], 0, [[0]])], alone)
        np.testing.assert_array_equal(forward([Chunk([*ids[cut:], token], cut, [[0]])], alone)[0], decoded[row])
