"""Tests of the exercises of lesson 6."""

import numpy as np
import pytest

random = np.random.default_rng(0)

# tile_rows


@pytest.mark.parametrize(("outputs", "inputs", "block_size"), [(64, 8, 8), (128, 96, 32), (192, 6, 1), (64, 10, 10)])
def test_tile_rows_moves_every_weight_to_its_lane(exercises, outputs, inputs, block_size):
    matrix = np.arange(outputs * inputs, dtype=np.float32).reshape(outputs, inputs)
    tiles = exercises.tile_rows(matrix, block_size)
    assert tiles.shape == (outputs // 64, inputs // block_size, block_size, 64)
    t, b, q, lane = np.indices(tiles.shape)
    np.testing.assert_array_equal(tiles, matrix[64 * t + lane, block_size * b + q])


def test_tile_rows_returns_a_contiguous_array(exercises):
    tiles = exercises.tile_rows(random.standard_normal((128, 64)), 32)
    assert tiles.flags.c_contiguous


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (63, 32), (65, 33), (100, 50)])
def test_tile_rows_pads_with_zeros(exercises, outputs, inputs):
    matrix = random.integers(1, 100, (outputs, inputs))
    tiles = exercises.tile_rows(matrix, 32)
    assert tiles.shape == (-(-outputs // 64), -(-inputs // 32), 32, 64)
    back = np.zeros((64 * tiles.shape[0], 32 * tiles.shape[1]), int)
    t, b, q, lane = np.indices(tiles.shape)
    back[64 * t + lane, 32 * b + q] = tiles
    np.testing.assert_array_equal(back[:outputs, :inputs], matrix)
    assert np.count_nonzero(back) == outputs * inputs


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32])
def test_tile_rows_keeps_the_dtype_and_leaves_the_matrix_unchanged(exercises, dtype):
    matrix = random.integers(0, 100, (70, 40)).astype(dtype)
    before = matrix.copy()
    assert exercises.tile_rows(matrix, 32).dtype == dtype
    np.testing.assert_array_equal(matrix, before)


# unpack_nibbles


def test_unpack_nibbles_returns_low_halves_first(exercises):
    packed = np.array([0x51, 0x62, 0x73, 0x84], np.uint8)
    codes = exercises.unpack_nibbles(packed)
    assert codes.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert codes.dtype == np.int8


def test_unpack_nibbles_returns_no_negative_codes(exercises):
    packed = np.arange(256, dtype=np.uint8)
    codes = exercises.unpack_nibbles(packed)
    assert (codes.min(), codes.max()) == (0, 15)
    np.testing.assert_array_equal(codes[:256] + 16 * codes[256:].astype(int), packed)


def test_unpack_nibbles_unpacks_each_block_separately(exercises):
    expected = random.integers(0, 16, (3, 5, 32), np.uint8)
    packed = expected[..., :16] | expected[..., 16:] << 4
    before = packed.copy()
    np.testing.assert_array_equal(exercises.unpack_nibbles(packed), expected)
    np.testing.assert_array_equal(packed, before)


# widen_bfloat16


def test_widen_bfloat16_of_known_numbers(exercises):
    bits = np.array([0x0000, 0x3F80, 0xBF80, 0x4000, 0x4049, 0x7F80, 0x0001], np.uint16)
    numbers = exercises.widen_bfloat16(bits)
    assert numbers.dtype == np.float32
    assert numbers.tolist() == [0.0, 1.0, -1.0, 2.0, 3.140625, np.inf, 2.0**-133]


def test_widen_bfloat16_is_the_inverse_of_truncation(exercises):
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    widened = exercises.widen_bfloat16(bits)
    assert widened.shape == bits.shape
    np.testing.assert_array_equal(widened.view(np.uint32) >> 16, bits)
    np.testing.assert_array_equal(widened.view(np.uint32) & 0xFFFF, 0)
