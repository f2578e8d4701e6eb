"""The compiled kernels: storage formats of weights, and the same bits in any batch, chunk or number of threads."""

import importlib
import pkgutil
from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from support.ops_cases import (
    as_bfloat16,
    attention_shapes,
    dtypes,
    paged_case,
    quantized,
    randoms,
    scorings,
    seeds,
    sizes,
)

from minillm.ops import jit, reference
from minillm.ops.jit.tiles import joined
from minillm.quantization import QuantizedMatrix

# Integer codes, as files store them: (bits, whether there are minimums, block size, the type that holds the scales
# exactly, and the number of blocks per super-block if the scales are quantized).
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
FORMATS = ["float32", "bfloat16", *CODES]


def weights_of(format_name, seed, outputs, blocks):
    """Return random weights of `blocks` blocks, or of `blocks` super-blocks if the format has them."""
    if format_name in CODES:
        bits, with_minimum, block_size, scale_type, super_block = CODES[format_name]
        return quantized(
            seed, outputs, blocks * (super_block or 1), block_size, with_minimum, bits, scale_type, super_block
        )
    (plain,) = randoms(seed, (outputs, blocks * 32))
    return plain if format_name == "float32" else as_bfloat16(plain)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), format_name=st.sampled_from(FORMATS))
def test_weights_of_every_format_are_stored_exactly_and_compactly(seed, outputs, blocks, format_name):
    weights = weights_of(format_name, seed, outputs, blocks)
    matrix = jit.as_matrix(weights)
    expected = weights.dequantize() if isinstance(weights, QuantizedMatrix) else weights
    np.testing.assert_array_equal(jit.dequantize(matrix), expected)
    bits = {"float32": 32, "bfloat16": 16}.get(format_name) or CODES[format_name][0]
    padded_outputs = -(-outputs // 64) * 64
    assert matrix.codes.nbytes * 8 == padded_outputs * weights.shape[1] * bits
    if format_name in CODES:
        _, with_minimum, _, scale_type, super_block = CODES[format_name]
        kinds, shared_bytes = 1 + with_minimum, np.dtype(scale_type).itemsize
        scale_bytes = padded_outputs * blocks * (super_block or shared_bytes)
        assert matrix.scales.nbytes == scale_bytes
        assert matrix.minimums.nbytes == (scale_bytes if with_minimum else 0)
        assert matrix.shared.nbytes == (kinds * padded_outputs * blocks * shared_bytes if super_block else 0)


@given(seed=seeds, outputs=sizes, blocks=st.integers(1, 4), bits=st.sampled_from([5, 6]), size=st.sampled_from([8, 24]))
def test_5_and_6_bit_codes_use_8_bits_where_a_block_is_not_whole_packing_groups(seed, outputs, blocks, bits, size):
    weights = quantized(seed, outputs, blocks, size, seed % 2 == 0, bits)
    matrix = jit.as_matrix(weights)
    assert matrix.codes.nbytes == -(-outputs // 64) * 64 * blocks * size
    np.testing.assert_array_equal(jit.dequantize(matrix), weights.dequantize())


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("with_minimum", [False, True])
def test_codes_that_exceed_their_number_of_bits_are_refused(bits, with_minimum):
    weights = quantized(0, 3, 2, 32, with_minimum, bits)
    lowest = 0 if with_minimum else -(2 ** (bits - 1))
    for beyond in (lowest - 1, lowest + 2**bits):
        codes = weights.codes.copy()
        codes[2, 1, 7] = beyond
        with pytest.raises(ValueError, match=rf"codes from -?\d+ to -?\d+ do not fit {bits} bits"):
            jit.as_matrix(replace(weights, codes=codes))


@given(seed=seeds, in_minimums=st.booleans())
def test_scales_and_minimums_are_both_float16_or_both_float32(seed, in_minimums):
    """This keeps the number of compiled kernels down."""
    weights = quantized(seed, 5, 3, 32, True, 4, np.float16)
    (weights.minimums if in_minimums else weights.scales)[2, 1] = 1 + 2**-20  # not exact in float16
    matrix = jit.as_matrix(weights)
    assert matrix.scales.dtype == matrix.minimums.dtype == np.float32
    np.testing.assert_array_equal(jit.dequantize(matrix), weights.dequantize())


@pytest.mark.parametrize("format_name", FORMATS)
def test_neighbouring_matrices_can_be_used_as_one(format_name):
    parts = [weights_of(format_name, seed, outputs, 2) for seed, outputs in enumerate((70, 64, 3))]
    (x,) = randoms(1, (3, parts[0].shape[1]))
    matrices = jit.as_matrices(parts)
    product = jit.linear(x, joined(matrices))
    start = 0
    for part, matrix in zip(parts, matrices, strict=True):
        alone = jit.linear(x, jit.as_matrix(part))
        np.testing.assert_array_equal(jit.linear(x, matrix), alone)
        np.testing.assert_array_equal(product[:, start : start + matrix.num_outputs], alone)
        start += -(-matrix.num_outputs // 64) * 64
    assert joined(matrices[1:]).num_outputs == 128
    other = "float32" if format_name != "float32" else "bfloat16"
    assert joined(jit.as_matrices([parts[0], weights_of(other, 0, 5, 2)])) is None


def test_matrices_are_grouped_by_format():
    parts = [
        weights_of(format_name, seed, 64, 2)
        for seed, format_name in enumerate(("float32", "bfloat16", "float32", "bfloat16"))
    ]
    matrices = jit.as_matrices(parts)
    for first in (0, 1):
        together = joined(matrices[first::2])
        np.testing.assert_array_equal(jit.dequantize(together), np.concatenate(parts[first::2]))
    assert joined(matrices[:2]) is None
    assert joined([matrices[2], matrices[0]]) is None  # wrong order
    assert joined([matrices[0], matrices[0]]) is None


def test_a_matrix_without_outputs_and_inputs_of_the_wrong_shape():
    empty = jit.as_matrix(weights_of("Q4_1", 0, 0, 2))
    assert jit.linear(np.ones((2, 64), np.float32), empty).shape == (2, 0)
    for wrong in (63, 65):
        with pytest.raises(ValueError, match=f"x has {wrong} columns, but the matrix has 64 inputs"):
            jit.linear(np.ones((1, wrong), np.float32), jit.as_matrix(weights_of("Q4_1", 0, 5, 2)))
    with pytest.raises(ValueError, match="codes from 0 to 22 do not fit 4 bits"):
        jit.as_matrix(
            QuantizedMatrix(np.arange(24, dtype=np.int8).reshape(1, 1, 24) % 23, np.ones((1, 1), np.float32), bits=4)
        )


def test_an_infinite_later_token_does_not_change_an_earlier_one():
    *arguments, _ = paged_case(0, [6], [6], 1, 2, 16, 16)
    finite = jit.attention(*arguments)
    arguments[2][arguments[6][0, 0], arguments[3], :, 5] = np.inf  # value of position 5
    arguments[1][arguments[6][0, 0], arguments[3], :, :, 5] = np.nan  # key of the same position
    np.testing.assert_array_equal(jit.attention(*arguments)[:5], finite[:5])


def test_an_infinite_token_before_the_window_changes_nothing():
    *arguments, _ = paged_case(0, [6], [6], 1, 2, 16, 16)
    finite = jit.attention(*arguments, None, 2)
    arguments[2][arguments[6][0, 0], arguments[3], :, 0] = np.inf  # value of position 0, read by queries 0 and 1
    arguments[1][arguments[6][0, 0], arguments[3], :, :, 0] = np.nan  # key of the same position
    np.testing.assert_array_equal(jit.attention(*arguments, None, 2)[2:], finite[2:])


def test_no_kernel_allows_the_compiler_to_reorder_sums():
    modules = [importlib.import_module(f"minillm.ops.jit.{info.name}") for info in pkgutil.iter_modules(jit.__path__)]
    kernels = {}
    for module in modules:
        kernels |= {name: value for name, value in vars(module).items() if isinstance(value, Dispatcher)}
    assert len(kernels) >= 15
    for name, kernel in kernels.items():
        assert kernel.targetoptions["fastmath"] == {"contract", "nsz"}, name


def test_unsupported_block_sizes_are_refused():
    with pytest.raises(ValueError, match="blocks have 4 inputs"):
        jit.as_matrix(quantized(0, 8, 2, 4, False))


row_counts = st.integers(2, 23) | st.sampled_from(
    [63, 64, 65, 130]
)  # few rows, and numbers around the kernels' pieces of 64


@given(seed=seeds, rows=row_counts, outputs=sizes, blocks=st.integers(1, 6), format_name=st.sampled_from(FORMATS))
def test_a_row_has_the_same_bits_alone_and_among_others(seed, rows, outputs, blocks, format_name):
    matrix = jit.as_matrix(weights_of(format_name, seed, outputs, blocks))
    (x,) = randoms(seed, (rows, matrix.num_inputs))
    together = jit.linear(x, matrix)
    for row in range(rows):
        np.testing.assert_array_equal(jit.linear(x[row : row + 1], matrix)[0], together[row])


@given(**attention_shapes, dtype=dtypes, scoring=scorings)
def test_attention_has_the_same_bits_for_any_chunks_and_block_size(
    seed, lengths, kv_heads, queries_per_kv, head_dim, block_size, dtype, scoring
):
    *arguments, sequences = paged_case(
        seed, *zip(*lengths, strict=True), kv_heads, queries_per_kv, head_dim, block_size, dtype
    )
    queries, _, _, _, positions, starts, _ = arguments
    attended = jit.attention(*arguments, *scoring)
    for row, (k, v) in enumerate(sequences):
        # the sequence alone, in one block of its own length
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
                *scoring,
            )
            np.testing.assert_array_equal(alone[0], attended[token])


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 9))
def test_the_number_of_threads_does_not_change_bits(seed, rows):
    (x,) = randoms(seed, (rows, 64))
    matrix = jit.as_matrix(weights_of("Q4_1", seed, 500, 2))
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
    with pytest.raises(ValueError, match=f"threads is {threads}; on this machine it can be 1 to"):
        jit.set_num_threads(threads)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        reference.set_num_threads(threads)
