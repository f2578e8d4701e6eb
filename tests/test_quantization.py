"""Rounding weights to few bits: how far off a weight may be, and what is exact."""

import numpy as np
import pytest
from builders import write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.quantization import QuantizedMatrix, quantize

seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds, outputs=st.integers(0, 9), blocks=st.integers(1, 4), block_size=st.sampled_from([8, 16, 32]))
@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_is_off_by_more_than_half_a_step(bits, seed, outputs, blocks, block_size):
    matrix = np.random.default_rng(seed).standard_normal((outputs, blocks * block_size)).astype(np.float32)
    quantized = quantize(matrix, bits, block_size)
    assert (quantized.shape, quantized.bits) == (matrix.shape, bits)
    lowest, highest = (0, 15) if bits == 4 else (-127, 127)
    assert ((quantized.codes >= lowest) & (quantized.codes <= highest)).all()
    off = np.abs(quantized.dequantize() - matrix).reshape(quantized.codes.shape)
    assert (off <= quantized.scales[:, :, None] * 0.5001 + 1e-7).all()


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
        (np.ones((2, 32)), 5, "bits is 5; weights are quantized to 4 or 8"),
        (np.ones((2, 40)), 8, "rows of 40 weights do not divide into blocks of 32"),
        (np.full((2, 32), np.nan), 8, "NaN or infinity"),
        (np.full((2, 32), np.inf), 4, "NaN or infinity"),
        (np.where(np.arange(64).reshape(2, 32) % 2, 3e38, -3e38), 4, "span of a block's weights is more than float32"),
    ],
)
def test_what_cannot_be_quantized(matrix, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize(matrix.astype(np.float32), bits)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_float_checkpoint_loaded_in_fewer_bits(tmp_path, backend):
    path, _ = write_hf_folder(tmp_path)
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
