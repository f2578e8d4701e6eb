"""Whole models against transformers: random small Llamas of every shape, fed in any chunks, on both backends."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from builders import random_llama, write_gguf, write_hf_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.batch import Batch, Chunk
from minillm.checkpoints import open_checkpoint
from minillm.kv_cache import KVCache
from minillm.ops import backend
from minillm.transformer import Transformer, rope_frequencies

TOLERANCE = 2e-5  # of the output's scale
VOCABULARY = 288


@st.composite
def rope_parameters(draw):
    theta = {"rope_theta": draw(st.sampled_from([100.0, 10_000.0, 500_000.0]))}
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    if kind == "linear":
        return theta | {"rope_type": "linear", "factor": draw(st.sampled_from([2.0, 7.5]))}
    if kind == "llama3":
        return theta | {
            "rope_type": "llama3",
            "factor": draw(st.sampled_from([2.0, 8.0, 32.0])),
            "low_freq_factor": 1.0,
            "high_freq_factor": draw(st.sampled_from([2.0, 4.0])),
            "original_max_position_embeddings": draw(st.sampled_from([16, 64, 8192])),
        }
    return theta | {"rope_type": "default"}


@st.composite
def llama_shapes(draw):
    """Configurations with what real Llamas differ in; head_dim need not be hidden_size / heads."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * draw(st.sampled_from([8, 13, 32])),  # transformers wants a multiple of heads
        "intermediate_size": draw(st.sampled_from([32, 50, 96])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([4, 10, 16, 32])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "rope_parameters": draw(rope_parameters()),
    }


token_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def chunks_of(token_ids, cuts):
    """Cut a list at positions `cuts`, taken modulo its length."""
    bounds = sorted({0, len(token_ids), *(cut % len(token_ids) for cut in cuts)})
    return [(start, token_ids[start:stop]) for start, stop in pairwise(bounds)]


def forward_in_chunks(transformer, token_ids, cuts, block_size):
    """Logits after every token, the sequence fed chunk by chunk through blocks in an order of their own."""
    num_blocks = -(-len(token_ids) // block_size)
    cache = KVCache(transformer.config, num_blocks + 1, block_size)
    table = list(range(num_blocks, 0, -1))
    rows = []
    for start, chunk in chunks_of(token_ids, cuts):
        batch = Batch.from_chunks([Chunk(chunk, start, table)], block_size)
        rows.append(transformer.forward(batch, cache, every_token=True))
    return np.concatenate(rows)


def load(path, backend_name):
    checkpoint = open_checkpoint(path)
    return Transformer(checkpoint.config, lambda name: checkpoint.tensors[name].read(), backend(backend_name))


@pytest.fixture(params=["numba", "numpy"])
def backend_name(request):
    return request.param


@settings(max_examples=150)
@given(
    shape=llama_shapes(),
    seed=st.integers(0, 1000),
    token_ids=token_lists,
    cuts=st.lists(st.integers(0, 100), max_size=4),
    block_size=st.sampled_from([1, 3, 16, 64]),
)
def test_a_random_llama_from_a_folder(backend_name, tmp_path_factory, shape, seed, token_ids, cuts, block_size):
    path, model = write_hf_folder(tmp_path_factory.mktemp("llama"), seed=seed, **shape)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0].numpy()
    logits = forward_in_chunks(load(path, backend_name), token_ids, cuts, block_size)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@settings(max_examples=80)
@given(
    storage=st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"]),
    rope=rope_parameters(),
    tied=st.booleans(),
    token_ids=token_lists,
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_a_random_llama_from_a_gguf_file(backend_name, tmp_path_factory, storage, rope, tied, token_ids, cuts):
    """The oracle is given the weights as the file holds them: rounded to its storage type."""
    model = random_llama(tie_word_embeddings=tied, rope_parameters=rope)
    path = write_gguf(tmp_path_factory.mktemp("llama") / "model.gguf", model, storage)
    checkpoint = open_checkpoint(path)
    round_weights(model, checkpoint)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0].numpy()
    logits = forward_in_chunks(load(path, backend_name), token_ids, cuts, block_size=16)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@settings(max_examples=40)
@given(
    storage=st.sampled_from(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"]),
    seed=st.integers(0, 1000),
    token_ids=token_lists,
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_a_random_llama_of_super_blocks(backend_name, tmp_path_factory, storage, seed, token_ids, cuts):
    """Rows of 256, for every matrix to be of the type: its numbers, and the same bits in chunks as at once."""
    model = random_llama(seed, hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path_factory.mktemp("llama") / "model.gguf", model, storage)
    checkpoint = open_checkpoint(path)
    assert {tensor.storage.name for tensor in checkpoint.tensors.values()} == {"F32", storage}
    round_weights(model, checkpoint)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0].numpy()
    transformer = load(path, backend_name)
    logits = forward_in_chunks(transformer, token_ids, cuts, block_size=16)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    if backend_name == "numba":
        np.testing.assert_array_equal(forward_in_chunks(transformer, token_ids, [], block_size=64), logits)


def round_weights(model, checkpoint):
    """Give the torch model the numbers that the checkpoint holds."""
    parts = {
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    names = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            part, kind = part.rsplit(".", 1)
            torch_name = f"model.layers.{layer}.{parts[part]}.{kind}"
        else:
            torch_name = names[name]
        values = tensor.read()
        values = values.dequantize() if hasattr(values, "dequantize") else values
        with torch.no_grad():
            model.get_parameter(torch_name).copy_(torch.tensor(values))


@settings(max_examples=150)
@given(
    shape=llama_shapes(),
    sequences=st.lists(st.tuples(token_lists, st.integers(0, 39)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=4),
    storage=st.sampled_from(["F32", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"]),
)
def test_the_same_bits_in_any_chunks_and_any_company(tmp_path_factory, shape, sequences, cuts, storage):
    """A batch of sequences in mid-course, each at its own place, against each fed alone and at once."""
    folder = tmp_path_factory.mktemp("llama")
    transformer = load(write_gguf(folder / "model.gguf", random_llama(**shape), storage), "numba")
    block_size = 8
    cache = KVCache(transformer.config, 5 * len(sequences), block_size)
    chunks, expected = [], []
    for row, (token_ids, start) in enumerate(sequences):
        table = list(range(row, 5 * len(sequences), len(sequences)))
        start %= len(token_ids)
        if start:  # the part before, on its own
            transformer.forward(Batch.from_chunks([Chunk(token_ids[:start], 0, table)], block_size), cache)
        chunks.append(Chunk(token_ids[start:], start, table))
        alone = forward_in_chunks(transformer, token_ids, [], block_size=64)
        np.testing.assert_array_equal(forward_in_chunks(transformer, token_ids, cuts, block_size), alone)
        expected.append(alone[-1])
    together = transformer.forward(Batch.from_chunks(chunks, block_size), cache)
    np.testing.assert_array_equal(together, np.stack(expected))
    watched = transformer.forward(Batch.from_chunks(chunks, block_size), cache, probe=lambda name, value: None)
    np.testing.assert_array_equal(watched, together)  # a probe makes the readable pass run, not the fused one


@settings(max_examples=150)
@given(rope=rope_parameters(), head_dim=st.sampled_from([4, 10, 64, 128]))
def test_rotary_frequencies(tmp_path_factory, rope, head_dim):
    shape = {"rope_parameters": rope, "head_dim": head_dim, "num_hidden_layers": 1}
    path, model = write_hf_folder(tmp_path_factory.mktemp("llama"), **shape)
    expected = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(rope_frequencies(open_checkpoint(path).config), expected, rtol=1e-6)
