"""Rounding weights to few bits: how far off a weight may be, and what is exact."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import ONLY_READ, random_llama, write_gguf, write_hf_folder

from minillm import LLM, CheckpointError, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.ops import backend, jit
from minillm.quantization import CHUNK, QuantizedMatrix, quantize

seeds = st.integers(0, 2**32 - 1)


def randoms(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blocks_of(matrix, block_size):
    """The columns of every block, the last of which may be few."""
    return [matrix[:, start : start + block_size] for start in range(0, matrix.shape[1], block_size)]


@given(seed=seeds, outputs=st.integers(0, 9), inputs=st.integers(0, 100), block_size=st.sampled_from([1, 8, 16, 32]))
@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_is_off_by_more_than_half_a_step(bits, seed, outputs, inputs, block_size):
    matrix = randoms(seed, outputs, inputs)
    matrix.flags.writeable = False  # as a file's own pages are
    quantized = quantize(matrix, bits, block_size)
    assert (quantized.shape, quantized.bits) == (matrix.shape, bits)
    lowest, highest = (0, 15) if bits == 4 else (-127, 127)
    assert ((quantized.codes >= lowest) & (quantized.codes <= highest)).all()
    scales = np.repeat(quantized.scales, block_size, axis=1)[:, :inputs]
    assert (np.abs(quantized.dequantize() - matrix) <= scales * 0.5001 + 1e-7).all()


@given(seed=seeds, outputs=st.integers(1, 9), inputs=st.integers(1, 100), offset=st.sampled_from([-9, 0, 9]))
@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_is_that_of_the_weights_there_are(bits, seed, outputs, inputs, offset):
    """Whether or not the last block is full: what fills it up in memory counts for nothing."""
    matrix = randoms(seed, outputs, inputs) + np.float32(offset)
    quantized = quantize(matrix, bits)
    for index, block in enumerate(blocks_of(matrix, 32)):
        smallest, largest = block.min(axis=1), block.max(axis=1)
        span = (largest - smallest) / np.float32(15) if bits == 4 else np.abs(block).max(axis=1) / np.float32(127)
        np.testing.assert_array_equal(quantized.scales[:, index], span)
        if bits == 4:
            np.testing.assert_array_equal(quantized.minimums[:, index], smallest)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_by_themselves(bits):
    """However many rows are rounded at a time: here several times as many as fit one turn, and the last turn short."""
    rows = 2 * CHUNK // 1000 + 7
    matrix = randoms(0, rows, 1000)
    together = quantize(matrix, bits)
    for row in (0, rows // 2, rows - 1):
        alone = quantize(matrix[row : row + 1], bits)
        np.testing.assert_array_equal(together.codes[row], alone.codes[0])
        np.testing.assert_array_equal(together.dequantize()[row], alone.dequantize()[0])


@given(seed=seeds, rows=st.sampled_from([1, 2, 5]), outputs=st.integers(1, 70), inputs=st.integers(1, 100))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("backend_name", ["numba", "numpy"])
def test_blocks_that_are_not_full_multiply_as_the_weights_they_stand_for(
    backend_name, bits, seed, rows, outputs, inputs
):
    ops = backend(backend_name)
    quantized = quantize(randoms(seed, outputs, inputs), bits)
    matrix, x = ops.as_matrix(quantized), randoms(seed + 1, rows, inputs)
    expected = x.astype(np.float64) @ quantized.dequantize().astype(np.float64).T
    assert np.abs(ops.linear(x, matrix) - expected).max() <= 1e-5 * np.sqrt(inputs) * (1 + np.abs(expected).max())
    ids = np.array([0, outputs - 1])
    np.testing.assert_allclose(ops.embed(ids, matrix), quantized.dequantize()[ids], rtol=3e-7, atol=1e-6)


@given(seed=seeds, outputs=st.integers(1, 70), inputs=st.integers(1, 100), rows=st.sampled_from([1, 3, 4]))
@pytest.mark.parametrize("bits", [4, 8])
def test_what_fills_a_block_up_never_shows(bits, seed, outputs, inputs, rows):
    """The same bits with any other codes there."""
    quantized = quantize(randoms(seed, outputs, inputs), bits)
    codes = quantized.codes.copy()
    codes.reshape(outputs, -1)[:, inputs:] = np.random.default_rng(seed).integers(0, 16)
    other = replace(quantized, codes=codes)
    x = randoms(seed + 1, rows, inputs)
    np.testing.assert_array_equal(jit.linear(x, jit.as_matrix(other)), jit.linear(x, jit.as_matrix(quantized)))
    np.testing.assert_array_equal(jit.dequantize(jit.as_matrix(other)), jit.dequantize(jit.as_matrix(quantized)))


@given(seed=seeds, zero_rows=st.sets(st.integers(0, 8)), scale=st.sampled_from([1e-38, 1e-20, 1.0, 1e30]))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("backend_name", ["numba", "numpy"])
def test_rows_of_zeros_give_zeros_and_leave_the_others_alone(backend_name, bits, seed, zero_rows, scale):
    ops = backend(backend_name)
    matrix = randoms(seed, 9, 40) * np.float32(scale)
    matrix[list(zero_rows)] = 0
    quantized = quantize(matrix, bits)
    assert not quantized.dequantize()[list(zero_rows)].any()
    found = ops.linear(randoms(seed, 3, 40), ops.as_matrix(quantized))
    assert np.isfinite(found).all()
    assert not found[:, list(zero_rows)].any()
    others = sorted(set(range(9)) - zero_rows)
    np.testing.assert_array_equal(quantized.dequantize()[others], quantize(matrix[others], bits).dequantize())


@given(seed=seeds, scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_what_is_on_the_grid_stays_as_it_is(seed, scale):
    """Weights that are whole multiples of a scale, the largest among them, come back to the bit."""
    codes = np.random.default_rng(seed).integers(-127, 128, (3, 2, 32)).astype(np.int8)
    codes[:, :, 0] = 127
    exact = QuantizedMatrix(codes, np.full((3, 2), scale, np.float32)).dequantize()
    np.testing.assert_allclose(quantize(exact, 8).dequantize(), exact, rtol=1e-6)
    constant = np.full((2, 64), scale, np.float32)
    np.testing.assert_array_equal(quantize(constant, 4).dequantize(), constant)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_almost_too_small_to_hold_keep_their_sign(bits):
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
def test_what_cannot_be_quantized(matrix, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize(matrix.astype(np.float32), bits)
    with pytest.raises(ValueError, match="block_size is 0"):
        quantize(np.ones((2, 32), np.float32), 8, block_size=0)


@given(row=st.integers(0, 2 * CHUNK // 50), column=st.integers(0, 49), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=20)
def test_a_weight_that_is_no_number_is_found_wherever_it_is(bits, row, column, bad):
    matrix = np.ones((2 * CHUNK // 50 + 1, 50), np.float32)
    matrix[row, column] = bad
    with pytest.raises(ValueError, match=f"row {row}, block {column // 32} holds NaN or infinity"):
        quantize(matrix, bits)


@given(seed=seeds, bad=st.sampled_from([np.nan, np.inf, -np.inf]), in_minimums=st.booleans())
def test_a_scale_that_is_no_number_is_refused(seed, bad, in_minimums):
    """Zero, on the other hand, is a scale like any other."""
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
def test_inputs_end_in_the_last_block(num_inputs):
    with pytest.raises(ValueError, match=f"{num_inputs} inputs do not fill 2 blocks of 32"):
        QuantizedMatrix(np.ones((3, 2, 32), np.int8), np.ones((3, 2), np.float32), num_inputs=num_inputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_file_with_a_scale_that_is_no_number_is_refused(tmp_path, bad):
    def break_a_scale(writer):
        tensor = writer.tensors[0]["blk.1.ffn_up.weight"].tensor
        tensor.reshape(-1).view(np.uint8)[:2] = np.array([bad], np.float16).view(np.uint8)

    path = write_gguf(tmp_path / "broken.gguf", random_llama(), "Q8_0", edit=break_a_scale)
    message = rf"broken.gguf: tensor 'blk.1.ffn_up.weight' .* scale of row 0, block 0 is {bad}"
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


@pytest.mark.parametrize("storage", ONLY_READ)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_scale_of_a_super_block_is_refused_without_another_word(tmp_path, storage, bad):
    """Whatever it is multiplied with: no warning of NumPy's comes first."""

    def break_a_scale(writer):
        tensor = writer.tensors[0]["blk.0.ffn_up.weight"].tensor
        place = ONLY_READ[storage][-1]
        tensor.reshape(-1)[place : place + 2] = np.array([bad], np.float16).view(np.uint8)

    model = random_llama(hidden_size=256, intermediate_size=256)
    tensor = open_checkpoint(write_gguf(tmp_path / "broken.gguf", model, storage, edit=break_a_scale)).tensors[
        "layers.0.mlp.up.weight"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = tensor.read()
        kind = "minimum" if len(ONLY_READ[storage]) == 2 else "scale"
        with pytest.raises(ValueError, match=rf"the {kind} of row 0, block 0 is -?(nan|inf), expected a finite number"):
            matrix.check_scales()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_folder_with_a_weight_that_is_no_number_cannot_be_rounded(tmp_path, weights):
    path, model = write_hf_folder(tmp_path)
    model.model.layers[0].mlp.down_proj.weight.data[5, 7] = math.nan
    model.save_pretrained(path)
    with pytest.raises(CheckpointError, match=r"tensor '.*0.mlp.down_proj.weight' cannot be used: row 5, block 0"):
        LLM(path, weights=weights)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(
    "sizes", [{}, {"hidden_size": 60, "intermediate_size": 90, "head_dim": 10}], ids=["whole blocks", "odd sizes"]
)
def test_a_float_checkpoint_loaded_in_fewer_bits(tmp_path, backend, sizes):
    path, _ = write_hf_folder(tmp_path, **sizes)
    plain = LLM(path, backend=backend)
    for weights, bytes_a_weight, tolerance in (("int8", 1.2, 0.05), ("int4", 0.8, 0.5)):
        rounded = LLM(path, backend=backend, weights=weights)
        expected, found = plain.logits([1, 2, 3]), rounded.logits([1, 2, 3])
        assert 0 < np.abs(found - expected).max() < tolerance * np.abs(expected).max()
        if backend == "numba":
            assert rounded.transformer.weight_bytes < plain.transformer.weight_bytes / 4 * bytes_a_weight
        assert len(rounded.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ValueError, match="weights is 'int3'; it can be None, 'int8', 'int4'"):
        LLM(path, weights="int3")
