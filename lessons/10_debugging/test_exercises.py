"""Are the exercises of lesson 10 right?"""

import numpy as np
import pytest

random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape)


# score


def test_score_divides_by_the_root_of_the_head_dim(exercises):
    queries, keys = np.full((1, 1, 16), 2.0), np.full((1, 3, 16), 0.5)
    np.testing.assert_allclose(exercises.score(queries, keys, np.array([2])), np.full((1, 1, 3), 4.0))


def test_score_hides_what_comes_later_and_nothing_else(exercises):
    positions = np.array([3, 0, 5])
    scores = exercises.score(normal(3, 2, 4), normal(1, 6, 4), positions)
    assert scores.shape == (2, 3, 6)
    late = np.arange(6) > positions[:, None]
    np.testing.assert_array_equal(scores == -np.inf, np.broadcast_to(late, scores.shape))
    assert np.isfinite(scores[:, ~late]).all()


def test_score_gives_neighbouring_query_heads_the_same_keys(exercises):
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


def test_first_difference_measures_by_the_largest_number_of_theirs(exercises):
    theirs = {"small": np.array([0.0, -2.0]), "large": np.array([1000.0, 1.0])}
    ours = {"small": np.array([0.01, -2.0]), "large": np.array([1000.0, 3.0])}
    assert exercises.first_difference(ours, theirs, tolerance=0.004) == "small"
    assert exercises.first_difference(ours, theirs, tolerance=0.006) is None
    assert exercises.first_difference(theirs, ours, tolerance=0.001) == "small"
    ours["small"][0] = 0
    assert exercises.first_difference(ours, theirs, tolerance=0.001) == "large"


def test_first_difference_takes_the_largest_of_all_differences_as_a_share_of_theirs(exercises):
    small, large = {"x": np.array([1.0, 0.5, 0.0])}, {"x": np.array([9.0, 0.6, 0.0])}
    assert exercises.first_difference(large, small, tolerance=7.9) == "x"
    assert exercises.first_difference(large, small, tolerance=8.1) is None
    assert exercises.first_difference(small, large, tolerance=0.8) == "x"
    assert exercises.first_difference(small, large, tolerance=0.9) is None


def test_first_difference_knows_its_way_about_infinity_and_nan(exercises):
    theirs = {"scores": np.array([1.0, -np.inf, np.nan])}
    same = {"scores": np.array([1.0, -np.inf, np.nan])}
    assert exercises.first_difference(same, theirs) is None
    assert exercises.first_difference(same, theirs, tolerance=0.5) is None
    for odd in ([1.0, 0.0, np.nan], [1.0, np.inf, np.nan], [1.0, -np.inf, 0.0], [np.nan, -np.inf, np.nan]):
        assert exercises.first_difference({"scores": np.array(odd)}, theirs, tolerance=1e9) == "scores"
        assert exercises.first_difference(theirs, {"scores": np.array(odd)}, tolerance=1e9) == "scores"


def test_first_difference_refuses_passes_over_different_things(exercises):
    ours, theirs = passes(2)
    assert exercises.first_difference(ours, theirs) is None
    for other in ({"layers.0": theirs["layers.0"]}, dict(reversed(theirs.items())), ours | {"more": normal(1)}):
        with pytest.raises(ValueError):  # noqa: PT011
            exercises.first_difference(ours, other)
    with pytest.raises(ValueError):  # noqa: PT011
        exercises.first_difference(ours, {name: value[:1] for name, value in theirs.items()})


# induction


def looking(*targets):
    """Weights of one head in which token t looks at position targets[t] alone."""
    return np.eye(len(targets))[list(targets)][:, None, :]


def test_induction_is_one_for_a_head_that_always_does_it(exercises):
    ids = [5, 6, 7, 5, 6, 7]
    np.testing.assert_allclose(exercises.induction(looking(0, 0, 0, 1, 2, 3), ids), [1.0])
    np.testing.assert_allclose(exercises.induction(looking(0, 0, 1, 0, 1, 2), ids), [0.0])  # looks at its own likes
    np.testing.assert_allclose(exercises.induction(looking(0, 0, 0, 1, 0, 3), ids), [2 / 3])


def test_induction_asks_only_tokens_that_have_stood_before(exercises):
    np.testing.assert_allclose(exercises.induction(looking(0, 0, 0, 1), [5, 6, 7, 5]), [1.0])
    np.testing.assert_allclose(exercises.induction(looking(0, 1, 2, 3), [5, 6, 7, 8]), [0.0])


def test_induction_adds_up_all_earlier_places(exercises):
    weights = np.zeros((5, 2, 5))
    weights[:, :, 0] = 1
    weights[4, 0], weights[4, 1] = [0.1, 0.3, 0.2, 0.25, 0.15], [1, 0, 0, 0, 0]
    # token 9 stands at 0, 2 and 4. At 2 it has stood at 0, whose next is 1; at 4 also at 2, whose next is 3
    np.testing.assert_allclose(exercises.induction(weights, [9, 1, 9, 2, 9]), [(0 + 0.55) / 2, 0.0])


def test_induction_does_not_count_a_token_as_its_own_future(exercises):
    np.testing.assert_allclose(exercises.induction(looking(0, 1), [3, 3]), [0.0])
    np.testing.assert_allclose(exercises.induction(looking(0, 1, 2), [3, 3, 3]), [0.0])
    np.testing.assert_allclose(exercises.induction(looking(0, 1, 1), [3, 3, 3]), [1.0])
