"""The GPU's backend: on a GPU where there is one; and everywhere its kernels, run by the CPU (see cuda_on_cpu.py)."""

import runpy
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cuda_on_cpu
from support.tiny_models import CONFIGS, in_groups, random_weights
from test_ops import (
    as_bfloat16,
    assert_close,
    given_back,
    paged_case,
    quantized,
    randoms,
    scale_of_product,
    seeds,
    ways,
)

from minillm import LLM, EngineConfig, SamplingParams
from minillm.errors import BackendError
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache, kv_groups
from minillm.model.transformer import Transformer
from minillm.ops import backend, gpu, reference
from minillm.quantization import QuantizedMatrix

CHECK = cuda_on_cpu.HERE.parent / "examples" / "gpu_check.py"


def gpu_or_skip():
    try:
        return backend("cupy")
    except BackendError as error:
        pytest.skip(f"not run on a GPU: {error}")


@pytest.fixture(params=["kernels on the CPU", "on a GPU"])
def ops(request, monkeypatch):
    if request.param == "on a GPU":
        return gpu_or_skip()
    if not cuda_on_cpu.COMPILER:
        pytest.skip("no C++ compiler to run the kernels with")
    return cuda_on_cpu.backend(monkeypatch)


def put(ops, *arrays):
    """NumPy arrays, brought to where the backend computes."""
    return [ops.array_library().asarray(array) for array in arrays]


def weights_of(form, seed, outputs, inputs):
    """Weights in a form, and what they are as float32 [O, I]."""
    if form == "float32" or form == "bfloat16":
        (plain,) = randoms(seed, (outputs, inputs))
        plain = plain if form == "float32" else as_bfloat16(plain)
        return plain, plain
    block_size, bits = (20 if form == "odd blocks" else 32), int(form[0]) if form[0].isdigit() else 4
    whole = quantized(seed, outputs, -(-inputs // block_size), block_size, form.endswith("minimum"), bits)
    matrix = QuantizedMatrix(whole.codes, whole.scales, whole.minimums, bits, inputs)
    return matrix, matrix.dequantize()


forms = st.sampled_from(["float32", "bfloat16", "8 bits", "8 bits, minimum", "4 bits", "4 bits, minimum", "odd blocks"])
sizes = st.integers(1, 150)


@settings(max_examples=40)
@given(seed=seeds, rows=st.integers(1, 12), outputs=sizes, inputs=sizes, form=forms, has_bias=st.booleans())
def test_products_are_one_chain_an_output_whatever_the_form_and_the_rows(
    ops, seed, rows, outputs, inputs, form, has_bias
):
    """Integer codes give the very bits of the float32 matrix they stand for, and a row those that it gives alone."""
    weights, plain = weights_of(form, seed, outputs, inputs)
    x, bias = randoms(seed, (rows, inputs), (outputs,))
    on_gpu, bias_there = put(ops, x, bias)
    bias_there = bias_there if has_bias else None
    product = ops.to_numpy(ops.linear(on_gpu, ops.as_matrix(weights), bias_there))
    expected = x.astype(np.float64) @ plain.T.astype(np.float64) + (bias if has_bias else 0)
    assert_close(product, expected, scale=scale_of_product(x, plain) + 1)
    unpacked = ops.to_numpy(ops.linear(on_gpu, ops.as_matrix(plain), bias_there))
    np.testing.assert_array_equal(product, unpacked)
    for row in {0, rows - 1}:
        alone = ops.to_numpy(ops.linear(on_gpu[row : row + 1], ops.as_matrix(weights), bias_there))
        np.testing.assert_array_equal(alone[0], product[row])


@settings(max_examples=20)
@given(seed=seeds, outputs=sizes, inputs=sizes, form=forms)
def test_embedding_reads_back_exactly_what_was_packed(ops, seed, outputs, inputs, form):
    weights, plain = weights_of(form, seed, outputs, inputs)
    ids = np.random.default_rng(seed).permutation(outputs).astype(np.int32)
    matrix = ops.as_matrix(weights)
    np.testing.assert_array_equal(ops.to_numpy(ops.embed(ids, matrix)), plain[ids])
    bits = {"float32": 32, "bfloat16": 16}.get(form) or (4 if weights.bits == 4 else 8)
    words = -(-matrix.block_size * bits // 32)
    assert matrix.words.nbytes == 4 * outputs * words * -(-inputs // matrix.block_size)


@settings(max_examples=30)
@given(seed=seeds, rows=st.integers(1, 9), size=st.integers(1, 300), eps=st.sampled_from([1e-6, 1e-2]))
def test_norms(ops, seed, rows, size, eps):
    x, weight, bias = randoms(seed, (rows, size), (size,), (size,))
    x += 3
    there = put(ops, x, weight, bias)
    spread = max(1, 3 * np.abs(weight).max() / np.sqrt(x.var(axis=1).min() + eps))
    for norm, count, scale in (("rms_norm", 2, None), ("layer_norm", 3, spread)):
        exact = (array.astype(np.float64) for array in (x, weight, bias)[:count])
        normed = ops.to_numpy(getattr(ops, norm)(*there[:count], eps))
        assert_close(normed, getattr(reference, norm)(*exact, eps), scale)
        alone = ops.to_numpy(getattr(ops, norm)(there[0][-1:], *there[1:count], eps))
        np.testing.assert_array_equal(alone[0], normed[-1])


attention_shapes = {
    "seed": seeds,
    "lengths": st.lists(
        st.sampled_from([1, 2, 15, 127, 128, 129, 300]).flatmap(
            lambda n: st.tuples(st.just(n), st.integers(1, min(n, 3)))
        ),
        min_size=1,
        max_size=3,
    ),
    "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 2),
    "head_dim": st.sampled_from([6, 64, 160]),
    "block_size": st.sampled_from([1, 3, 16, 128]),
    "dtype": st.sampled_from(["float32", "float16"]),
    "how": ways,
}


@settings(max_examples=20)
@given(**attention_shapes)
def test_attention_over_blocks(ops, seed, lengths, kv_heads, group, head_dim, block_size, dtype, how):
    *case, sequences = paged_case(seed, *zip(*lengths, strict=True), kv_heads, group, head_dim, block_size, dtype)
    queries, keys, values, layer, positions, starts, tables = given_back(case, how[1])
    there = put(ops, queries, keys, values)
    attended = ops.to_numpy(ops.attention(*there, layer, positions, starts, tables, *how))
    exact = queries.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    largest = max(np.abs(v).max() for _, v in sequences)
    assert_close(attended, reference.attention(*exact, layer, positions, starts, tables, *how), scale=largest)
    token = len(positions) - 1  # alone, its sequence unbroken: one block that is as long as it is
    k, v = sequences[-1]
    unbroken = put(ops, queries[token:], k.transpose(0, 2, 1)[None, None].copy(), v[None, None].copy())
    table, one = np.zeros((1, 1), np.int32), np.array([0, 1], np.int32)
    alone = ops.to_numpy(ops.attention(*unbroken, 0, positions[token:], one, table, *how))
    np.testing.assert_array_equal(alone[0], attended[token])


def test_what_a_query_may_not_see_it_does_not_read(ops):
    *case, _ = paged_case(0, [40], [40], 1, 2, 16, 16)
    queries, keys, values, layer, positions, starts, tables = case
    untouched = ops.to_numpy(ops.attention(*put(ops, queries, keys, values), layer, positions, starts, tables, None, 9))
    block = tables[0, 1]
    keys[block, layer, :, :, 4] = np.nan  # position 20, which only 20 to 28 see
    values[block, layer, :, 4] = np.inf
    spoilt = ops.to_numpy(ops.attention(*put(ops, queries, keys, values), layer, positions, starts, tables, None, 9))
    np.testing.assert_array_equal(spoilt[:20], untouched[:20])
    np.testing.assert_array_equal(spoilt[29:], untouched[29:])
    assert np.isnan(spoilt[20:29]).all()


def test_every_float16_is_read_as_the_float32_it_is(ops):
    """A sequence of one position has that position's value as its result."""
    bits = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = bits.reshape(512, 1, 1, 1, 128)
    keys, queries = np.zeros((512, 1, 1, 128, 1), np.float16), np.zeros((512, 1, 128), np.float32)
    starts, tables = np.arange(513, dtype=np.int32), np.arange(512, dtype=np.int32)[:, None]
    found = ops.attention(*put(ops, queries, keys, values), 0, np.zeros(512, np.int32), starts, tables)
    np.testing.assert_array_equal(ops.to_numpy(found).ravel(), bits.astype(np.float32))


@settings(max_examples=30)
@given(
    seed=seeds,
    tokens=st.integers(1, 9),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_write_kv_touches_its_slots_and_nothing_else(ops, seed, tokens, block_size, dtype):
    keys, values, key_blocks, value_blocks = randoms(
        seed, (tokens, 2, 6), (tokens, 2, 6), (20, 3, 2, 6, block_size), (20, 3, 2, block_size, 6)
    )
    cache = key_blocks.astype(dtype), value_blocks.astype(dtype)
    slots = np.random.default_rng(seed).permutation(20 * block_size)[:tokens]
    there = put(ops, *cache)
    ops.write_kv(*put(ops, keys, values), *there, 1, slots)
    reference.write_kv(keys, values, *cache, 1, slots)
    for found, expected in zip(there, cache, strict=True):
        np.testing.assert_array_equal(ops.to_numpy(found), expected)


PROMPTS = [[5, 8, 1, 60, 3, 3, 69], [7]]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_and_its_same_bits(ops, name):
    """A batch of prompts and a step of decoding: near the reference's logits, and each with the bits it has alone."""
    config = CONFIGS[name]

    def logits(ops, prompts):
        """Of the prompts in two uneven pieces, and then of a token each."""
        transformer = Transformer(config, random_weights(config), ops)
        groups = len(kv_groups(config))
        cache = KVCache(config, 12 * groups, block_size=4, xp=ops.array_library())
        tables = [[3 * row + 2, 3 * row, 3 * row + 1] for row in range(len(prompts))]
        rows = []
        for cuts in [lambda p: (0, len(p) // 2), lambda p: (len(p) // 2, len(p)), lambda p: (len(p), len(p) + 1)]:
            chunks = [
                Chunk([*prompt, 13][slice(*cuts(prompt))], cuts(prompt)[0], [table])
                for prompt, table in zip(prompts, tables, strict=True)
                if len(range(*cuts(prompt)))
            ]
            if chunks:
                rows.append(transformer.forward(Batch.from_chunks(in_groups(chunks, groups), 4, groups), cache))
        return rows[-2:]

    together = logits(ops, PROMPTS)
    for found, expected in zip(together, logits(reference, PROMPTS), strict=True):
        assert_close(found, expected)
    for row, prompt in enumerate(PROMPTS):
        for found, alone in zip(together, logits(ops, [prompt]), strict=True):
            np.testing.assert_array_equal(found[row], alone[0])


def test_requests_are_served_from_there(ops, monkeypatch, tmp_path):
    """From a file to answers: the cache in the backend's arrays, and two completions that part in a shared block."""
    check = runpy.run_path(str(CHECK))
    path = check["write_random_model"](tmp_path, check["Sizes"](70, 24, 40, layers=2, heads=4, kv_heads=2))
    params = SamplingParams(max_tokens=3, n=2, temperature=0.7, seed=5, logprobs=True, ignore_eos=True)
    how = {"weights": "int4", "context_length": 32, "engine": EngineConfig(block_size=4)}
    expected = LLM(path, backend="numpy", **how).generate([[5, 8, 1, 60, 3, 3], [7]], params)
    monkeypatch.setattr("minillm.llm.find_backend", lambda name: ops)
    llm = LLM(path, backend="cupy", **how)
    assert type(llm.kv_cache.keys) is type(ops.array_library().zeros(1))
    together = llm.generate([[5, 8, 1, 60, 3, 3], [7]], params)
    llm.reset_prefix_cache()
    alone = llm.generate([[5, 8, 1, 60, 3, 3]], params)[0]
    for completion, single in zip(together[0].completions, alone.completions, strict=True):
        assert (completion.token_ids, completion.logprobs) == (single.token_ids, single.logprobs)
    for output, known in zip(together, expected, strict=True):
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in known.completions]
        logprobs = [(a.logprobs, b.logprobs) for a, b in zip(output.completions, known.completions, strict=True)]
        np.testing.assert_allclose(*zip(*logprobs, strict=True), atol=1e-4)


def test_bad_weights_and_rows_are_refused(ops):
    with pytest.raises(ValueError, match="codes from 0 to 22 are not of 4 bits"):
        ops.as_matrix(
            QuantizedMatrix(np.arange(24, dtype=np.int8).reshape(1, 1, 24) % 23, np.ones((1, 1), np.float32), bits=4)
        )
    with pytest.raises(ValueError, match="rows of 5 numbers do not fit a matrix of 8 inputs"):
        ops.linear(*put(ops, np.ones((1, 5), np.float32)), ops.as_matrix(np.ones((3, 8), np.float32)))


# --- without a GPU ------------------------------------------------------------------------------------------------


def cupy_that_finds(devices):
    """A module that says what CuPy says where there are so many devices; None: where there is no driver."""

    class CUDARuntimeError(RuntimeError):
        pass

    def count():
        if devices is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return devices

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=count),
    )
    return module


@pytest.mark.parametrize(
    ("cupy", "message"),
    [
        (None, r"needs CuPy, which cannot be imported .*: pip install 'minillm\[gpu\]', or use backend 'numba'"),
        (cupy_that_finds(None), r"finds no GPU it can use \(cudaErrorInsufficientDriver.*use backend 'numba'"),
        (cupy_that_finds(0), r"finds no GPU: CUDA_VISIBLE_DEVICES may hide it"),
    ],
    ids=["no CuPy", "no driver", "no device"],
)
def test_what_is_missing_is_said_before_anything_is_loaded(monkeypatch, cupy, message):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(BackendError, match=message):
        LLM("no such model", backend="cupy")


def test_threads_are_not_for_the_gpu():
    gpu.set_num_threads(None)
    with pytest.raises(ValueError, match="threads is 2, but backend 'cupy' computes on the GPU"):
        gpu.set_num_threads(2)


def test_the_check_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert runpy.run_path(str(CHECK))["main"]() == 2
    assert "nothing was checked: backend 'cupy' needs CuPy" in capsys.readouterr().out
