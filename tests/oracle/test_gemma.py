"""Gemma 3 270M against transformers in float32 on the same file.

This takes a minute, most of it for transformers to read the file. `test_architectures.py` tests the architecture with
random weights.
"""

import numpy as np
import pytest
import torch
import transformers

from minillm import LLM
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache

PROMPTS = {
    "english": "The history of the bicycle begins",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "korean": "대한민국의 수도는",
    "chinese": "中国最长的河流是",
    "arabic": "عاصمة مصر هي",
    "hindi": "भारत की राजधानी",
    "russian": "Столица России",
    "emoji": "🎉👩‍👩‍👧 emoji ☕",
    "spaces": "  two  spaces\n\n\n\ttab 12345",
    "special": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
}
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def llm(gemma_gguf):
    return LLM(gemma_gguf, context_length=1024)


@pytest.fixture(scope="module")
def reference(gemma_gguf):
    """The tokenizer and the model that transformers reads from the file."""
    source = {"pretrained_model_name_or_path": gemma_gguf.parent, "gguf_file": gemma_gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(np.argsort(-found)[:, :5], np.argsort(-expected)[:, :5])


@pytest.mark.parametrize("name", PROMPTS)
def test_token_ids_and_logits(llm, reference, name):
    tokenizer, model = reference
    ids = llm.encode(PROMPTS[name])
    assert ids == tokenizer(PROMPTS[name])["input_ids"]
    with torch.no_grad():
        assert_close(llm.logits(ids), model(torch.tensor([ids])).logits[0].numpy())


def test_logits_beyond_the_window(llm, reference):
    """A sequence longer than the sliding window: two chunks, then one token."""
    _, model = reference
    ids = np.random.default_rng(0).integers(10, llm.config.vocab_size, llm.config.sliding_window + 200).tolist()
    cache = KVCache.contiguous(llm.config, len(ids))
    tables = cache.full_tables()
    for start, end in (0, 600), (600, len(ids) - 1), (len(ids) - 1, len(ids)):
        batch = Batch.from_chunks([Chunk(ids[start:end], start, tables)], cache.block_size, cache.num_groups)
        found = llm.transformer.forward(batch, cache)
        with torch.no_grad():
            expected = model(torch.tensor([ids[:end]]), logits_to_keep=1).logits[0].numpy()
        assert_close(found, expected)


def test_prompts_get_the_same_bits_together_as_alone(llm):
    prompts = [llm.encode(text) for text in PROMPTS.values()]
    max_positions = max(map(len, prompts)) + 1
    cache = KVCache(llm.config, KVCache.num_blocks_for(llm.config, max_positions, 16) * len(prompts), 16)
    tables = [[table[row :: len(prompts)] for table in cache.full_tables()] for row in range(len(prompts))]

    def forward(chunks, cache):
        return llm.transformer.forward(Batch.from_chunks(chunks, cache.block_size, cache.num_groups), cache)

    prefilled = forward([Chunk(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)], cache)
    chosen = prefilled.argmax(axis=1).tolist()
    decoded = forward([Chunk([t], len(ids), b) for t, ids, b in zip(chosen, prompts, tables, strict=True)], cache)
    for row, (ids, token) in enumerate(zip(prompts, chosen, strict=True)):
        own_cache = KVCache.contiguous(llm.config, len(ids) + 1)
        table = own_cache.full_tables()
        forward([Chunk(ids[: row + 1], 0, table)], own_cache)  # other chunks
        if ids[row + 1 :]:
            np.testing.assert_array_equal(
                forward([Chunk(ids[row + 1 :], row + 1, table)], own_cache)[0], prefilled[row]
            )
        np.testing.assert_array_equal(forward([Chunk([token], len(ids), table)], own_cache)[0], decoded[row])
