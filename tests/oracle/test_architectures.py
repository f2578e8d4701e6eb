"""Every architecture against transformers: random small models and prompts in random chunks, on both backends.

Each entry of ARCHITECTURES has a configuration class, and a function from the sizes that all architectures share to a
strategy for the fields that are special to this architecture.
"""

import re
from dataclasses import replace
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import TINY, gguf_name, random_llama, random_model, storage_for, write_gguf

from minillm.checkpoints import open_checkpoint
from minillm.model.batch import Batch, Chunk
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import KVCache
from minillm.model.rope import rope_frequencies
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.quantization import QuantizedMatrix
from minillm.trace.roofline import layer_flops

TOLERANCE = 2e-5  # as a fraction of the largest logit
VOCABULARY = 288
CONTEXT = 64

booleans = st.booleans()
seeds = st.integers(0, 2**32 - 1)


def fields(**strategies):
    """Return a strategy for a dictionary; values that are not strategies are constants."""
    return st.fixed_dictionaries(
        {name: s if isinstance(s, st.SearchStrategy) else st.just(s) for name, s in strategies.items()}
    )


def rope(*kinds):
    """Return a strategy for `rope_parameters` of the given kinds."""
    original = st.sampled_from([16, 48, 8192])
    options = {
        "default": {},
        "linear": {"factor": st.sampled_from([2.0, 7.5])},
        "dynamic": {"factor": st.sampled_from([2.0, 7.5])},
        "llama3": {
            "factor": st.sampled_from([2.0, 8.0, 32.0]),
            "low_freq_factor": 1.0,
            "high_freq_factor": st.sampled_from([2.0, 4.0]),
            "original_max_position_embeddings": original,
        },
        "yarn": {
            "factor": st.sampled_from([1.0, 4.0, 40.0]),
            "beta_fast": st.sampled_from([32, 4.0]),
            "truncate": booleans,
            "original_max_position_embeddings": original,
        },
    }
    theta = st.sampled_from([100.0, 10_000.0, 500_000.0])
    return st.one_of(*[fields(rope_type=kind, rope_theta=theta, **options[kind]) for kind in kinds])


any_rope = rope("default", "linear", "dynamic", "llama3", "yarn")
windows = st.sampled_from([1, 2, 7, 16, 40])
two_ropes = fields(sliding_attention=rope("default"), full_attention=rope("default", "linear"))


def layer_types(sizes):
    """Return a strategy for the type of attention in each layer."""
    kinds, layers = st.sampled_from(["full_attention", "sliding_attention"]), sizes["num_hidden_layers"]
    return st.lists(kinds, min_size=layers, max_size=layers)


def phi3_rope(sizes):
    """Return a strategy for RoPE on whole or partial heads, with or without the factors of LongRoPE.

    Only the short factors are used: longer texts are not computed.
    """
    part = st.sampled_from([part for part in (1.0, 0.5, 0.75) if int(sizes["head_dim"] * part) % 2 == 0])
    theta = {"rope_theta": 10_000.0, "partial_rotary_factor": part}
    plain = fields(rope_type="default", **theta)
    factors = st.lists(st.floats(1, 40), min_size=4 * sizes["head_dim"], max_size=4 * sizes["head_dim"])
    long = fields(rope_type="longrope", **theta, short_factor=factors, long_factor=factors)
    return plain | long.map(
        lambda r: (
            r
            | {
                name: r[name][: int(sizes["head_dim"] * r["partial_rotary_factor"]) // 2]
                for name in ("short_factor", "long_factor")
            }
        )
    )


experts = {"num_experts_per_tok": st.integers(1, 3), "num_local_experts": st.integers(3, 5)}
qwen = {"use_sliding_window": booleans, "sliding_window": windows, "max_window_layers": st.integers(0, 2)}
gemma = {"query_pre_attn_scalar": st.sampled_from([4, 100]), "attention_bias": booleans, "sliding_window": windows}
maybe_cap = st.sampled_from([None, 1.0, 5.0])
ARCHITECTURES = {
    "llama": (
        transformers.LlamaConfig,
        lambda sizes: fields(attention_bias=booleans, mlp_bias=booleans, rope_parameters=any_rope),
    ),
    "mistral": (
        transformers.MistralConfig,
        lambda sizes: fields(sliding_window=st.none() | windows, rope_parameters=any_rope),
    ),
    "qwen2": (transformers.Qwen2Config, lambda sizes: fields(**qwen, rope_parameters=any_rope)),
    "qwen3": (
        transformers.Qwen3Config,
        lambda sizes: fields(**qwen, attention_bias=booleans, rope_parameters=any_rope),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        lambda sizes: fields(
            **gemma, rope_parameters=two_ropes, layer_types=layer_types(sizes), final_logit_softcapping=maybe_cap
        ),
    ),
    "phi3": (
        transformers.Phi3Config,
        lambda sizes: fields(
            hidden_size=sizes["num_attention_heads"] * sizes["head_dim"],
            head_dim=...,
            sliding_window=st.none() | windows,
            original_max_position_embeddings=st.sampled_from([CONTEXT, 48]),
            rope_parameters=phi3_rope(sizes),
        ),
    ),
    "gpt2": (
        transformers.GPT2Config,
        lambda sizes: fields(
            head_dim=...,
            num_key_value_heads=...,
            rms_norm_eps=...,
            layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
            intermediate_size=...,
            n_inner=st.none() | st.sampled_from([32, 50]),
        ),
    ),
    "gemma2": (
        transformers.Gemma2Config,
        lambda sizes: fields(
            **gemma,
            rope_parameters=any_rope,
            layer_types=layer_types(sizes),
            final_logit_softcapping=maybe_cap,
            attn_logit_softcapping=maybe_cap,
        ),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        lambda sizes: fields(**experts, norm_topk_prob=booleans, moe_intermediate_size=st.sampled_from([24, 50])),
    ),
    "mixtral": (transformers.MixtralConfig, lambda sizes: fields(**experts, sliding_window=st.none() | windows)),
}


@st.composite
def configurations(draw, name, block_size=1, min_layers=1):
    """Draw a configuration of an architecture with the variety of real models. head_dim may differ from D / H.

    The rows of all matrices are multiples of `block_size`, so that a file stores all of them as the same type. Each
    further mixture of types would be another fused pass to compile.
    """
    config_class, special_fields = ARCHITECTURES[name]
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))

    def size(*choices, times=1):
        """Draw one of the choices whose product with `times` is a multiple of the block size."""
        return draw(st.sampled_from([number for number in choices if number * times % block_size == 0]))

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * size(8, 13, 32, times=heads),  # transformers requires a multiple of heads
        "intermediate_size": size(32, 50, 96),
        "num_hidden_layers": draw(st.integers(min_layers, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size(4, 10, 16, 32, times=heads),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": draw(booleans),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    chosen = sizes | draw(special_fields(sizes))
    return config_class(**{field: value for field, value in chosen.items() if value is not ...})


@st.composite
def texts(draw):
    """Draw token ids and the bounds of their chunks: chunks of a prompt, then single tokens, as in decoding."""
    token_ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
    bounds = draw(st.sets(st.integers(0, 40), max_size=3))
    num_decoded = draw(st.integers(0, 4))
    bounds |= set(range(len(token_ids) - num_decoded, len(token_ids)))
    return token_ids, sorted({0, len(token_ids), *(bound for bound in bounds if 0 < bound < len(token_ids))})


block_sizes = st.sampled_from([1, 3, 16, 64])


def forward_in_chunks(transformer, token_ids, bounds, block_size):
    """Return the logits of every token, computed chunk by chunk with block tables in reverse order."""
    num_blocks = KVCache.num_blocks_for(transformer.config, len(token_ids), block_size)
    cache = KVCache(transformer.config, num_blocks, block_size)
    tables = [table[::-1] for table in cache.full_tables()]
    rows = []
    for start, stop in pairwise(bounds):
        batch = Batch.from_chunks([Chunk(token_ids[start:stop], start, tables)], block_size, cache.num_groups)
        rows.append(transformer.forward(batch, cache, every_token=True))
    return np.concatenate(rows)


def load(path, backend_name):
    checkpoint = open_checkpoint(path)
    return Transformer(checkpoint.config, lambda name: checkpoint.tensors[name].read(), backend(backend_name))


def save(folder, model):
    """Save a model as a Hugging Face folder; return the folder."""
    model.save_pretrained(folder)
    return folder


def logits_of(model, token_ids):
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def assert_close(logits, expected):
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.fixture(params=["numba", "numpy"])
def backend_name(request):
    return request.param


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=40)
@given(data=st.data(), seed=seeds, text=texts(), block_size=block_sizes)
def test_random_models_from_a_folder(backend_name, name, tmp_path_factory, data, seed, text, block_size):
    model = random_model(data.draw(configurations(name)), seed)
    path = save(tmp_path_factory.mktemp(name), model)
    assert_close(forward_in_chunks(load(path, backend_name), *text, block_size), logits_of(model, text[0]))


# Settings that a GGUF file can hold. Settings without a key have the values of published models.
SEVEN_LAYERS = {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16, "head_dim": 16}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 4.5], "long_factor": [9.0] * 4}
LONG_ROPE |= {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "attention_factor": 1.25}
GGUF_SETTINGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "gemma3": SEVEN_LAYERS | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
    "gemma2": SEVEN_LAYERS,
    "phi3": {
        "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 48,
        "sliding_window": 20,
        "head_dim": ...,
    },
    "gpt2": {"head_dim": ..., "rms_norm_eps": ..., "num_key_value_heads": ..., "intermediate_size": ..., "n_inner": 96},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("storage", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_the_same_model_as_a_folder(name, storage, tmp_path):
    """Config and tensors are equal to those of the folder, which other tests compare with transformers."""
    common = {"head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "pad_token_id": None}
    chosen = {field: value for field, value in (TINY | common | GGUF_SETTINGS[name]).items() if value is not ...}
    model = random_model(ARCHITECTURES[name][0](**chosen))
    folder = open_checkpoint(save(tmp_path / "folder", model))
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, storage))
    assert replace(file.config, architecture=folder.config.architecture) == folder.config
    for name, tensor in folder.tensors.items():
        expected, found = tensor.read(), file.tensors[name].read()
        if storage == "F32":
            np.testing.assert_array_equal(found, expected)
        else:
            values = found.dequantize() if isinstance(found, QuantizedMatrix) else found
            assert np.abs(values - expected).max() <= np.abs(expected).max() / 100


@settings(max_examples=50)
@given(
    storage=st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"]),
    rope_parameters=any_rope.filter(lambda rope: rope.get("truncate", True)),  # a file has no key for truncate=False
    tied=booleans,
    text=texts(),
)
def test_random_llamas_from_a_gguf_file(backend_name, tmp_path_factory, storage, rope_parameters, tied, text):
    model = random_llama(tie_word_embeddings=tied, rope_parameters=rope_parameters)
    path = write_gguf(tmp_path_factory.mktemp("llama") / "model.gguf", model, storage)
    with torch.no_grad():  # give the oracle the weights of the file, which are rounded to its storage type
        for parameter in model.parameters():
            kind = storage_for(parameter.shape, storage)
            stored = gguf.quants.quantize(parameter.numpy(), kind)
            parameter.copy_(torch.tensor(gguf.quants.dequantize(stored, kind)))
    assert_close(forward_in_chunks(load(path, backend_name), *text, block_size=16), logits_of(model, text[0]))


@settings(max_examples=24)
@given(storage=st.sampled_from(["Q2_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"]), seed=seeds, text=texts())
def test_random_llamas_of_super_blocks(backend_name, tmp_path_factory, storage, seed, text):
    """Rows of 256 weights let every matrix have the type. The gguf package dequantizes the weights of the oracle."""
    model = random_llama(seed, hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path_factory.mktemp("llama") / "model.gguf", model, storage)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == {"F32", storage}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored[gguf_name(name)]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if num_heads := heads.get(name.split(".")[-2]):  # from the order of llama.cpp to that of transformers
                values = values.reshape(num_heads, -1, 2, values.shape[-1]).swapaxes(1, 2)
            parameter.copy_(torch.tensor(values.reshape(parameter.shape)))
    transformer = load(path, backend_name)
    transformer.fused_layers = None  # compiling it takes 15 seconds for each of five kinds of codes and scales
    logits = forward_in_chunks(transformer, *text, block_size=16)
    assert_close(logits, logits_of(model, text[0]))
    if backend_name == "numba":
        in_one_chunk = forward_in_chunks(transformer, text[0], [0, len(text[0])], block_size=64)
        np.testing.assert_array_equal(logits, in_one_chunk)


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=25)
@given(
    data=st.data(),
    seed=seeds,
    sequences=st.lists(st.tuples(texts(), st.integers(0, 39)), min_size=1, max_size=4),
)
def test_the_same_bits_in_any_chunks_and_any_batch(name, tmp_path_factory, data, seed, sequences):
    """A batch of sequences that are partly computed has the same bits as each sequence alone in one chunk."""
    path = save(tmp_path_factory.mktemp(name), random_model(data.draw(configurations(name)), seed))
    check_same_bits(load(path, "numba"), sequences)


@pytest.mark.parametrize("storage", ["BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"])
@settings(max_examples=15)
@given(data=st.data(), sequences=st.lists(st.tuples(texts(), st.integers(0, 39)), min_size=1, max_size=4))
def test_the_same_bits_for_any_storage_type(storage, tmp_path_factory, data, sequences):
    block_size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[storage]]
    model = random_model(data.draw(configurations("llama", block_size)))
    check_same_bits(load(write_gguf(tmp_path_factory.mktemp("llama") / "m.gguf", model, storage), "numba"), sequences)


@settings(max_examples=15)
@given(
    data=st.data(),
    sequences=st.lists(st.tuples(texts(), st.integers(0, 39)), min_size=1, max_size=4),
    values_differ=booleans,
)
def test_the_same_bits_if_layers_have_different_storage_types(tmp_path_factory, data, sequences, values_differ):
    """Files may store some layers, or the value projection, with more bits. The fused pass supports both."""
    model = random_model(data.draw(configurations("qwen2", block_size=32, min_layers=2)))
    folder = tmp_path_factory.mktemp("qwen2")
    files = [open_checkpoint(write_gguf(folder / f"{kind}.gguf", model, kind)) for kind in ("Q8_0", "Q4_1")]

    def read(name):
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        return files[(layer + (".v." in name and values_differ)) % 2].tensors[name].read()

    transformer = Transformer(files[0].config, read, backend("numba"))
    assert transformer.fused_layers
    check_same_bits(transformer, sequences)


def check_same_bits(transformer, sequences):
    """Compare each sequence alone in one chunk with the sequence in chunks, in a batch, and in a batch with a probe."""
    block_size, max_length = 8, max(len(token_ids) for (token_ids, _), _ in sequences)
    blocks_per_sequence = KVCache.num_blocks_for(transformer.config, max_length, block_size)
    cache = KVCache(transformer.config, blocks_per_sequence * len(sequences), block_size)

    def forward(chunks, **options):
        return transformer.forward(Batch.from_chunks(chunks, block_size, cache.num_groups), cache, **options)

    chunks, expected = [], []
    for row, ((token_ids, bounds), start) in enumerate(sequences):
        tables = [table[row :: len(sequences)] for table in cache.full_tables()]
        start %= len(token_ids)
        if start:  # compute the earlier positions first
            forward([Chunk(token_ids[:start], 0, tables)])
        chunks.append(Chunk(token_ids[start:], start, tables))
        single = forward_in_chunks(transformer, token_ids, [0, len(token_ids)], block_size=64)
        np.testing.assert_array_equal(forward_in_chunks(transformer, token_ids, bounds, block_size), single)
        expected.append(single[-1])
    logits = forward(chunks)
    np.testing.assert_array_equal(logits, np.stack(expected))
    probed = forward(chunks, probe=lambda name, value: None)
    np.testing.assert_array_equal(probed, logits)  # with a probe, the readable pass runs instead of the fused one


@settings(max_examples=150)
@given(rope_parameters=any_rope, head_dim=st.sampled_from([4, 10, 64, 128]))
def test_rotary_frequencies_equal_those_of_transformers(rope_parameters, head_dim, tmp_path_factory):
    model = random_llama(rope_parameters=rope_parameters, head_dim=head_dim, num_hidden_layers=1)
    config = open_checkpoint(save(tmp_path_factory.mktemp("llama"), model)).config
    expected = model.model.rotary_emb
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(frequencies, expected.inv_freq.numpy(), rtol=1e-6)
    attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    np.testing.assert_allclose(attention_factor, expected.attention_scaling, rtol=1e-12)


def test_a_position_without_a_learned_embedding_is_refused():
    config = ModelConfig("gpt2", 50, 16, 24, 1, 2, 2, 8, context_length=5, gated=False, learned_positions=True)
    shapes = config.tensor_shapes()
    transformer = Transformer(config, lambda name: np.zeros(shapes[name], np.float32), backend("numpy"))
    cache = KVCache.contiguous(config, 8)
    assert transformer.forward(Batch.from_chunks([Chunk([1] * 5, 0, [[0]])], 8), cache).shape == (1, 50)
    with pytest.raises(ValueError, match="goes beyond the 5 positions that the model has learned"):
        transformer.forward(Batch.from_chunks([Chunk([1], 5, [[0]])], 8), cache)


def test_a_mixture_costs_as_much_as_the_experts_of_a_token():
    config = ModelConfig(
        "mixtral", 50, 16, 24, 2, 2, 1, 8, 64, num_experts=6, experts_per_token=2, tie_embeddings=True, output_bias=True
    )
    sizes = {name: int(np.prod(shape)) for name, shape in config.tensor_shapes().items()}
    read = {name: size for name, size in sizes.items() if not re.search(r"experts\.[2-5]\.", name)}
    shapes = config.tensor_shapes()
    transformer = Transformer(config, lambda name: np.zeros(shapes[name], np.float32), backend("numpy"))
    assert transformer.weight_bytes == 4 * sum(read.values())
    products = [size for name, size in read.items() if name.startswith("layers.") and len(shapes[name]) == 2]
    assert layer_flops(config) == 2 * sum(products)
