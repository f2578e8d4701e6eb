"""Sampling against the logits processors of transformers, and draws against their probabilities."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from minillm import NumericError, RequestError, SamplingParams
from minillm.engine.sampling import (
    apply_temperature,
    candidates,
    distribution,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_softmax,
    penalize_repeats,
    sample,
    softmax,
    uniform,
)

vocabularies = st.integers(2, 200)
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed, size):
    return (np.random.default_rng(seed).standard_normal(size) * 4).astype(np.float32)


def transformers_distribution(logits, params):
    scores = torch.tensor(logits).double()[None]
    ids = torch.zeros((1, 0), dtype=torch.long)
    steps = [logits_process.TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k:
        steps.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(logits_process.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(ids, scores)
    return torch.softmax(scores, -1)[0].numpy()


@given(
    seed=seeds,
    size=vocabularies,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
)
def test_the_distribution_equals_that_of_transformers(seed, size, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed, size)
    expected = transformers_distribution(logits, params)
    np.testing.assert_allclose(distribution(logits.astype(np.float64), params), expected, atol=1e-12)


def candidates_by_sorting(scores, params):
    """Return what `candidates` should: sort all tokens by score, then by id, and apply each cut to the sorted list."""
    scores = apply_temperature(scores, params.temperature)
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if 0 < params.top_k < len(order):
        order = [token_id for token_id in order if scores[token_id] >= scores[order[params.top_k - 1]]]
    if params.top_p < 1:
        ids = sorted(order)
        probability = dict(zip(ids, softmax(scores[ids]), strict=True))
        kept, total = [], 0.0
        for token_id in order:
            if total < params.top_p:
                kept.append(token_id)
            total += probability[token_id]
        order = kept
    if params.min_p:
        order = [token_id for token_id in order if scores[token_id] >= scores[order[0]] + math.log(params.min_p)]
    return sorted(order), scores[sorted(order)]


@given(
    seed=seeds,
    size=st.sampled_from([1, 2, 30, 3000]),
    spread=st.sampled_from([0.1, 1, 5]),
    levels=st.sampled_from([0.25, 3, 1000]),
    temperature=st.sampled_from([1e-300, 0.5, 1.0, 3.0, 1e308]),
    top_k=st.sampled_from([0, 1, 2, 17, 2999, 3000]),
    top_p=st.sampled_from([1.0, 1 - 1e-15, 1 - 1e-10, 0.999, 0.9, 0.75, 0.5, 0.1, 5e-324]),
    min_p=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
)
@settings(max_examples=400)
def test_candidates_equal_those_found_by_sorting(seed, size, spread, levels, temperature, top_k, top_p, min_p):
    """They are equal exactly, whether scores are all different or, rounded to a few levels, have hundreds of ties."""
    scores = np.round(np.random.default_rng(seed).standard_normal(size) * spread * levels) / levels
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected_ids, expected_scores = candidates_by_sorting(scores, params)
    token_ids, kept = candidates(scores, params)
    live = kept > -np.inf  # at a temperature of 1e-300, all but the best are -inf; without a cut they remain
    expected_live = expected_scores > -np.inf
    assert token_ids[live].tolist() == np.array(expected_ids)[expected_live].tolist()
    np.testing.assert_array_equal(kept[live], expected_scores[expected_live])
    assert sample(scores, params, seed, 0).token_id == expected_ids[draw(softmax(expected_scores), uniform(seed, 0))]


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_top_p_keeps_the_lowest_ids_of_equal_scores(p):
    kept = np.isfinite(keep_top_p(np.zeros(49_152), p))
    count = kept.sum()
    assert kept[:count].all()
    assert count == pytest.approx(p * 49_152, abs=1)


def test_ties_and_exact_sums():
    """Tokens that tie with the k-th best are kept. The token that reaches p is the last one kept."""
    tied = np.array([1.0, 1.0, 1.0, 0.0])
    assert np.isfinite(keep_top_k(tied, 2)).tolist() == [True, True, True, False]
    exact = np.log([0.25, 0.5, 0.125, 0.125])
    assert np.isfinite(keep_top_p(exact, 0.5)).tolist() == [False, True, False, False]
    assert np.isfinite(keep_top_p(exact, 0.75)).tolist() == [True, True, False, False]
    assert np.isfinite(keep_min_p(exact, 0.5)).tolist() == [True, True, False, False]


@given(seed=seeds, size=vocabularies, penalty=st.floats(0.1, 5), context=st.lists(st.integers(0, 199)))
def test_the_repetition_penalty_equals_that_of_transformers(seed, size, penalty, context):
    logits, context = random_logits(seed, size), [token % size for token in context]
    step = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    expected = step(torch.tensor([context], dtype=torch.long), torch.tensor(logits).double()[None])[0]
    found = penalize_repeats(logits.astype(np.float64), penalty, context)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


@given(seed=seeds, size=vocabularies, temperature=st.sampled_from([0, 1e-300]))
def test_greedy_and_nearly_greedy_take_the_best_token(seed, size, temperature):
    logits = random_logits(seed, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = sample(logits, SamplingParams(temperature=temperature, logprobs=True), seed, 0)
    assert chosen.token_id == logits.argmax()
    expected = torch.log_softmax(torch.tensor(logits).double(), -1)[chosen.token_id].item()
    assert chosen.logprob == pytest.approx(expected, abs=1e-12)


@given(seed=seeds, size=vocabularies, index=st.integers(0, 10_000), temperature=st.floats(0.1, 3))
def test_a_draw_depends_on_seed_and_index_alone(seed, size, index, temperature):
    params = SamplingParams(temperature=temperature, seed=seed)
    logits = random_logits(seed, size)
    first = sample(logits, params, seed, index)
    for other in range(index % 7):
        sample(logits, params, seed, other)
    np.random.default_rng(0).random()
    assert sample(logits, params, seed, index) == first


def test_draws_are_as_frequent_as_their_probabilities():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    count = 20_000
    drawn = np.bincount([draw(probabilities, uniform(7, index)) for index in range(count)], minlength=6)
    assert drawn[1] == drawn[5] == 0
    # Four standard deviations. A correct sampler fails for one seed in 16,000, and this seed is fixed.
    spread = 4 * np.sqrt(count * probabilities * (1 - probabilities))
    assert (np.abs(drawn - count * probabilities) <= spread).all()


@given(
    weights=st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=50).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_never_returns_a_token_of_probability_zero(weights, uniform):
    weights = np.array(weights)
    assert weights[draw(weights, uniform)] > 0
    assert weights[draw(weights, math.nextafter(1, 0))] > 0


def test_streams_of_different_seeds_are_uncorrelated():
    streams = np.array([[uniform(seed, index) for index in range(200)] for seed in range(20)])
    correlations = np.corrcoef(streams) - np.eye(20)
    assert np.abs(correlations).max() < 0.3
    assert len(np.unique(streams)) == streams.size


@given(seed=seeds, size=vocabularies)
def test_log_softmax(seed, size):
    logits = random_logits(seed, size) * 100
    expected = torch.log_softmax(torch.tensor(logits).double(), -1)
    np.testing.assert_allclose(log_softmax(logits.astype(np.float64)), expected, atol=1e-10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error(bad, temperature):
    logits = random_logits(0, 10)
    logits[3] = bad
    with pytest.raises(NumericError, match="NaN or infinity"):
        sample(logits, SamplingParams(temperature=temperature), 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, 10**400, "hot", True, None)],
        *[("top_p", value) for value in (0, -0.5, 1.01, math.nan, "1")],
        *[("min_p", value) for value in (-0.1, 1.5, math.nan, None)],
        *[("repetition_penalty", value) for value in (0, -1, math.nan, math.inf)],
        *[("top_k", value) for value in (-1, 2.5, math.nan, True)],
        *[("max_tokens", value) for value in (0, -1, 1.5, None, "many")],
        *[("seed", value) for value in (-1, 2**64, 1.5, "lucky")],
        *[("stop", value) for value in ("", ["a", ""], [1], 5)],
        *[("stop_token_ids", value) for value in ([-1], ["x"], [1.5], 3)],
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@given(
    seed=seeds,
    size=vocabularies,
    temperature=st.sampled_from([0, 5e-324, 1e-300, 1.0, 1e308]),
    penalty=st.sampled_from([5e-324, 1e-308, 1.0, 1e308]),
    top_p=st.sampled_from([5e-324, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 1.0]),
    top_k=st.sampled_from([0, 1, 10**30]),
)
def test_extreme_parameters_still_choose_a_token(seed, size, temperature, penalty, top_p, min_p, top_k):
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, top_p=top_p, min_p=min_p, top_k=top_k, logprobs=True
    )
    for sign in (1, -1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chosen = sample(sign * np.abs(random_logits(seed, size)), params, seed, 3, range(size))
        assert 0 <= chosen.token_id < size
        assert chosen.logprob <= 0


def test_numbers_of_other_libraries_become_python_numbers():
    params = SamplingParams(top_k=np.uint8(5), max_tokens=np.int16(300), temperature=Fraction(1, 2), seed=np.uint64(7))
    assert [type(value) for value in (params.top_k, params.max_tokens, params.seed)] == [int] * 3
    assert (params.temperature, type(params.temperature)) == (0.5, float)


def test_parameters_at_their_limits_are_accepted():
    SamplingParams(temperature=0, top_p=1e-9, min_p=1, top_k=10**9, repetition_penalty=1e-3, seed=2**64 - 1)
    SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), stop="x")
    assert repr(SamplingParams(temperature=0.0, stop="a")) == "SamplingParams(temperature=0.0, stop=('a',))"


@pytest.mark.parametrize("name", ["ignore_eos", "logprobs", "skip_special_tokens"])
@pytest.mark.parametrize("value", [1, None, "yes", np.array([1, 2])])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(RequestError, match=f"{name} is .*; it must be True or False"):
        SamplingParams(**{name: value})
