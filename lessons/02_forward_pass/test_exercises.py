"""Tests of the exercises of lesson 2."""

import numpy as np

random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape)


# rms_norm


def test_rms_norm_scales_each_row_to_size_one_independently(exercises):
    x = normal(4, 6) * [[1.0], [10.0], [1e-2], [1e3]]
    normed = exercises.rms_norm(x, np.ones(6), 1e-12)
    np.testing.assert_allclose(np.mean(normed**2, axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(normed[2], exercises.rms_norm(x[2:3], np.ones(6), 1e-12)[0])
    np.testing.assert_allclose(normed / x, np.repeat((normed / x)[:, :1], 6, axis=1))  # the mean is not subtracted


def test_rms_norm_weights_components_not_rows(exercises):
    x, weight = normal(5, 5), np.array([1.0, 2.0, 0.0, -1.0, 0.5])
    unweighted = exercises.rms_norm(x, np.ones(5), 1e-5)
    np.testing.assert_allclose(exercises.rms_norm(x, weight, 1e-5), unweighted * weight)


def test_rms_norm_adds_eps_to_the_mean_square_under_the_root(exercises):
    np.testing.assert_array_equal(exercises.rms_norm(np.zeros((2, 3)), np.ones(3), 1e-5), 0)
    np.testing.assert_allclose(exercises.rms_norm(np.full((1, 4), 3.0), np.ones(4), 16.0), 3 / 5)


# rotate


def rotated(x, angles):
    return lambda rotate: rotate(x, np.cos(angles), np.sin(angles))


def test_rotate_rotates_counterclockwise(exercises):
    heads = np.array([[[1.0, 2.0, 3.0, 4.0]]])  # pairs (1, 3) and (2, 4)
    np.testing.assert_allclose(rotated(heads, np.zeros((1, 2)))(exercises.rotate), heads)
    quarter = rotated(heads, np.full((1, 2), np.pi / 2))(exercises.rotate)
    np.testing.assert_allclose(quarter, [[[-3, -4, 1, 2]]], atol=1e-12)


def test_rotate_uses_the_angle_of_each_pair_and_token(exercises):
    heads, angles = normal(5, 3, 8), normal(5, 4)
    before = heads[..., :4] + 1j * heads[..., 4:]
    after = rotated(heads, angles)(exercises.rotate)
    assert after.shape == heads.shape
    np.testing.assert_allclose(after[..., :4] + 1j * after[..., 4:], before * np.exp(1j * angles)[:, None, :])


def test_rotate_makes_dot_products_depend_only_on_the_distance(exercises):
    q, k, frequencies = normal(1, 1, 6), normal(1, 1, 6), np.array([[1.0, 0.1, 0.01]])

    def score(query_position, key_position):
        rotated_q = rotated(q, query_position * frequencies)(exercises.rotate)
        rotated_k = rotated(k, key_position * frequencies)(exercises.rotate)
        return float(np.sum(rotated_q * rotated_k))

    assert np.isclose(score(7, 3), score(1007, 1003))
    assert not np.isclose(score(7, 3), score(7, 2))


# attend


def test_attend_with_equal_scores_returns_the_mean_of_the_readable_values(exercises):
    values = normal(1, 6, 4)
    attended = exercises.attend(np.zeros((2, 1, 4)), normal(1, 6, 4), values, np.array([1, 4]))
    np.testing.assert_allclose(attended[0, 0], values[0, :2].mean(axis=0))
    np.testing.assert_allclose(attended[1, 0], values[0, :5].mean(axis=0))


def test_attend_never_reads_later_positions(exercises):
    q, k, v = normal(4, 4, 8), normal(2, 6, 8), normal(2, 6, 8)
    before = exercises.attend(q, k, v, np.arange(2, 6))
    k[:, 5], v[:, 5] = 1e3, 1e3  # only the last of the four queries may change
    after = exercises.attend(q, k, v, np.arange(2, 6))
    np.testing.assert_allclose(before[:3], after[:3])
    assert not np.allclose(before[3], after[3])


def test_attend_divides_by_the_root_of_the_head_dim(exercises):
    query = np.full((1, 1, 16), 1.0)
    keys = np.stack([np.zeros(16), np.full(16, 0.25)])[None]  # dot products 0 and 4, scores 0 and 1
    values = np.zeros((1, 2, 16))
    values[0, 1] = 1
    np.testing.assert_allclose(exercises.attend(query, keys, values, np.array([1])), np.e / (1 + np.e))


def test_attend_shares_key_value_heads_among_neighbouring_query_heads(exercises):
    values = np.zeros((2, 3, 4))
    values[1] = 1  # heads 0 and 1 read only zeros, heads 2 and 3 only ones
    attended = exercises.attend(normal(3, 4, 4), normal(2, 3, 4), values, np.arange(3))
    assert attended.shape == (3, 4, 4)
    np.testing.assert_allclose(attended[:, :2], 0)
    np.testing.assert_allclose(attended[:, 2:], 1)


def test_attend_handles_large_scores(exercises):
    query, keys = np.full((1, 1, 4), 100.0), np.full((1, 3, 4), 100.0)
    keys[0, 1] = 101.0
    values = normal(1, 3, 4)
    attended = exercises.attend(query, keys, values, np.array([2]))
    np.testing.assert_allclose(attended[0, 0], values[0, 1])


def test_attend_agrees_with_one_query_at_a_time(exercises):
    q, k, v = normal(5, 6, 8), normal(3, 9, 8), normal(3, 9, 8)
    positions = np.array([8, 0, 3, 5, 4])
    attended = exercises.attend(q, k, v, positions)
    for row, position in enumerate(positions):
        for head in range(6):
            readable = slice(0, position + 1)
            scores = k[head // 2, readable] @ q[row, head] / np.sqrt(8)
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(attended[row, head], weights @ v[head // 2, readable])
