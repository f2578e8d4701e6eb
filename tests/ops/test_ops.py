"""Every operation, in every backend, against PyTorch; and the compiled ones against themselves, bit for bit."""

import importlib
import pkgutil
from dataclasses import replace

import array_api_strict
import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from minillm.engine.block_allocator import GIVEN_BACK
from minillm.ops import BACKENDS, backend, gpu, jit, reference
from minillm.ops.jit import halves
from minillm.ops.jit.tiles import joined
from minillm.quantization import QuantizedMatrix, QuantizedScales

TOLERANCE = 2e-5  # of the output's scale
BACKEND_NAMES = ["numba", "numpy"]

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 150)


def randoms(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def quantized(seed, outputs, blocks, block_size, with_minimum, bits=None, scale_type=np.float32, group=None):
    """A matrix of any codes and scales; `group` blocks share a float, if it is given: scales are quantized, too."""
    rng = np.random.default_rng(seed)
    bits = bits or int(rng.choice([4, 8]))
    low, high = (0, 2**bits) if with_minimum and bits < 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = rng.integers(low, high, (outputs, blocks, block_size), dtype=np.int8)
    if group:
        shared = rng.standard_normal((2, outputs, blocks // group), np.float32).astype(scale_type).astype(np.float32)
        parts = rng.integers(-128, 128, (2, outputs, blocks), dtype=np.int8)
        scales, minimums = (QuantizedScales(*both) for both in zip(parts, shared, strict=True))
        return QuantizedMatrix.from_quantized_scales(codes, scales, minimums if with_minimum else None, bits=bits)
    scales, minimums = rng.standard_normal((2, outputs, blocks), np.float32).astype(scale_type).astype(np.float32)
    return QuantizedMatrix(codes, scales, minimums if with_minimum else None, bits)


def as_bfloat16(values):
    """The same numbers with what bfloat16 cannot hold cut off."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def assert_close(actual, expected, scale=None):
    """Equal within TOLERANCE of the output's scale: its largest number, or what a sum would be without cancellation."""
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= TOLERANCE * (np.abs(expected).max() if scale is None else scale)


def scale_of_product(x, weights):
    """What x @ weights.T would be like if its terms had random signs."""
    return np.sqrt((x.astype(np.float64) ** 2) @ (weights.astype(np.float64) ** 2).T).max()


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


def test_an_unknown_backend_is_named_with_those_there_are():
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
    # codes times scale and the minimum may nearly cancel in a weight; they are summed apart
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
    # code x scale + minimum is one rounding where a fused multiply-add does it, two where not
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-5 if is_quantized else 0)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), with_minimum=st.booleans())
def test_tiles_hold_the_matrix_and_zeros(seed, outputs, blocks, with_minimum):
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
    x += 3  # a mean to take off
    exact = (torch.tensor(a).double() for a in (weight, bias))
    expected = torch.nn.functional.layer_norm(torch.tensor(x).double(), (size,), *exact, eps)
    # of nearly equal numbers, the differences are as exact as float32 has the numbers
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
def test_squeeze(ops, seed, rows, size, cap):
    (x,) = randoms(seed, (rows, size))
    x *= 10.0 ** np.random.default_rng(seed).integers(-3, 4)
    found = ops.apply_soft_cap(x, cap)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, cap * torch.tanh(torch.tensor(x).double() / cap), rtol=2e-6)


@given(seed=seeds, rows=st.integers(1, 9), experts=st.integers(1, 12), normalize=st.booleans(), data=st.data())
def test_route(ops, seed, rows, experts, normalize, data):
    count = data.draw(st.integers(1, experts))
    (scores,) = randoms(seed, (rows, experts))
    chosen, shares = ops.route(scores, count, normalize)
    likely, expected = torch.softmax(torch.tensor(scores).double(), -1).topk(count)
    if normalize:
        likely = likely / likely.sum(-1, keepdim=True)
    np.testing.assert_array_equal(chosen, expected)
    assert_close(shares, likely)


@given(seed=seeds, rows=st.integers(1, 9), size=sizes)
def test_swiglu(ops, seed, rows, size):
    gate, up = randoms(seed, (rows, size), (rows, size))
    gate *= 30  # far enough out for exp to matter
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
    # the angle is a float32 product, as in the models' training; from there on the oracle is exact
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(frequencies)[None, :]
    turned = torch.complex(torch.tensor(x[..., :half]).double(), torch.tensor(x[..., half:]).double())
    turned = turned * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None, :]
    expected = attention_factor * torch.cat([turned.real, turned.imag], -1)
    found = ops.rotate(whole, *ops.rotary_angles(positions, frequencies, attention_factor))
    assert_close(found[..., : 2 * half], expected)
    np.testing.assert_array_equal(found[..., 2 * half :], whole[..., 2 * half :])


def paged_case(seed, lengths, chunk_lengths, kv_heads, group, head_dim, block_size, dtype="float32"):
    """Sequences of which the last tokens are queries, their keys scattered over the blocks of a pool."""
    rng = np.random.default_rng(seed)
    blocks = [-(-length // block_size) for length in lengths]
    pool = rng.permutation(sum(blocks) + 2).astype(np.int32)
    tables = np.full((len(lengths), max(blocks)), -1, np.int32)
    layers, layer = 3, int(rng.integers(3))
    keys = rng.standard_normal((len(pool), layers, kv_heads, head_dim, block_size), dtype=np.float32).astype(dtype)
    values = rng.standard_normal((len(pool), layers, kv_heads, block_size, head_dim), dtype=np.float32).astype(dtype)
    sequences, positions, taken = [], [], 0
    for row, (length, count) in enumerate(zip(lengths, chunk_lengths, strict=True)):
        tables[row, : blocks[row]] = pool[taken : taken + blocks[row]]
        taken += blocks[row]
        own = tables[row, : blocks[row]]
        k = np.concatenate([keys[block, layer] for block in own], axis=2)[:, :, :length].transpose(0, 2, 1)
        v = np.concatenate([values[block, layer] for block in own], axis=1)[:, :length]
        sequences.append((k, v))
        positions += range(length - count, length)
    queries = rng.standard_normal((len(positions), kv_heads * group, head_dim), dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(chunk_lengths)]).astype(np.int32)
    return queries, keys, values, layer, np.array(positions, np.int32), starts, tables, sequences


def given_back(case, window):
    """The case without the blocks behind each sequence's window: whoever looks for one reads what is no number."""
    queries, keys, values, layer, positions, starts, tables = case
    keys, values = (np.concatenate([blocks, np.full_like(blocks[:1], np.nan)]) for blocks in (keys, values))
    tables = tables.copy()
    for row, start in enumerate(starts[:-1]):
        behind = 0 if window is None else max(0, positions[start] - window + 1)
        tables[row, : behind // keys.shape[-1]] = GIVEN_BACK
    return queries, keys, values, layer, positions, starts, tables


# Short ones of any chunk; and long ones, across the kernels' tiles and splits of the keys, of a few queries.
short_lengths = st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
long_lengths = st.tuples(st.sampled_from([127, 128, 129, 511, 512, 513, 1024, 1025, 1100]), st.integers(1, 20))
sequence_lengths = st.lists(short_lengths | long_lengths, min_size=1, max_size=4)
attention_shapes = {
    "seed": seeds,
    "lengths": sequence_lengths,
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from([2, 6, 16, 40, 64, 80]),
    "block_size": st.sampled_from([1, 3, 16, 128]),
}
dtypes = st.sampled_from(["float32", "float16"])  # of stored keys and values
# scale, window and soft cap: as in most models, or otherwise
ways = st.just((None, None, None)) | st.tuples(
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 1, 2, 5, 64, 200, 256, 300, 2000]),
    st.sampled_from([None, 2.0]),
)


@given(**attention_shapes, dtype=dtypes, how=ways)
def test_attention_over_blocks(ops, seed, lengths, kv_heads, group, head_dim, block_size, dtype, how):
    scale, window, soft_cap = how
    *arguments, sequences = paged_case(seed, *zip(*lengths, strict=True), kv_heads, group, head_dim, block_size, dtype)
    queries, starts = arguments[0], arguments[5]
    expected = []
    for row, (k, v) in enumerate(sequences):
        q = torch.tensor(queries[starts[row] : starts[row + 1]]).double().transpose(0, 1)
        n, m = q.shape[1], k.shape[1]
        mask = torch.ones(n, m, dtype=bool).tril(m - n)
        if window is not None:
            mask &= torch.ones(n, m, dtype=bool).triu(m - n - window + 1)
        k, v = (torch.tensor(a).double().repeat_interleave(group, 0) for a in (k, v))
        scores = q @ k.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        expected.append((torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v).transpose(0, 1))
    largest = max(np.abs(v).max() for _, v in sequences)
    attended = ops.attention(*arguments, *how)
    assert_close(attended, torch.cat(expected), scale=largest)
    np.testing.assert_array_equal(ops.attention(*given_back(arguments, window), *how), attended)


@settings(max_examples=30)
@given(**attention_shapes, dtype=dtypes)
def test_attention_scores_over_blocks(ops, seed, lengths, kv_heads, group, head_dim, block_size, dtype):
    """Of every sequence its own, and nothing behind its end or a query's own position; their softmax sums to one."""
    *arguments, sequences = paged_case(seed, *zip(*lengths, strict=True), kv_heads, group, head_dim, block_size, dtype)
    queries, keys, _, layer, positions, starts, tables = arguments
    scores = ops.attention_scores(queries, keys, layer, positions, starts, tables)
    expected = torch.full((len(queries), kv_heads * group, max(positions) + 1), -torch.inf).double()
    for row, (k, _) in enumerate(sequences):
        own, k = slice(starts[row], starts[row + 1]), torch.tensor(k).double().repeat_interleave(group, 0)
        dots = torch.einsum("nhk,hmk->nhm", torch.tensor(queries[own]).double(), k) / head_dim**0.5
        late = torch.arange(k.shape[1]) > torch.tensor(positions[own])[:, None]
        expected[own, :, : k.shape[1]] = dots.masked_fill(late[:, None, :], -torch.inf)
    np.testing.assert_array_equal(np.isinf(scores), np.isinf(expected))
    finite = np.isfinite(scores)
    assert_close(scores[finite], expected[finite])
    np.testing.assert_allclose(ops.softmax(scores), torch.softmax(expected, -1), atol=2e-5)
    for window in (1, 9):
        queries, keys, _, *where = given_back(arguments, window)
        seen = np.arange(scores.shape[2])[None, :] > positions[:, None] - window
        within = ops.attention_scores(queries, keys, *where, None, window)
        np.testing.assert_array_equal(np.isfinite(within), np.isfinite(scores) & seen[:, None, :])
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


def test_the_gate_of_a_far_negative_number_is_shut():
    gate = np.array([[-80, -86.9, -88, -1e5, -1e36, -3e38, 88, 1e36]] * 9, np.float32)
    up = np.ones_like(gate)
    for rows in (1, 9):
        expected = reference.swiglu(gate[:rows], up[:rows])
        np.testing.assert_allclose(jit.swiglu(gate[:rows], up[:rows]), expected, rtol=1e-6, atol=1e-35)


# --- float16 as bits ----------------------------------------------------------------------------------------------


def bit_patterns(bits):
    """Any number of so many bits: each exponent, infinity and NaN as likely as the next."""
    return st.integers(0, 2**bits - 1)


@numba.njit
def widened(bits):
    wide, finite = np.empty(len(bits), np.float32), np.empty(len(bits), np.float32)
    for i in range(len(bits)):
        wide[i], finite[i] = halves.widen(bits[i]), halves.widen_finite(bits[i])
    return wide, finite


@numba.njit
def narrowed(value, like):
    return halves.narrow(value, like)


def test_every_float16_widens_to_the_float32_it_is():
    bits = np.arange(2**16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    interpreted = np.array([halves.widen(number) for number in bits])
    wide, finite = widened(bits)
    for ours in wide, interpreted, np.where(np.isfinite(expected), finite, expected):
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(expected))


@given(bits=bit_patterns(32))
def test_a_float32_becomes_the_float16_numpy_makes_of_it(bits):
    value, like = np.uint32(bits).view(np.float32), np.empty(0, np.uint16)
    with np.errstate(over="ignore"):
        expected = value.astype(np.float16)
    for narrow in (narrowed, halves.narrow):
        ours = np.uint16(narrow(value, like)).view(np.float16)
        assert ours.view(np.uint16) == expected.view(np.uint16) or (np.isnan(ours) and np.isnan(expected))


@given(sign=st.booleans(), bits=bit_patterns(15), step=st.integers(-1, 1))
def test_numbers_half_way_between_two_float16_go_to_the_even_one(sign, bits, step):
    low, high = (np.uint16(min(b, 0x7BFF)).view(np.float16).astype(np.float32) for b in (bits, bits + 1))
    nearby = int(((low + high) / 2).view(np.uint32)) + step
    between = np.uint32(nearby % 2**31).view(np.float32)
    value = np.float32(-between if sign else between)
    ours = np.uint16(narrowed(value, np.empty(0, np.uint16)))
    with np.errstate(over="ignore"):
        assert ours == value.astype(np.float16).view(np.uint16) or np.isnan(value)


# --- the same bits ------------------------------------------------------------------------------------------------


# Integer codes, as the types of files become them: (bits, with minimums, block size, what scales are exact in, and how
# many blocks share a part of theirs).
CODES = {
    "Q8_0, IQ4_NL": (8, False, 32, np.float16, None),
    "Q4_0": (4, False, 32, np.float16, None),
    "Q4_1": (4, True, 32, np.float16, None),
    "Q5_0, MXFP4": (5, False, 32, np.float16, None),
    "Q5_1": (5, True, 32, np.float16, None),
    "TQ1_0, TQ2_0": (4, False, 256, np.float16, None),
    "Q2_K": (4, True, 16, np.float16, 16),
    "Q3_K": (4, False, 16, np.float16, 16),
    "Q4_K": (4, True, 32, np.float16, 8),
    "Q5_K": (5, True, 32, np.float16, 8),
    "Q6_K": (6, False, 16, np.float16, 16),
    "IQ4_XS": (8, False, 32, np.float16, 8),
}
FORMS = ["float32", "bfloat16", *CODES]


def weights_of(form, seed, outputs, blocks):
    """`blocks` of them, or of what shares a scale's part."""
    if form in CODES:
        bits, with_minimum, block_size, scale_type, group = CODES[form]
        return quantized(seed, outputs, blocks * (group or 1), block_size, with_minimum, bits, scale_type, group)
    (plain,) = randoms(seed, (outputs, blocks * 32))
    return plain if form == "float32" else as_bfloat16(plain)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), form=st.sampled_from(FORMS))
def test_weights_of_every_form_come_back_and_stay_small(seed, outputs, blocks, form):
    weights = weights_of(form, seed, outputs, blocks)
    matrix = jit.as_matrix(weights)
    expected = weights.dequantize() if isinstance(weights, QuantizedMatrix) else weights
    np.testing.assert_array_equal(jit.dequantize(matrix), expected)
    bits = {"float32": 32, "bfloat16": 16}.get(form) or CODES[form][0]
    padded_outputs = -(-outputs // 64) * 64
    assert matrix.codes.nbytes * 8 == padded_outputs * weights.shape[1] * bits
    if form in CODES:
        _, with_minimum, _, scale_type, group = CODES[form]
        kinds, shared_bytes = 1 + with_minimum, np.dtype(scale_type).itemsize
        bytes_of_one = padded_outputs * blocks * (group or shared_bytes)
        assert matrix.scales.nbytes == bytes_of_one
        assert matrix.minimums.nbytes == (bytes_of_one if with_minimum else 0)
        assert matrix.shared.nbytes == (kinds * padded_outputs * blocks * shared_bytes if group else 0)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), bits=st.sampled_from([5, 6]), size=st.sampled_from([8, 24]))
def test_codes_of_5_and_6_bits_in_blocks_of_no_whole_groups_are_kept_in_8(seed, outputs, blocks, bits, size):
    weights = quantized(seed, outputs, blocks, size, seed % 2 == 0, bits)
    matrix = jit.as_matrix(weights)
    assert matrix.codes.nbytes == -(-outputs // 64) * 64 * blocks * size
    np.testing.assert_array_equal(jit.dequantize(matrix), weights.dequantize())


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("with_minimum", [False, True])
def test_codes_of_more_bits_than_they_say_are_refused(bits, with_minimum):
    weights = quantized(0, 3, 2, 32, with_minimum, bits)
    lowest = 0 if with_minimum else -(2 ** (bits - 1))
    for beyond in (lowest - 1, lowest + 2**bits):
        codes = weights.codes.copy()
        codes[2, 1, 7] = beyond
        with pytest.raises(ValueError, match=rf"codes from -?\d+ to -?\d+ are not of {bits} bits"):
            jit.as_matrix(replace(weights, codes=codes))


@given(seed=seeds, in_minimums=st.booleans())
def test_scales_and_minimums_are_halves_both_or_neither(seed, in_minimums):
    """So that there are fewer kinds of kernels to compile."""
    halves = quantized(seed, 5, 3, 32, True, 4, np.float16)
    (halves.minimums if in_minimums else halves.scales)[2, 1] = 1 + 2**-20  # float16 has no such number
    matrix = jit.as_matrix(halves)
    assert matrix.scales.dtype == matrix.minimums.dtype == np.float32
    np.testing.assert_array_equal(jit.dequantize(matrix), halves.dequantize())


@pytest.mark.parametrize("form", FORMS)
def test_neighbours_are_multiplied_with_as_one(form):
    parts = [weights_of(form, seed, outputs, 2) for seed, outputs in enumerate((70, 64, 3))]
    (x,) = randoms(1, (3, parts[0].shape[1]))
    matrices = jit.as_matrices(parts)
    together = jit.linear(x, joined(matrices))
    start = 0
    for part, matrix in zip(parts, matrices, strict=True):
        alone = jit.linear(x, jit.as_matrix(part))
        np.testing.assert_array_equal(jit.linear(x, matrix), alone)
        np.testing.assert_array_equal(together[:, start : start + matrix.num_outputs], alone)
        start += -(-matrix.num_outputs // 64) * 64
    assert joined(matrices[1:]).num_outputs == 128
    other = "float32" if form != "float32" else "bfloat16"
    assert joined(jit.as_matrices([parts[0], weights_of(other, 0, 5, 2)])) is None


def test_matrices_of_several_kinds_lie_each_with_its_own():
    parts = [weights_of(form, seed, 64, 2) for seed, form in enumerate(("float32", "bfloat16", "float32", "bfloat16"))]
    matrices = jit.as_matrices(parts)
    for first in (0, 1):
        together = joined(matrices[first::2])
        np.testing.assert_array_equal(jit.dequantize(together), np.concatenate(parts[first::2]))
    assert joined(matrices[:2]) is None
    assert joined([matrices[2], matrices[0]]) is None  # not in this order
    assert joined([matrices[0], matrices[0]]) is None


def test_a_matrix_without_outputs_and_rows_of_the_wrong_length():
    empty = jit.as_matrix(quantized(0, 0, 2, 32, True))
    assert jit.linear(np.ones((2, 64), np.float32), empty).shape == (2, 0)
    for wrong in (63, 65):
        with pytest.raises(ValueError, match=f"rows of {wrong} numbers do not fit a matrix of 64 inputs"):
            jit.linear(np.ones((1, wrong), np.float32), jit.as_matrix(quantized(0, 5, 2, 32, True)))
    with pytest.raises(ValueError, match="codes from 0 to 22 are not of 4 bits"):
        jit.as_matrix(
            QuantizedMatrix(np.arange(24, dtype=np.int8).reshape(1, 1, 24) % 23, np.ones((1, 1), np.float32), bits=4)
        )


def test_a_later_token_cannot_change_an_earlier_one_not_even_by_infinity():
    *arguments, _ = paged_case(0, [6], [6], 1, 2, 16, 16)
    finite = jit.attention(*arguments)
    arguments[2][arguments[6][0, 0], arguments[3], :, 5] = np.inf  # the value of position 5
    arguments[1][arguments[6][0, 0], arguments[3], :, :, 5] = np.nan  # and its key
    np.testing.assert_array_equal(jit.attention(*arguments)[:5], finite[:5])


def test_nor_can_one_that_has_left_the_window():
    *arguments, _ = paged_case(0, [6], [6], 1, 2, 16, 16)
    finite = jit.attention(*arguments, None, 2)
    arguments[2][arguments[6][0, 0], arguments[3], :, 0] = np.inf  # the value of position 0, which 0 and 1 alone see
    arguments[1][arguments[6][0, 0], arguments[3], :, :, 0] = np.nan  # and its key
    np.testing.assert_array_equal(jit.attention(*arguments, None, 2)[2:], finite[2:])


def test_no_kernel_lets_the_compiler_reorder_a_sum():
    modules = [importlib.import_module(f"minillm.ops.jit.{info.name}") for info in pkgutil.iter_modules(jit.__path__)]
    kernels = {}
    for module in modules:
        kernels |= {name: value for name, value in vars(module).items() if isinstance(value, Dispatcher)}
    assert len(kernels) >= 15
    for name, kernel in kernels.items():
        assert kernel.targetoptions["fastmath"] == {"contract", "nsz"}, name


def test_blocks_that_the_kernels_cannot_take_are_refused():
    with pytest.raises(ValueError, match="blocks of 4 inputs"):
        jit.as_matrix(quantized(0, 8, 2, 4, False))


many = st.integers(2, 23) | st.sampled_from([63, 64, 65, 130])  # rows: few, and around the kernels' pieces of 64


@given(seed=seeds, rows=many, outputs=sizes, blocks=st.integers(1, 6), form=st.sampled_from(FORMS))
def test_a_row_alone_and_among_others_has_the_same_bits(seed, rows, outputs, blocks, form):
    matrix = jit.as_matrix(weights_of(form, seed, outputs, blocks))
    (x,) = randoms(seed, (rows, matrix.num_inputs))
    together = jit.linear(x, matrix)
    for row in range(rows):
        np.testing.assert_array_equal(jit.linear(x[row : row + 1], matrix)[0], together[row])


@given(**attention_shapes, dtype=dtypes, how=ways)
def test_attention_of_a_token_has_the_same_bits_in_any_chunk_and_block_size(
    seed, lengths, kv_heads, group, head_dim, block_size, dtype, how
):
    *together, sequences = paged_case(seed, *zip(*lengths, strict=True), kv_heads, group, head_dim, block_size, dtype)
    queries, _, _, _, positions, starts, _ = together
    attended = jit.attention(*together, *how)
    for row, (k, v) in enumerate(sequences):
        # the sequence alone, unbroken: one block that is as long as it is
        keys, values = k.transpose(0, 2, 1)[None, None].copy(), v[None, None].copy()
        for token in range(starts[row], starts[row + 1]):
            alone = jit.attention(
                queries[token : token + 1],
                keys,
                values,
                0,
                positions[token : token + 1],
                np.array([0, 1], np.int32),
                np.array([[0]], np.int32),
                *how,
            )
            np.testing.assert_array_equal(alone[0], attended[token])


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 9))
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core has no threads to compare")
def test_threads_do_not_change_a_bit(seed, rows):
    (x,) = randoms(seed, (rows, 64))
    matrix = jit.as_matrix(quantized(seed, 500, 2, 32, True))
    products = []
    *arguments, _ = paged_case(seed, [700, 30], [2, 30], 2, 3, 16, 16)
    for threads in (1, 2, numba.config.NUMBA_NUM_THREADS):
        jit.set_num_threads(threads)
        products.append((jit.linear(x, matrix), jit.attention(*arguments), jit.swiglu(x, x), jit.geglu(x, x)))
    jit.set_num_threads(None)
    for other in products[1:]:
        for left, right in zip(products[0], other, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_threads_out_of_range_are_refused(threads):
    with pytest.raises(ValueError, match=f"threads is {threads}; this machine has 1 to"):
        jit.set_num_threads(threads)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        reference.set_num_threads(threads)


# --- any array library --------------------------------------------------------------------------------------------


@given(**attention_shapes)
@settings(max_examples=20)
def test_the_reference_runs_on_any_array_library(seed, lengths, kv_heads, group, head_dim, block_size):
    """array_api_strict refuses whatever the array API standard does not promise."""
    *arguments, _ = paged_case(seed, *zip(*lengths, strict=True), kv_heads, group, head_dim, block_size)
    xp, ids = array_api_strict, np.array([2, 0, 1], np.int32)
    x, weight, bias, norm = randoms(seed, (3, 8), (4, 8), (4,), (8,))

    def everything(convert):
        a, w, b, n = convert(x), convert(weight), convert(bias), convert(norm)
        heads = reference.linear(a, w, b)[:, None, :]
        angles = reference.rotary_angles(ids, convert(np.array([1, 0.1], np.float32)))
        turned = reference.rotate(heads, *angles)
        keys, values = convert(arguments[1].copy()), convert(arguments[2].copy())
        yield reference.embed(ids, w)
        yield turned
        yield reference.rms_norm(a, n, 1e-5)
        yield reference.layer_norm(a, n, n, 1e-5)
        yield reference.swiglu(a, a)
        yield reference.geglu(a, a)
        yield reference.apply_soft_cap(a, 2.0)
        chosen, shares = reference.route(a, 2, True)
        yield convert(chosen)
        yield shares
        yield reference.attention(convert(arguments[0]), keys, values, *arguments[3:])
        yield reference.softmax(reference.attention_scores(convert(arguments[0]), keys, *arguments[3:], 0.5, 3, 2.0))
        yield reference.attention(convert(arguments[0]), keys, values, *arguments[3:], 0.5, 3, 2.0)
        (new,) = randoms(seed, (2, kv_heads, head_dim))
        reference.write_kv(convert(new), convert(new), keys, values, 2, np.array([0, block_size + 0]))
        yield keys
        yield values

    for strict, plain in zip(everything(xp.asarray), everything(np.asarray), strict=True):
        assert type(strict) is type(xp.asarray(0.0))
        np.testing.assert_allclose(np.asarray(strict), plain, rtol=1e-6, atol=1e-6)
