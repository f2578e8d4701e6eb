"""The GPU backend: on a GPU if there is one, and everywhere with its kernels run on the CPU (see cuda_on_cpu.py)."""

import runpy
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cuda_on_cpu
from support.ops_cases import (
    as_bfloat16,
    assert_close,
    paged_case,
    quantized,
    randoms,
    scale_of_product,
    scorings,
    seeds,
    sizes,
    without_freed_blocks,
)
from support.tiny_models import CONFIGS, in_groups, random_weights

from minillm import LLM, EngineConfig, SamplingParams
from minillm.errors import BackendError
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache, kv_groups
from minillm.model.transformer import Transformer
from minillm.ops import backend, gpu, reference
from minillm.quantization import QuantizedMatrix

CHECK = cuda_on_cpu.HERE.parents[1] / "examples" / "gpu_check.py"


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
    """Move NumPy arrays to the backend."""
    return [ops.array_library().asarray(array) for array in arrays]


def weights_of(format_name, seed, outputs, inputs):
    """Return random weights in a format, and the same weights as float32 [O, I]."""
    if format_name in ("float32", "bfloat16"):
        (plain,) = randoms(seed, (outputs, inputs))
        plain = plain if format_name == "float32" else as_bfloat16(plain)
        return plain, plain
    block_size, bits = (
        (20 if format_name == "odd blocks" else 32),
        int(format_name[0]) if format_name[0].isdigit() else 4,
    )
    padded = quantized(seed, outputs, -(-inputs // block_size), block_size, format_name.endswith("minimum"), bits)
    matrix = QuantizedMatrix(padded.codes, padded.scales, padded.minimums, bits, inputs)
    return matrix, matrix.dequantize()


formats = st.sampled_from(
    ["float32", "bfloat16", "8 bits", "8 bits, minimum", "4 bits", "4 bits, minimum", "odd blocks"]
)


@settings(max_examples=40)
@given(seed=seeds, rows=st.integers(1, 12), outputs=sizes, inputs=sizes, format_name=formats, has_bias=st.booleans())
def test_products_have_the_same_bits_for_every_format_and_number_of_rows(
    ops, seed, rows, outputs, inputs, format_name, has_bias
):
    """Integer codes give the bits of the equivalent float32 matrix, and every row has the bits it has alone."""
    weights, plain = weights_of(format_name, seed, outputs, inputs)
    x, bias = randoms(seed, (rows, inputs), (outputs,))
    device_x, device_bias = put(ops, x, bias)
    device_bias = device_bias if has_bias else None
    product = ops.to_numpy(ops.linear(device_x, ops.as_matrix(weights), device_bias))
    expected = x.astype(np.float64) @ plain.T.astype(np.float64) + (bias if has_bias else 0)
    assert_close(product, expected, scale=scale_of_product(x, plain) + 1)
    unpacked = ops.to_numpy(ops.linear(device_x, ops.as_matrix(plain), device_bias))
    np.testing.assert_array_equal(product, unpacked)
    for row in {0, rows - 1}:
        alone = ops.to_numpy(ops.linear(device_x[row : row + 1], ops.as_matrix(weights), device_bias))
        np.testing.assert_array_equal(alone[0], product[row])


@settings(max_examples=20)
@given(seed=seeds, outputs=sizes, inputs=sizes, format_name=formats)
def test_embed_returns_the_packed_weights_exactly(ops, seed, outputs, inputs, format_name):
    weights, plain = weights_of(format_name, seed, outputs, inputs)
    ids = np.random.default_rng(seed).permutation(outputs).astype(np.int32)
    matrix = ops.as_matrix(weights)
    np.testing.assert_array_equal(ops.to_numpy(ops.embed(ids, matrix)), plain[ids])
    bits = {"float32": 32, "bfloat16": 16}.get(format_name) or (4 if weights.bits == 4 else 8)
    words = -(-matrix.block_size * bits // 32)
    assert matrix.words.nbytes == 4 * outputs * words * -(-inputs // matrix.block_size)


@settings(max_examples=30)
@given(seed=seeds, rows=st.integers(1, 9), size=st.integers(1, 300), eps=st.sampled_from([1e-6, 1e-2]))
def test_norms(ops, seed, rows, size, eps):
    x, weight, bias = randoms(seed, (rows, size), (size,), (size,))
    x += 3
    arrays = put(ops, x, weight, bias)
    spread = max(1, 3 * np.abs(weight).max() / np.sqrt(x.var(axis=1).min() + eps))
    for norm, count, scale in (("rms_norm", 2, None), ("layer_norm", 3, spread)):
        exact = (array.astype(np.float64) for array in (x, weight, bias)[:count])
        normed = ops.to_numpy(getattr(ops, norm)(*arrays[:count], eps))
        assert_close(normed, getattr(reference, norm)(*exact, eps), scale)
        alone = ops.to_numpy(getattr(ops, norm)(arrays[0][-1:], *arrays[1:count], eps))
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
    "queries_per_kv": st.integers(1, 2),
    "head_dim": st.sampled_from([6, 64, 160]),
    "block_size": st.sampled_from([1, 3, 16, 128]),
    "dtype": st.sampled_from(["float32", "float16"]),
    "scoring": scorings,
}


@settings(max_examples=20)
@given(**attention_shapes)
def test_attention_over_blocks(ops, seed, lengths, kv_heads, queries_per_kv, head_dim, block_size, dtype, scoring):
    *case, sequences = paged_case(
        seed, *zip(*lengths, strict=True), kv_heads, queries_per_kv, head_dim, block_size, dtype
    )
    queries, keys, values, layer_in_block, positions, starts, tables = without_freed_blocks(case, scoring[1])
    arrays = put(ops, queries, keys, values)
    attended = ops.to_numpy(ops.attention(*arrays, layer_in_block, positions, starts, tables, *scoring))
    exact = queries.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    largest = max(np.abs(v).max() for _, v in sequences)
    assert_close(
        attended, reference.attention(*exact, layer_in_block, positions, starts, tables, *scoring), scale=largest
    )
    token = len(positions) - 1  # alone, with its sequence in one block of its own length
    k, v = sequences[-1]
    one_block = put(ops, queries[token:], k.transpose(0, 2, 1)[None, None].copy(), v[None, None].copy())
    table, one = np.zeros((1, 1), np.int32), np.array([0, 1], np.int32)
    alone = ops.to_numpy(ops.attention(*one_block, 0, positions[token:], one, table, *scoring))
    np.testing.assert_array_equal(alone[0], attended[token])


def test_keys_outside_the_window_are_not_read(ops):
    *case, _ = paged_case(0, [40], [40], 1, 2, 16, 16)
    queries, keys, values, layer_in_block, positions, starts, tables = case
    untouched = ops.to_numpy(
        ops.attention(*put(ops, queries, keys, values), layer_in_block, positions, starts, tables, None, 9)
    )
    block = tables[0, 1]
    keys[block, layer_in_block, :, :, 4] = np.nan  # position 20, which only queries 20 to 28 read
    values[block, layer_in_block, :, 4] = np.inf
    changed = ops.to_numpy(
        ops.attention(*put(ops, queries, keys, values), layer_in_block, positions, starts, tables, None, 9)
    )
    np.testing.assert_array_equal(changed[:20], untouched[:20])
    np.testing.assert_array_equal(changed[29:], untouched[29:])
    assert np.isnan(changed[20:29]).all()


def test_every_float16_is_read_exactly(ops):
    """Attention over a single position returns that position's value."""
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
    arrays = put(ops, *cache)
    ops.write_kv(*put(ops, keys, values), *arrays, 1, slots)
    reference.write_kv(keys, values, *cache, 1, slots)
    for found, expected in zip(arrays, cache, strict=True):
        np.testing.assert_array_equal(ops.to_numpy(found), expected)


PROMPTS = [[5, 8, 1, 60, 3, 3, 69], [7]]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_has_the_same_bits_in_a_batch_and_alone(ops, name):
    """Prefill and one decode step are close to the reference's logits, and each prompt has the bits it has alone."""
    config = CONFIGS[name]

    def logits(ops, prompts):
        """Return the logits after prefill in two uneven chunks, and after one more token."""
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


def test_requests_are_served_on_the_gpu_backend(ops, monkeypatch, tmp_path):
    """From a file to completions, with two completions that diverge within a shared block."""
    check = runpy.run_path(str(CHECK))
    path = check["write_random_model"](tmp_path, check["Sizes"](70, 24, 40, layers=2, heads=4, kv_heads=2))
    params = SamplingParams(max_tokens=3, n=2, temperature=0.7, seed=5, logprobs=True, ignore_eos=True)
    options = {"weights": "int4", "context_length": 32, "engine": EngineConfig(block_size=4)}
    expected = LLM(path, backend="numpy", **options).generate([[5, 8, 1, 60, 3, 3], [7]], params)
    monkeypatch.setattr("minillm.llm.find_backend", lambda name: ops)
    llm = LLM(path, backend="cupy", **options)
    assert type(llm.kv_cache.keys) is type(ops.array_library().zeros(1))
    together = llm.generate([[5, 8, 1, 60, 3, 3], [7]], params)
    llm.reset_prefix_cache()
    alone = llm.generate([[5, 8, 1, 60, 3, 3]], params)[0]
    for completion, single in zip(together[0].completions, alone.completions, strict=True):
        assert (completion.token_ids, completion.logprobs) == (single.token_ids, single.logprobs)
    for output, reference_output in zip(together, expected, strict=True):
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in reference_output.completions]
        logprobs = [
            (a.logprobs, b.logprobs) for a, b in zip(output.completions, reference_output.completions, strict=True)
        ]
        np.testing.assert_allclose(*zip(*logprobs, strict=True), atol=1e-4)


def test_bad_weights_and_rows_are_refused(ops):
    with pytest.raises(ValueError, match="codes from 0 to 22 do not fit 4 bits"):
        ops.as_matrix(
            QuantizedMatrix(np.arange(24, dtype=np.int8).reshape(1, 1, 24) % 23, np.ones((1, 1), np.float32), bits=4)
        )
    with pytest.raises(ValueError, match="x has 5 columns, but the matrix has 8 inputs"):
        ops.linear(*put(ops, np.ones((1, 5), np.float32)), ops.as_matrix(np.ones((3, 8), np.float32)))


# --- without a GPU ------------------------------------------------------------------------------------------------


def cupy_with(devices):
    """Return a stand-in for CuPy on a machine with `devices` devices. If `devices` is None, there is no driver."""

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
        (None, r"needs CuPy, which cannot be imported .*: pip install -e .*\[gpu\].*, or use backend 'numba'"),
        (cupy_with(None), r"finds no usable GPU \(cudaErrorInsufficientDriver.*use backend 'numba'"),
        (cupy_with(0), r"finds no GPU: check CUDA_VISIBLE_DEVICES"),
    ],
    ids=["no CuPy", "no driver", "no device"],
)
def test_a_missing_gpu_is_reported_before_anything_is_loaded(monkeypatch, cupy, message):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(BackendError, match=message):
        LLM("no such model", backend="cupy")


def test_the_gpu_backend_refuses_a_number_of_threads():
    gpu.set_num_threads(None)
    with pytest.raises(ValueError, match="threads is 2, but backend 'cupy' computes on the GPU"):
        gpu.set_num_threads(2)


def test_the_check_reports_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert runpy.run_path(str(CHECK))["main"]() == 2
    assert "nothing was checked: backend 'cupy' needs CuPy" in capsys.readouterr().out
