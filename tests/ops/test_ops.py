"""Every operation in every backend against PyTorch, and the reference on any array library."""

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ops_cases import (
    assert_close,
    attention_shapes,
    dtypes,
    paged_case,
    quantized,
    randoms,
    scale_of_product,
    scorings,
    seeds,
    sizes,
    without_freed_blocks,
)

from minillm.ops import BACKENDS, backend, gpu, jit, reference

BACKEND_NAMES = ["numba", "numpy"]


@pytest.fixture(params=BACKEND_NAMES)
def ops(request):
    return backend(request.param)


def test_backends_have_the_same_functions_and_parameters():
    def interface(module):
        import inspect

        names = [line.split("(")[0].strip() for line in ops_docstring_lines()]
        signatures = {}
        for entry in names:
            for name in entry.split(","):
                function = getattr(module, name.strip())
                parameters = list(inspect.signature(getattr(function, "py_func", function)).parameters)
                signatures[name.strip()] = [p for p in parameters if p != "xp"]
        return signatures

    def ops_docstring_lines():
        import minillm.ops

        return [line for line in minillm.ops.__doc__.splitlines() if line.startswith("    ")]

    assert interface(jit) == interface(reference) == interface(gpu)
    assert "attention" in interface(jit)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'cuda' is unknown; it can be numba, numpy, reference, cupy"):
        backend("cuda")
    assert {backend(name) for name in BACKENDS if name != "cupy"} == {jit, reference}


@given(seed=seeds, rows=st.integers(1, 9), outputs=sizes, inputs=sizes, has_bias=st.booleans())
def test_linear(ops, seed, rows, outputs, inputs, has_bias):
    x, weight, bias = randoms(seed, (rows, inputs), (outputs, inputs), (outputs,))
    bias = bias if has_bias else None
    expected = torch.nn.functional.linear(
        torch.tensor(x).double(),
        torch.tensor(weight).double(),
        None if bias is None else torch.tensor(bias).double(),
    )
    assert_close(ops.linear(x, ops.as_matrix(weight), bias), expected, scale_of_product(x, weight))


@given(
    seed=seeds,
    rows=st.integers(1, 9),
    outputs=sizes,
    blocks=st.integers(1, 5),
    block_size=st.sampled_from([8, 16, 32, 256]),
    with_minimum=st.booleans(),
)
def test_linear_with_quantized_weights(ops, seed, rows, outputs, blocks, block_size, with_minimum):
    matrix = quantized(seed, outputs, blocks, block_size, with_minimum)
    (x,) = randoms(seed, (rows, blocks * block_size))
    weights = matrix.dequantize()
    expected = torch.tensor(x).double() @ torch.tensor(weights).double().T
    # Code times scale and minimum may nearly cancel in a weight, but the kernels sum them separately.
    parts = np.abs(matrix.codes * matrix.scales[:, :, None]).reshape(matrix.shape)
    if with_minimum:
        parts = parts + np.abs(np.repeat(matrix.minimums, block_size, axis=1))
    assert_close(ops.linear(x, ops.as_matrix(matrix)), expected, scale_of_product(x, parts))


@given(seed=seeds, vocabulary=sizes, hidden=st.integers(1, 3), is_quantized=st.booleans(), count=st.integers(1, 9))
def test_embed_gives_exactly_the_rows(ops, seed, vocabulary, hidden, is_quantized, count):
    weights = quantized(seed, vocabulary, hidden, 32, True) if is_quantized else randoms(seed, (vocabulary, hidden))[0]
    ids = np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)
    rows = weights.dequantize() if is_quantized else weights
    expected = torch.nn.functional.embedding(torch.tensor(ids), torch.tensor(rows))
    found = ops.to_numpy(ops.embed(ids, ops.as_matrix(weights)))
    # code * scale + minimum is rounded once with a fused multiply-add and twice without.
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-5 if is_quantized else 0)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), with_minimum=st.booleans())
def test_dequantized_tiles_are_the_matrix(seed, outputs, blocks, with_minimum):
    matrix = quantized(seed, outputs, blocks, 32, with_minimum)
    np.testing.assert_array_equal(jit.dequantize(jit.as_matrix(matrix)), matrix.dequantize())
    plain = matrix.dequantize()[:, : 32 * blocks - 5]
    np.testing.assert_array_equal(jit.dequantize(jit.as_matrix(plain)), plain)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes, eps=st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_rms_norm(ops, seed, rows, size, eps):
    x, weight = randoms(seed, (rows, size), (size,))
    expected = torch.nn.functional.rms_norm(torch.tensor(x).double(), (size,), torch.tensor(weight).double(), eps)
    assert_close(ops.rms_norm(x, weight, eps), expected)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes, eps=st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_layer_norm(ops, seed, rows, size, eps):
    x, weight, bias = randoms(seed, (rows, size), (size,), (size,))
    x += 3  # a mean to subtract
    exact = (torch.tensor(a).double() for a in (weight, bias))
    expected = torch.nn.functional.layer_norm(torch.tensor(x).double(), (size,), *exact, eps)
    # Differences of nearly equal numbers are only as exact as the float32 numbers themselves.
    spread = max(1, 3 * np.abs(weight).max() / np.sqrt(x.var(axis=1).min() + eps))
    assert_close(ops.layer_norm(x, weight, bias, eps), expected, scale=spread)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes)
def test_gelu_and_geglu(ops, seed, rows, size):
    gate, up = randoms(seed, (rows, size), (rows, size))
    gate *= 10
    gelu = torch.nn.functional.gelu(torch.tensor(gate).double(), approximate="tanh")
    assert_close(ops.gelu(gate), gelu, scale=np.abs(gate).max())
    assert_close(ops.geglu(gate, up), gelu * torch.tensor(up).double(), scale=np.abs(gate * up).max())


@given(seed=seeds, rows=st.integers(1, 9), size=sizes, cap=st.sampled_from([0.5, 30.0]))
def test_soft_cap(ops, seed, rows, size, cap):
    (x,) = randoms(seed, (rows, size))
    x *= 10.0 ** np.random.default_rng(seed).integers(-3, 4)
    found = ops.apply_soft_cap(x, cap)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, cap * torch.tanh(torch.tensor(x).double() / cap), rtol=2e-6)


@given(seed=seeds, rows=st.integers(1, 9), experts=st.integers(1, 12), normalize=st.booleans(), data=st.data())
def test_route(ops, seed, rows, experts, normalize, data):
    count = data.draw(st.integers(1, experts))
    (scores,) = randoms(seed, (rows, experts))
    chosen, weights = ops.route(scores, count, normalize)
    likely, expected = torch.softmax(torch.tensor(scores).double(), -1).topk(count)
    if normalize:
        likely = likely / likely.sum(-1, keepdim=True)
    np.testing.assert_array_equal(chosen, expected)
    assert_close(weights, likely)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes)
def test_swiglu(ops, seed, rows, size):
    gate, up = randoms(seed, (rows, size), (rows, size))
    gate *= 30  # large enough that exp would overflow in a naive sigmoid
    expected = torch.nn.functional.silu(torch.tensor(gate).double()) * torch.tensor(up).double()
    assert_close(ops.swiglu(gate, up), expected)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes)
def test_softmax(seed, rows, size):
    (x,) = randoms(seed, (rows, size))
    x *= 100
    assert_close(reference.softmax(x), torch.softmax(torch.tensor(x).double(), -1))


@given(
    seed=seeds,
    tokens=st.integers(1, 9),
    heads=st.integers(1, 4),
    half=st.integers(1, 32),
    rest=st.integers(0, 5),
    attention_factor=st.sampled_from([1.0, 1.25]),
)
def test_rotary_embedding_is_a_multiplication_of_complex_numbers(
    ops, seed, tokens, heads, half, rest, attention_factor
):
    (whole,) = randoms(seed, (tokens, heads, 2 * half + rest))
    x = whole[..., : 2 * half]
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 2000, tokens).astype(np.int32)
    frequencies = rng.random(half, dtype=np.float32)
    # The angle is a float32 product, as in the models' training. The rest of the oracle is exact.
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(frequencies)[None, :]
    rotated = torch.complex(torch.tensor(x[..., :half]).double(), torch.tensor(x[..., half:]).double())
    rotated = rotated * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None, :]
    expected = attention_factor * torch.cat([rotated.real, rotated.imag], -1)
    found = ops.rotate(whole, *ops.rotary_angles(positions, frequencies, attention_factor))
    assert_close(found[..., : 2 * half], expected)
    np.testing.assert_array_equal(found[..., 2 * half :], whole[..., 2 * half :])


@given(**attention_shapes, dtype=dtypes, scoring=scorings)
def test_attention_over_blocks(ops, seed, lengths, kv_heads, queries_per_kv, head_dim, block_size, dtype, scoring):
    scale, window, soft_cap = scoring
    *arguments, sequences = paged_case(
        seed, *zip(*lengths, strict=True), kv_heads, queries_per_kv, head_dim, block_size, dtype
    )
    queries, starts = arguments[0], arguments[5]
    expected = []
    for row, (k, v) in enumerate(sequences):
        q = torch.tensor(queries[starts[row] : starts[row + 1]]).double().transpose(0, 1)
        n, m = q.shape[1], k.shape[1]
        mask = torch.ones(n, m, dtype=bool).tril(m - n)
        if window is not None:
            mask &= torch.ones(n, m, dtype=bool).triu(m - n - window + 1)
        k, v = (torch.tensor(a).double().repeat_interleave(queries_per_kv, 0) for a in (k, v))
        scores = q @ k.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        expected.append((torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v).transpose(0, 1))
    largest = max(np.abs(v).max() for _, v in sequences)
    attended = ops.attention(*arguments, *scoring)
    assert_close(attended, torch.cat(expected), scale=largest)
    np.testing.assert_array_equal(ops.attention(*without_freed_blocks(arguments, window), *scoring), attended)


@settings(max_examples=30)
@given(**attention_shapes, dtype=dtypes)
def test_attention_scores_over_blocks(ops, seed, lengths, kv_heads, queries_per_kv, head_dim, block_size, dtype):
    """Each query has scores for its own sequence up to its own position, and -infinity elsewhere."""
    *arguments, sequences = paged_case(
        seed, *zip(*lengths, strict=True), kv_heads, queries_per_kv, head_dim, block_size, dtype
    )
    queries, keys, _, layer_in_block, positions, starts, tables = arguments
    scores = ops.attention_scores(queries, keys, layer_in_block, positions, starts, tables)
    expected = torch.full((len(queries), kv_heads * queries_per_kv, max(positions) + 1), -torch.inf).double()
    for row, (k, _) in enumerate(sequences):
        own, k = slice(starts[row], starts[row + 1]), torch.tensor(k).double().repeat_interleave(queries_per_kv, 0)
        dots = torch.einsum("nhk,hmk->nhm", torch.tensor(queries[own]).double(), k) / head_dim**0.5
        late = torch.arange(k.shape[1]) > torch.tensor(positions[own])[:, None]
        expected[own, :, : k.shape[1]] = dots.masked_fill(late[:, None, :], -torch.inf)
    np.testing.assert_array_equal(np.isinf(scores), np.isinf(expected))
    finite = np.isfinite(scores)
    assert_close(scores[finite], expected[finite])
    np.testing.assert_allclose(ops.softmax(scores), torch.softmax(expected, -1), atol=2e-5)
    for window in (1, 9):
        queries, keys, _, *rest = without_freed_blocks(arguments, window)
        in_window = np.arange(scores.shape[2])[None, :] > positions[:, None] - window
        within = ops.attention_scores(queries, keys, *rest, None, window)
        np.testing.assert_array_equal(np.isfinite(within), np.isfinite(scores) & in_window[:, None, :])
        assert_close(within[np.isfinite(within)], scores[np.isfinite(within)])


@given(seed=seeds, tokens=st.integers(1, 9), block_size=st.sampled_from([1, 4, 16]), dtype=dtypes)
def test_write_kv_touches_its_slots_and_nothing_else(ops, seed, tokens, block_size, dtype):
    rng = np.random.default_rng(seed)
    keys, values = randoms(seed, (tokens, 2, 6), (tokens, 2, 6))
    key_blocks = np.zeros((20, 3, 2, 6, block_size), dtype)
    value_blocks = np.zeros((20, 3, 2, block_size, 6), dtype)
    slots = rng.permutation(20 * block_size)[:tokens]
    ops.write_kv(keys, values, key_blocks, value_blocks, 1, slots)
    flat_keys = key_blocks[:, 1].transpose(0, 3, 1, 2).reshape(-1, 2, 6)
    flat_values = value_blocks[:, 1].transpose(0, 2, 1, 3).reshape(-1, 2, 6)
    assert not key_blocks[:, [0, 2]].any()
    assert not value_blocks[:, [0, 2]].any()
    np.testing.assert_array_equal(flat_keys[slots], keys.astype(dtype))
    np.testing.assert_array_equal(flat_values[slots], values.astype(dtype))
    assert np.count_nonzero(flat_keys.any(axis=(1, 2))) == tokens
    assert np.count_nonzero(flat_values.any(axis=(1, 2))) == tokens


def test_swiglu_of_large_numbers_does_not_overflow():
    gate = np.array([[-80, -86.9, -88, -1e5, -1e36, -3e38, 88, 1e36]] * 9, np.float32)
    up = np.ones_like(gate)
    for rows in (1, 9):
        expected = reference.swiglu(gate[:rows], up[:rows])
        np.testing.assert_allclose(jit.swiglu(gate[:rows], up[:rows]), expected, rtol=1e-6, atol=1e-35)


@given(**attention_shapes)
@settings(max_examples=20)
def test_the_reference_runs_on_any_array_library(seed, lengths, kv_heads, queries_per_kv, head_dim, block_size):
    """array_api_strict raises for everything outside the array API standard."""
    *arguments, _ = paged_case(seed, *zip(*lengths, strict=True), kv_heads, queries_per_kv, head_dim, block_size)
    xp, ids = array_api_strict, np.array([2, 0, 1], np.int32)
    x, weight, bias, norm = randoms(seed, (3, 8), (4, 8), (4,), (8,))

    def everything(convert):
        a, w, b, n = convert(x), convert(weight), convert(bias), convert(norm)
        heads = reference.linear(a, w, b)[:, None, :]
        angles = reference.rotary_angles(ids, convert(np.array([1, 0.1], np.float32)))
        rotated = reference.rotate(heads, *angles)
        keys, values = convert(arguments[1].copy()), convert(arguments[2].copy())
        yield reference.embed(ids, w)
        yield rotated
        yield reference.rms_norm(a, n, 1e-5)
        yield reference.layer_norm(a, n, n, 1e-5)
        yield reference.swiglu(a, a)
        yield reference.geglu(a, a)
        yield reference.apply_soft_cap(a, 2.0)
        chosen, weights = reference.route(a, 2, True)
        yield convert(chosen)
        yield weights
        yield reference.attention(convert(arguments[0]), keys, values, *arguments[3:])
        yield reference.softmax(reference.attention_scores(convert(arguments[0]), keys, *arguments[3:], 0.5, 3, 2.0))
        yield reference.attention(convert(arguments[0]), keys, values, *arguments[3:], 0.5, 3, 2.0)
        (new,) = randoms(seed, (2, kv_heads, head_dim))
        reference.write_kv(convert(new), convert(new), keys, values, 2, np.array([0, block_size]))
        yield keys
        yield values

    for strict, plain in zip(everything(xp.asarray), everything(np.asarray), strict=True):
        assert type(strict) is type(xp.asarray(0.0))
        np.testing.assert_allclose(np.asarray(strict), plain, rtol=1e-6, atol=1e-6)
