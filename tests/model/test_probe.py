"""Probes: the names and shapes of their arrays, and that probing or writing to the arrays changes no result."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from support.builders import random_llama, write_gguf

from minillm import LLM, EngineConfig, RequestError, SamplingParams
from minillm.model import probe as probing
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache
from minillm.model.probe import difference, first_difference, induction, previous_token

CONFIG = EngineConfig(block_size=4, num_blocks=16, max_batch_tokens=8)


@pytest.fixture(scope="module", params=["numba", "numpy"])
def llm(request, tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("probe") / "model.gguf", random_llama(), "Q8_0")
    return LLM(path, backend=request.param, engine=CONFIG)


def documented(config):
    """Return the table of the module's docstring as names and shapes, with one entry per layer for layers.N."""
    rows = re.findall(r"^    ([a-zN._]+(?:\.\w+)*) +\[(.+?)\]", probing.__doc__, flags=re.MULTILINE)
    of_layers = [row for row in rows if row[0].startswith("layers.N")]
    first, last = rows.index(of_layers[0]), rows.index(of_layers[-1])
    layers = [(name.replace("N", str(n)), shape) for n in range(config.num_layers) for name, shape in of_layers]
    return {name: shape.split(", ") for name, shape in [*rows[:first], *layers, *rows[last + 1 :]]}


def batch_of(config, lengths, starts, seed=0):
    """Return chunks of earlier positions, and chunks that continue them. The blocks of the sequences interleave."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (len(lengths), 40)).tolist()
    tables = [list(range(row, 12 * len(lengths), len(lengths))) for row in range(len(lengths))]
    rows = list(zip(tokens, lengths, starts, tables, strict=True))
    chunks = [Chunk(ids[start : start + length], start, [table]) for ids, length, start, table in rows]
    return [Chunk(ids[:start], 0, [table]) for ids, _, start, table in rows if start], chunks


cases = {
    "lengths": st.lists(st.integers(1, 12), min_size=1, max_size=4),
    "starts": st.lists(st.integers(0, 25), min_size=4, max_size=4),
    "dtype": st.sampled_from(["float32", "float16"]),
    "every_token": st.booleans(),
}


def forward(llm, case, probe=None):
    """Return logits, cache and batch. Only the pass over the batch is probed, not those over earlier positions."""
    earlier, chunks = batch_of(llm.config, case["lengths"], case["starts"][: len(case["lengths"])])
    cache = KVCache(llm.config, 12 * len(chunks), 4, case["dtype"])
    for chunk in earlier:
        llm.transformer.forward(Batch.from_chunks([chunk], 4), cache)
    batch = Batch.from_chunks(chunks, 4)
    options = {} if probe is None else {"probe": probe}
    return llm.transformer.forward(batch, cache, every_token=case["every_token"], **options), cache, batch


@settings(max_examples=25)
@given(**cases)
def test_probing_changes_no_bit_and_probed_arrays_are_copies(llm, **case):
    expected, cache, _ = forward(llm, case)
    arrays, copies = {}, {}

    def keep(name, value):
        """Keep each array and a copy of it."""
        assert name not in arrays
        arrays[name], copies[name] = value, value.copy()

    def overwrite(name, value):
        value[...] = np.nan

    for probe in (keep, overwrite):
        logits, probed_cache, _ = forward(llm, case, probe)
        np.testing.assert_array_equal(logits, expected)
        np.testing.assert_array_equal(probed_cache.keys, cache.keys)
        np.testing.assert_array_equal(probed_cache.values, cache.values)
    forward(llm, case)
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, copies[name], name)
    np.testing.assert_array_equal(arrays["logits"], expected)


@settings(max_examples=25)
@given(**cases)
def test_names_and_shapes_are_as_documented_and_weights_sum_to_1(llm, **case):
    arrays = {}
    _, _, batch = forward(llm, case, arrays.__setitem__)
    c = llm.config
    sizes = {
        "T": batch.num_tokens, "D": c.hidden_size, "H": c.num_heads, "G": c.num_kv_heads, "K": c.head_dim,
        "F": c.intermediate_size, "M": batch.positions.max() + 1, "V": c.vocab_size,
        "S": batch.num_tokens if case["every_token"] else batch.num_sequences,
    }  # fmt: skip
    documents = documented(c)
    assert list(arrays) == list(documents)
    for name, letters in documents.items():
        assert arrays[name].shape == tuple(sizes[letter] for letter in letters), name
        assert arrays[name].dtype == np.float32
    visible = np.arange(sizes["M"]) <= batch.positions[:, None, None]
    for index in range(c.num_layers):
        scores, weights = (arrays[f"layers.{index}.attention.{part}"] for part in ("scores", "weights"))
        np.testing.assert_array_equal(np.isfinite(scores), np.broadcast_to(visible, scores.shape))
        assert not weights[~np.isfinite(scores)].any()
        np.testing.assert_allclose(weights.sum(axis=2), 1, atol=1e-5)
    stream = arrays["embedding"]
    for index in range(c.num_layers):
        stream = stream + arrays[f"layers.{index}.attention.output"] + arrays[f"layers.{index}.mlp.output"]
        np.testing.assert_allclose(stream, arrays[f"layers.{index}"], rtol=1e-4, atol=1e-5)


def test_probed_weights_reproduce_the_output_of_attention(llm):
    """The probed weights times the cached values equal the output of the backend's attention."""
    case, arrays = {"lengths": [3, 1, 7], "starts": [0, 17, 5], "dtype": "float32", "every_token": False}, {}
    _, cache, batch = forward(llm, case, arrays.__setitem__)
    for index in range(llm.config.num_layers):
        weights, gathered = (arrays[f"layers.{index}.attention.{part}"] for part in ("weights", "gathered"))
        for row, table in enumerate(batch.block_tables[0]):
            values = cache.values[table, index].transpose(1, 0, 2, 3).reshape(llm.config.num_kv_heads, -1, 16)
            values = values.repeat(2, axis=0)[:, : weights.shape[2]]  # two query heads share one
            for t in range(batch.query_starts[row], batch.query_starts[row + 1]):
                np.testing.assert_allclose(np.einsum("hm,hmk->hk", weights[t], values), gathered[t], atol=1e-5)


def test_scores_are_not_computed_without_a_probe(llm, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("attention_scores was called")

    monkeypatch.setattr(llm.ops, "attention_scores", refuse)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    llm.logits([1, 2, 3])
    with pytest.raises(AssertionError, match="attention_scores was called"):
        llm.probe([1, 2, 3])


def test_llm_probe_shows_the_pass_of_llm_logits(llm):
    arrays = llm.probe([5, 6, 7])
    np.testing.assert_array_equal(arrays["logits"], llm.logits([5, 6, 7]))
    assert list(arrays) == list(documented(llm.config))
    assert list(llm.probe([5, 6, 7], "*.weights")) == [f"layers.{n}.attention.weights" for n in range(2)]
    assert llm.engine.scheduler.blocks.num_held == 0
    with pytest.raises(RequestError, match="129 tokens do not fit the context of"):
        llm.probe([1] * 129)


def test_an_engine_probes_its_steps_while_a_probe_is_set(llm):
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)
    (expected,) = llm.generate([[1, 2, 3]], params)
    shapes = []
    llm.engine.probe = lambda name, value: shapes.append(value.shape) if name == "logits" else None
    (probed,) = llm.generate([[1, 2, 3]], params)
    llm.engine.probe = probing.no_probe
    llm.generate([[1, 2, 3]], params)
    assert probed.token_ids == expected.token_ids
    assert shapes == [(1, 288)] * 6


# --- the first difference between two passes ---------------------------------------------------------------------

numbers = numpy_strategies.arrays(
    np.float32, (3, 4), elements=st.floats(-100, 100, width=32) | st.sampled_from([np.inf, -np.inf, np.nan])
)


@given(numbers)
def test_an_array_with_any_values_does_not_differ_from_itself(array):
    assert difference(array, array.copy()) == 0


@given(numbers, st.integers(0, 11), st.floats(-10, 10, width=32))
def test_the_difference_of_one_changed_number(array, index, change):
    changed = array.copy()
    changed.flat[index] += np.float32(change)
    old, new = array.flat[index], changed.flat[index]
    if old == new or (np.isnan(old) and np.isnan(new)):
        assert difference(changed, array) == 0
    else:
        max_magnitude = np.abs(array[np.isfinite(array)]).max(initial=0)
        expected = abs(float(new) - float(old)) / float(max_magnitude) if max_magnitude else np.inf
        assert difference(changed, array) == pytest.approx(expected)


def test_a_finite_number_differs_infinitely_from_nan_and_infinity():
    ones = np.ones(3, np.float32)
    for other in (np.nan, np.inf, -np.inf):
        changed = np.array([1, other, 1], np.float32)
        assert difference(ones, changed) == difference(changed, ones) == np.inf
    with pytest.raises(ValueError, match=r"shapes \[3\] and \[1, 3\]"):
        difference(ones, ones[None])


@given(st.integers(0, 5), st.sampled_from([0.0, 0.01, 0.5]))
def test_first_difference_is_the_first_beyond_the_tolerance(layer, tolerance):
    theirs = {f"layers.{n}": np.full((2, 2), 2, np.float32) for n in range(6)}
    ours = {name: value.copy() for name, value in theirs.items()}
    assert first_difference(ours, theirs, tolerance) is None
    for n in range(6):
        ours[f"layers.{n}"][0, 1] += 2.5 * tolerance + 1e-3 if n >= layer else tolerance
    assert first_difference(ours, theirs, tolerance) == f"layers.{layer}"
    ours[f"layers.{layer}"][0, 0] = np.nan
    assert first_difference(ours, theirs, tolerance) == f"layers.{layer}"


def test_passes_with_different_names_are_not_compared():
    a, b = np.zeros(1), np.zeros(1)
    with pytest.raises(ValueError, match="see 'b'"):
        first_difference({"a": a, "b": b}, {"a": a})
    with pytest.raises(ValueError, match="see 'their order'"):
        first_difference({"a": a, "b": b}, {"b": b, "a": a})


# --- patterns of attention heads ---------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_patterns_of_heads_are_means_of_their_weights(seed, ids):
    T = len(ids)
    weights = np.tril(np.random.default_rng(seed).random((T, T, 3)).transpose(2, 0, 1)).transpose(1, 0, 2)
    weights /= weights.sum(axis=2, keepdims=True)
    repeats = [[p for p in range(t - 1) if ids[p] == ids[t]] for t in range(T)]
    for head in range(3):
        before = [weights[t, head, t - 1] for t in range(1, T)]
        behind = [sum(weights[t, head, p + 1] for p in repeats[t]) for t in range(T) if repeats[t]]
        assert previous_token(weights)[head] == pytest.approx(np.mean(before) if before else 0)
        assert induction(weights, ids)[head] == pytest.approx(np.mean(behind) if behind else 0)
