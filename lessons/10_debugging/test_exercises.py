"""Tests of the exercises of lesson 10."""

import numpy as np
import pytest

random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape)


# score


def test_score_divides_by_the_square_root_of_head_dim(exercises):
    queries, keys = np.full((1, 1, 16), 2.0), np.full((1, 3, 16), 0.5)
    np.testing.assert_allclose(exercises.score(queries, keys, np.array([2])), np.full((1, 1, 3), 4.0))


def test_score_hides_exactly_the_later_keys(exercises):
    positions = np.array([3, 0, 5])
    scores = exercises.score(normal(3, 2, 4), normal(1, 6, 4), positions)
    assert scores.shape == (2, 3, 6)
    late = np.arange(6) > positions[:, None]
    np.testing.assert_array_equal(scores == -np.inf, np.broadcast_to(late, scores.shape))
    assert np.isfinite(scores[:, ~late]).all()


def test_score_shares_a_key_head_among_consecutive_query_heads(exercises):
    queries, keys = normal(2, 6, 8), normal(3, 5, 8)
    scores = exercises.score(queries, keys, np.array([4, 4]))
    for head in range(6):
        np.testing.assert_allclose(scores[head], queries[:, head] @ keys[head // 2].T / np.sqrt(8))


# first_difference


def passes(count=5):
    theirs = {f"layers.{n}": normal(3, 4) for n in range(count)}
    return {name: value.copy() for name, value in theirs.items()}, theirs


def test_first_difference_of_equal_passes_is_none(exercises):
    ours, theirs = passes()
    ours["layers.2"][1, 1] += 1e-9
    assert exercises.first_difference(ours, theirs) == "layers.2"
    ours["layers.2"] = theirs["layers.2"].copy()
    assert exercises.first_difference(ours, theirs) is None


def test_first_difference_is_the_first_of_several(exercises):
    ours, theirs = passes()
    for name in ("layers.4", "layers.1", "layers.3"):
        ours[name][0, 0] += 1
    assert exercises.first_difference(ours, theirs) == "layers.1"


def test_first_difference_is_relative_to_the_largest_number_in_theirs(exercises):
    theirs = {"small": np.array([0.0, -2.0]), "large": np.array([1000.0, 1.0])}
    ours = {"small": np.array([0.01, -2.0]), "large": np.array([1000.0, 3.0])}
    assert exercises.first_difference(ours, theirs, tolerance=0.004) == "small"
    assert exercises.first_difference(ours, theirs, tolerance=0.006) is None
    assert exercises.first_difference(theirs, ours, tolerance=0.001) == "small"
    ours["small"][0] = 0
    assert exercises.first_difference(ours, theirs, tolerance=0.001) == "large"


def test_first_difference_compares_the_largest_difference_of_an_array(exercises):
    small, large = {"x": np.array([1.0, 0.5, 0.0])}, {"x": np.array([9.0, 0.6, 0.0])}
    assert exercises.first_difference(large, small, tolerance=7.9) == "x"
    assert exercises.first_difference(large, small, tolerance=8.1) is None
    assert exercises.first_difference(small, large, tolerance=0.8) == "x"
    assert exercises.first_difference(small, large, tolerance=0.9) is None


def test_first_difference_handles_infinity_and_nan(exercises):
    theirs = {"scores": np.array([1.0, -np.inf, np.nan])}
    same = {"scores": np.array([1.0, -np.inf, np.nan])}
    assert exercises.first_difference(same, theirs) is None
    assert exercises.first_difference(same, theirs, tolerance=0.5) is None
    for odd in ([1.0, 0.0, np.nan], [1.0, np.inf, np.nan], [1.0, -np.inf, 0.0], [np.nan, -np.inf, np.nan]):
        assert exercises.first_difference({"scores": np.array(odd)}, theirs, tolerance=1e9) == "scores"
        assert exercises.first_difference(theirs, {"scores": np.array(odd)}, tolerance=1e9) == "scores"


def test_first_difference_rejects_passes_with_other_names_or_shapes(exercises):
    ours, theirs = passes(2)
    assert exercises.first_difference(ours, theirs) is None
    for other in ({"layers.0": theirs["layers.0"]}, dict(reversed(theirs.items())), ours | {"more": normal(1)}):
        with pytest.raises(ValueError):  # noqa: PT011
            exercises.first_difference(ours, other)
    with pytest.raises(ValueError):  # noqa: PT011
        exercises.first_difference(ours, {name: value[:1] for name, value in theirs.items()})


# induction


def attending(*targets):
    """Return the weights of one head in which token t attends only to position targets[t]."""
    return np.eye(len(targets))[list(targets)][:, None, :]


def test_induction_is_1_for_a_perfect_induction_head(exercises):
    ids = [5, 6, 7, 5, 6, 7]
    np.testing.assert_allclose(exercises.induction(attending(0, 0, 0, 1, 2, 3), ids), [1.0])
    np.testing.assert_allclose(
        exercises.induction(attending(0, 0, 1, 0, 1, 2), ids), [0.0]
    )  # attends to equal tokens, not to the tokens after them
    np.testing.assert_allclose(exercises.induction(attending(0, 0, 0, 1, 0, 3), ids), [2 / 3])


def test_induction_averages_over_repeated_tokens_only(exercises):
    np.testing.assert_allclose(exercises.induction(attending(0, 0, 0, 1), [5, 6, 7, 5]), [1.0])
    np.testing.assert_allclose(exercises.induction(attending(0, 1, 2, 3), [5, 6, 7, 8]), [0.0])


def test_induction_adds_the_weights_of_all_earlier_occurrences(exercises):
    weights = np.zeros((5, 2, 5))
    weights[:, :, 0] = 1
    weights[4, 0], weights[4, 1] = [0.1, 0.3, 0.2, 0.25, 0.15], [1, 0, 0, 0, 0]
    # Token 9 is at 0, 2 and 4. Position 1 follows the occurrence at 0, and position 3 follows the one at 2.
    np.testing.assert_allclose(exercises.induction(weights, [9, 1, 9, 2, 9]), [(0 + 0.55) / 2, 0.0])


def test_induction_ignores_an_occurrence_that_the_token_itself_follows(exercises):
    np.testing.assert_allclose(exercises.induction(attending(0, 1), [3, 3]), [0.0])
    np.testing.assert_allclose(exercises.induction(attending(0, 1, 2), [3, 3, 3]), [0.0])
    np.testing.assert_allclose(exercises.induction(attending(0, 1, 1), [3, 3, 3]), [1.0])
