"""Quantization of weights: the error, exact cases, and invalid weights and scales."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import READ_ONLY_TYPES, random_llama, write_gguf, write_hf_folder

from minillm import LLM, CheckpointError, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.ops import backend, jit
from minillm.quantization import CHUNK, QuantizedMatrix, quantize

SEEDS = st.integers(0, 2**32 - 1)


def random_matrix(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blocks_of(matrix, block_size):
    """Return the columns of each block. The last block may be partial."""
    return [matrix[:, start : start + block_size] for start in range(0, matrix.shape[1], block_size)]


@given(seed=SEEDS, outputs=st.integers(0, 9), inputs=st.integers(0, 100), block_size=st.sampled_from([1, 8, 16, 32]))
@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_a_weight_is_at_most_half_the_scale(bits, seed, outputs, inputs, block_size):
    matrix = random_matrix(seed, outputs, inputs)
    matrix.flags.writeable = False  # like the pages of a mapped file
    quantized = quantize(matrix, bits, block_size)
    assert (quantized.shape, quantized.bits) == (matrix.shape, bits)
    lowest, highest = (0, 15) if bits == 4 else (-127, 127)
    assert ((quantized.codes >= lowest) & (quantized.codes <= highest)).all()
    scales = np.repeat(quantized.scales, block_size, axis=1)[:, :inputs]
    assert (np.abs(quantized.dequantize() - matrix) <= scales * 0.5001 + 1e-7).all()


@given(seed=SEEDS, outputs=st.integers(1, 9), inputs=st.integers(1, 100), offset=st.sampled_from([-9, 0, 9]))
@pytest.mark.parametrize("bits", [4, 8])
def test_padding_does_not_affect_the_scale(bits, seed, outputs, inputs, offset):
    matrix = random_matrix(seed, outputs, inputs) + np.float32(offset)
    quantized = quantize(matrix, bits)
    for index, block in enumerate(blocks_of(matrix, 32)):
        smallest, largest = block.min(axis=1), block.max(axis=1)
        span = (largest - smallest) / np.float32(15) if bits == 4 else np.abs(block).max(axis=1) / np.float32(127)
        np.testing.assert_array_equal(quantized.scales[:, index], span)
        if bits == 4:
            np.testing.assert_array_equal(quantized.minimums[:, index], smallest)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_quantized_independently(bits):
    """The matrix takes several chunks. The last one is partial."""
    rows = 2 * CHUNK // 1000 + 7
    matrix = random_matrix(0, rows, 1000)
    quantized = quantize(matrix, bits)
    for row in (0, rows // 2, rows - 1):
        single = quantize(matrix[row : row + 1], bits)
        np.testing.assert_array_equal(quantized.codes[row], single.codes[0])
        np.testing.assert_array_equal(quantized.dequantize()[row], single.dequantize()[0])


@given(seed=SEEDS, rows=st.sampled_from([1, 2, 5]), outputs=st.integers(1, 70), inputs=st.integers(1, 100))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("backend_name", ["numba", "numpy"])
def test_partial_blocks_multiply_as_their_dequantized_weights(backend_name, bits, seed, rows, outputs, inputs):
    ops = backend(backend_name)
    quantized = quantize(random_matrix(seed, outputs, inputs), bits)
    matrix, x = ops.as_matrix(quantized), random_matrix(seed + 1, rows, inputs)
    expected = x.astype(np.float64) @ quantized.dequantize().astype(np.float64).T
    assert np.abs(ops.linear(x, matrix) - expected).max() <= 1e-5 * np.sqrt(inputs) * (1 + np.abs(expected).max())
    ids = np.array([0, outputs - 1])
    np.testing.assert_allclose(ops.embed(ids, matrix), quantized.dequantize()[ids], rtol=3e-7, atol=1e-6)


@given(seed=SEEDS, outputs=st.integers(1, 70), inputs=st.integers(1, 100), rows=st.sampled_from([1, 3, 4]))
@pytest.mark.parametrize("bits", [4, 8])
def test_padding_does_not_affect_products(bits, seed, outputs, inputs, rows):
    """Products have the same bits with any codes in the padding."""
    quantized = quantize(random_matrix(seed, outputs, inputs), bits)
    codes = quantized.codes.copy()
    codes.reshape(outputs, -1)[:, inputs:] = np.random.default_rng(seed).integers(0, 16)
    other = replace(quantized, codes=codes)
    x = random_matrix(seed + 1, rows, inputs)
    np.testing.assert_array_equal(jit.linear(x, jit.as_matrix(other)), jit.linear(x, jit.as_matrix(quantized)))
    np.testing.assert_array_equal(jit.dequantize(jit.as_matrix(other)), jit.dequantize(jit.as_matrix(quantized)))


@given(seed=SEEDS, zero_rows=st.sets(st.integers(0, 8)), scale=st.sampled_from([1e-38, 1e-20, 1.0, 1e30]))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("backend_name", ["numba", "numpy"])
def test_rows_of_zeros_give_zeros_and_do_not_affect_other_rows(backend_name, bits, seed, zero_rows, scale):
    ops = backend(backend_name)
    matrix = random_matrix(seed, 9, 40) * np.float32(scale)
    matrix[list(zero_rows)] = 0
    quantized = quantize(matrix, bits)
    assert not quantized.dequantize()[list(zero_rows)].any()
    products = ops.linear(random_matrix(seed, 3, 40), ops.as_matrix(quantized))
    assert np.isfinite(products).all()
    assert not products[:, list(zero_rows)].any()
    others = sorted(set(range(9)) - zero_rows)
    np.testing.assert_array_equal(quantized.dequantize()[others], quantize(matrix[others], bits).dequantize())


@given(seed=SEEDS, scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_multiples_of_the_scale_are_restored(seed, scale):
    """Equal weights are restored exactly from 4 bits."""
    codes = np.random.default_rng(seed).integers(-127, 128, (3, 2, 32)).astype(np.int8)
    codes[:, :, 0] = 127
    exact = QuantizedMatrix(codes, np.full((3, 2), scale, np.float32)).dequantize()
    np.testing.assert_allclose(quantize(exact, 8).dequantize(), exact, rtol=1e-6)
    constant = np.full((2, 64), scale, np.float32)
    np.testing.assert_array_equal(quantize(constant, 4).dequantize(), constant)


@pytest.mark.parametrize("bits", [4, 8])
def test_denormal_weights_keep_their_sign(bits):
    matrix = np.full((1, 32), 190 * 2.0**-149, np.float32)
    matrix[0, 0] = 0
    restored = quantize(matrix, bits).dequantize()
    assert (restored >= 0).all()
    assert (restored <= 2 * matrix.max()).all()


@pytest.mark.parametrize(
    ("matrix", "bits", "message"),
    [
        (np.ones((2, 32)), 5, "bits is 5, expected 4 or 8"),
        (
            np.where(np.arange(64).reshape(2, 32) % 2, 3e38, -3e38),
            4,
            "block 0 spans -3.* to 3.*, a range that float32 cannot hold",
        ),
    ],
)
def test_invalid_arguments_are_refused(matrix, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize(matrix.astype(np.float32), bits)
    with pytest.raises(ValueError, match="block_size is 0"):
        quantize(np.ones((2, 32), np.float32), 8, block_size=0)


@given(row=st.integers(0, 2 * CHUNK // 50), column=st.integers(0, 49), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=20)
def test_a_weight_that_is_not_finite_is_located(bits, row, column, bad):
    matrix = np.ones((2 * CHUNK // 50 + 1, 50), np.float32)
    matrix[row, column] = bad
    with pytest.raises(ValueError, match=f"row {row}, block {column // 32} holds NaN or infinity"):
        quantize(matrix, bits)


@given(seed=SEEDS, bad=st.sampled_from([np.nan, np.inf, -np.inf]), in_minimums=st.booleans())
def test_a_scale_that_is_not_finite_is_refused(seed, bad, in_minimums):
    """A scale of zero is valid."""
    codes = np.ones((3, 2, 32), np.int8)
    scales, minimums = np.zeros((2, 3, 2), np.float32)
    matrix = QuantizedMatrix(codes, scales, minimums, 4)
    matrix.check_scales()
    assert not matrix.dequantize().any()
    row, block = np.random.default_rng(seed).integers((3, 2))
    (minimums if in_minimums else scales)[row, block] = bad
    kind = "minimum" if in_minimums else "scale"
    with pytest.raises(ValueError, match=f"the {kind} of row {row}, block {block} is {bad}, expected a finite number"):
        matrix.check_scales()


@pytest.mark.parametrize("num_inputs", [-1, 0, 32, 65, 96])
def test_the_last_input_must_be_in_the_last_block(num_inputs):
    with pytest.raises(ValueError, match=f"{num_inputs} inputs do not fill 2 blocks of 32"):
        QuantizedMatrix(np.ones((3, 2, 32), np.int8), np.ones((3, 2), np.float32), num_inputs=num_inputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_file_with_a_scale_that_is_not_finite_is_refused(tmp_path, bad):
    def break_a_scale(writer):
        tensor = writer.tensors[0]["blk.1.ffn_up.weight"].tensor
        tensor.reshape(-1).view(np.uint8)[:2] = np.array([bad], np.float16).view(np.uint8)

    path = write_gguf(tmp_path / "broken.gguf", random_llama(), "Q8_0", edit=break_a_scale)
    message = rf"broken.gguf: tensor 'blk.1.ffn_up.weight' .* scale of row 0, block 0 is {bad}"
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


@pytest.mark.parametrize("storage", READ_ONLY_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_scale_of_a_super_block_is_refused_without_a_warning(tmp_path, storage, bad):
    def break_a_scale(writer):
        tensor = writer.tensors[0]["blk.0.ffn_up.weight"].tensor
        offset = READ_ONLY_TYPES[storage][-1]
        tensor.reshape(-1)[offset : offset + 2] = np.array([bad], np.float16).view(np.uint8)

    model = random_llama(hidden_size=256, intermediate_size=256)
    tensor = open_checkpoint(write_gguf(tmp_path / "broken.gguf", model, storage, edit=break_a_scale)).tensors[
        "layers.0.mlp.up.weight"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = tensor.read()
        kind = "minimum" if len(READ_ONLY_TYPES[storage]) == 2 else "scale"
        with pytest.raises(ValueError, match=rf"the {kind} of row 0, block 0 is -?(nan|inf), expected a finite number"):
            matrix.check_scales()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_folder_with_a_weight_that_is_not_finite_cannot_be_quantized(tmp_path, weights):
    path, model = write_hf_folder(tmp_path)
    model.model.layers[0].mlp.down_proj.weight.data[5, 7] = math.nan
    model.save_pretrained(path)
    with pytest.raises(CheckpointError, match=r"tensor '.*0.mlp.down_proj.weight' cannot be used: row 5, block 0"):
        LLM(path, weights=weights)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(
    "sizes", [{}, {"hidden_size": 60, "intermediate_size": 90, "head_dim": 10}], ids=["full blocks", "partial blocks"]
)
def test_a_float_checkpoint_can_be_quantized_while_it_loads(tmp_path, backend, sizes):
    path, _ = write_hf_folder(tmp_path, **sizes)
    plain = LLM(path, backend=backend)
    for weights, bytes_per_weight, tolerance in (("int8", 1.2, 0.05), ("int4", 0.8, 0.5)):
        quantized = LLM(path, backend=backend, weights=weights)
        expected, found = plain.logits([1, 2, 3]), quantized.logits([1, 2, 3])
        assert 0 < np.abs(found - expected).max() < tolerance * np.abs(expected).max()
        if backend == "numba":
            assert quantized.transformer.weight_bytes < plain.transformer.weight_bytes / 4 * bytes_per_weight
        assert len(quantized.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ValueError, match="weights is 'int3'; it can be None, 'int8', 'int4'"):
        LLM(path, weights="int3")
