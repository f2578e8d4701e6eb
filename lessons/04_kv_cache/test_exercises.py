"""Tests of the exercises of lesson 4."""

import numpy as np
import pytest

from minillm.ops.reference import attend

random = np.random.default_rng(0)
N, L, G, K, B = 6, 3, 2, 4, 5  # blocks, layers, key/value heads, numbers in a head, positions in a block


def normal(*shape):
    return random.standard_normal(shape)


def empty_cache():
    return np.zeros((N, L, G, K, B)), np.zeros((N, L, G, B, K))


# write_kv


def test_write_kv_puts_every_token_into_its_slot(exercises):
    keys, values, slots = normal(4, G, K), normal(4, G, K), np.array([0, 7, 29, 13])
    key_blocks, value_blocks = empty_cache()
    exercises.write_kv(keys, values, key_blocks, value_blocks, 1, slots)
    for token, (block, offset) in enumerate([(0, 0), (1, 2), (5, 4), (2, 3)]):
        np.testing.assert_array_equal(key_blocks[block, 1, :, :, offset], keys[token])
        np.testing.assert_array_equal(value_blocks[block, 1, :, offset, :], values[token])


def test_write_kv_changes_no_other_slot_and_no_other_layer(exercises):
    key_blocks, value_blocks = normal(N, L, G, K, B), normal(N, L, G, B, K)
    before = key_blocks.copy(), value_blocks.copy()
    exercises.write_kv(normal(3, G, K), normal(3, G, K), key_blocks, value_blocks, 2, np.array([8, 9, 10]))
    key_changed = (key_blocks != before[0]).any(axis=(2, 3))  # [N, L, B]
    value_changed = (value_blocks != before[1]).any(axis=(2, 4))
    expected = [[1, 2, 3], [1, 2, 4], [2, 2, 0]]  # block, layer, offset
    assert np.argwhere(key_changed).tolist() == expected
    assert np.argwhere(value_changed).tolist() == expected


def test_write_kv_replaces_what_was_there(exercises):
    key_blocks, value_blocks = empty_cache()
    keys, values = normal(2, 1, G, K)
    exercises.write_kv(keys - 1, values - 1, key_blocks, value_blocks, 0, np.array([17]))
    exercises.write_kv(keys, values, key_blocks, value_blocks, 0, np.array([17]))
    np.testing.assert_array_equal(key_blocks[3, 0, :, :, 2], keys[0])
    np.testing.assert_array_equal(value_blocks[3, 0, :, 2, :], values[0])


# attention


def filled_cache(lengths, tables, layer):
    """Return a cache full of wrong numbers, except for the keys and values [G, m, K] of each sequence, and these."""
    key_blocks, value_blocks = np.full((N, L, G, K, B), 1e6), np.full((N, L, G, B, K), 1e6)
    plain = []
    for length, table in zip(lengths, tables, strict=True):
        keys, values = normal(G, length, K), normal(G, length, K)
        for position in range(length):
            block, offset = table[position // B], position % B
            key_blocks[block, layer, :, :, offset] = keys[:, position]
            value_blocks[block, layer, :, offset, :] = values[:, position]
        plain.append((keys, values))
    return key_blocks, value_blocks, plain


@pytest.mark.parametrize("table", [[0, 1, 2], [4, 0, 5], [2, 1, 0]])
def test_attention_finds_the_keys_in_any_blocks(exercises, table):
    key_blocks, value_blocks, [(keys, values)] = filled_cache([12], [table], layer=1)
    queries, positions = normal(12, 4, K), np.arange(12)
    found = exercises.attention(queries, key_blocks, value_blocks, 1, positions, np.array([0, 12]), np.array([table]))
    np.testing.assert_allclose(found, attend(queries, keys, values, positions))


def test_attention_needs_only_the_new_tokens_queries(exercises):
    key_blocks, value_blocks, [(keys, values)] = filled_cache([10], [[3, 1]], layer=0)
    query = normal(1, 2, K)
    found = exercises.attention(query, key_blocks, value_blocks, 0, np.array([9]), np.array([0, 1]), np.array([[3, 1]]))
    np.testing.assert_allclose(found, attend(query, keys, values, np.array([9])))


def test_attention_keeps_the_sequences_of_a_batch_apart(exercises):
    lengths, tables = [7, 3, 11], [[5, 2], [0], [1, 4, 3]]
    key_blocks, value_blocks, plain = filled_cache(lengths, tables, layer=2)
    chunks = [2, 3, 1]  # how many tokens of each are new
    queries = normal(sum(chunks), 4, K)
    new = [np.arange(length - chunk, length) for length, chunk in zip(lengths, chunks, strict=True)]
    starts = np.array([0, 2, 5, 6])
    padded = np.array([[5, 2, -1], [0, -1, -1], [1, 4, 3]])
    found = exercises.attention(queries, key_blocks, value_blocks, 2, np.concatenate(new), starts, padded)
    assert found.shape == queries.shape
    for s, (keys, values) in enumerate(plain):
        own = slice(starts[s], starts[s + 1])
        np.testing.assert_allclose(found[own], attend(queries[own], keys, values, new[s]))
