"""Tests of the exercises of lesson 3."""

import numpy as np
import pytest

random = np.random.default_rng(0)
JUST_BELOW_ONE = np.nextafter(1.0, 0.0)

# log_softmax


def test_log_softmax_returns_logarithms_of_probabilities(exercises):
    scores = random.standard_normal(50) * 3
    logs = exercises.log_softmax(scores)
    assert np.exp(logs).sum() == pytest.approx(1)
    np.testing.assert_allclose(logs[1:] - logs[:-1], scores[1:] - scores[:-1])
    np.testing.assert_allclose(exercises.log_softmax(np.log([0.5, 0.25, 0.25])), np.log([0.5, 0.25, 0.25]))


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0, 1e6])
def test_log_softmax_is_unchanged_by_a_constant_shift(exercises, shift):
    scores = np.array([0.0, 1.0, 3.0])
    np.testing.assert_allclose(exercises.log_softmax(scores + shift), exercises.log_softmax(scores), atol=1e-9)


@pytest.mark.filterwarnings("error")
def test_log_softmax_is_finite_where_the_probability_underflows(exercises):
    np.testing.assert_allclose(exercises.log_softmax(np.array([0.0, -2000.0])), [0, -2000])
    assert exercises.log_softmax(np.array([5.0, -np.inf])).tolist() == [0, -np.inf]


# keep_top_p

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])  # most likely first: 1, 3, 4, 0, 2


def kept_by(exercises, p, probabilities=PROBABILITIES):
    return np.flatnonzero(np.isfinite(exercises.keep_top_p(np.log(probabilities), p))).tolist()


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (0.01, [1]),  # always at least one
        (0.39, [1]),
        (0.41, [1, 3]),  # the token that crosses the threshold is kept
        (0.69, [1, 3]),
        (0.71, [1, 3, 4]),
        (0.94, [0, 1, 3, 4]),
        (0.96, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_keep_top_p_keeps_the_fewest_tokens_that_reach_p(exercises, p, kept):
    assert kept_by(exercises, p) == kept


def test_keep_top_p_stops_when_p_is_reached_exactly(exercises):
    assert kept_by(exercises, 0.5, np.array([0.25, 0.25, 0.25, 0.25])) == [0, 1]


def test_keep_top_p_changes_neither_kept_scores_nor_its_argument(exercises):
    scores = np.log(PROBABILITIES) + 700  # scores need not be logarithms of probabilities
    before = scores.copy()
    after = exercises.keep_top_p(scores, 0.5)
    np.testing.assert_array_equal(scores, before)
    np.testing.assert_array_equal(after, np.where([False, True, False, True, False], before, -np.inf))


def test_keep_top_p_counts_only_tokens_kept_by_earlier_cuts(exercises):
    scores = np.log(PROBABILITIES)
    scores[1] = -np.inf  # 0.6 remains, and 0.3 is half of it
    assert np.flatnonzero(np.isfinite(exercises.keep_top_p(scores, 0.49))).tolist() == [3]


# draw


@pytest.mark.parametrize(
    ("point", "token"),
    [(0.0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 2), (0.75, 2), (JUST_BELOW_ONE, 2)],
)
def test_draw_returns_the_token_whose_interval_contains_the_point(exercises, point, token):
    assert exercises.draw(np.array([0.25, 0.25, 0.5]), point) == token


@pytest.mark.parametrize("point", [0.0, 0.3, 0.5, 0.9, JUST_BELOW_ONE])
def test_draw_never_returns_a_token_of_probability_zero(exercises, point):
    assert exercises.draw(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), point) in (1, 3)


def test_draw_returns_a_possible_token_when_the_sum_is_below_one(exercises):
    tenths = np.full(10, 0.1)
    assert tenths.cumsum()[-1] < 1
    assert exercises.draw(tenths, JUST_BELOW_ONE) == 9
    thousands = np.append(np.full(49_151, np.float32(1 / 49_152)), np.float32(0))
    assert exercises.draw(thousands, JUST_BELOW_ONE) < 49_151


def test_draw_returns_each_token_with_its_probability(exercises):
    points = (np.arange(10_000) + 0.5) / 10_000
    drawn = [exercises.draw(PROBABILITIES, point) for point in points]
    np.testing.assert_allclose([drawn.count(token) for token in range(5)], PROBABILITIES * 10_000, atol=1)
