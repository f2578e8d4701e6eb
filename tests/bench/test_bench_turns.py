"""The turns that engines take, and the spread of their amounts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import BenchmarkError
from minillm.bench.turns import Spread, take_turns


@given(
    ours=st.floats(0.001, 10),
    peers=st.lists(st.floats(0.001, 10), max_size=3),
    slowdowns=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
)
def test_a_machine_that_slows_down_between_rounds_changes_no_ratio(ours, peers, slowdowns):
    speeds = {"ours": ours} | {f"peer {n}": amount for n, amount in enumerate(peers)}
    calls = []

    def turn(name):
        calls.append(name)
        turns_per_round = 2 * len(peers) if peers else 1
        return speeds[name] * slowdowns[(len(calls) - 1) // turns_per_round]

    turns = take_turns("ours", {name: lambda name=name: turn(name) for name in speeds}, len(slowdowns))
    order = [name for peer in list(speeds)[1:] for name in ("ours", peer)] or ["ours"]
    assert calls == order * len(slowdowns)
    for peer, ratios in turns.ratios.items():
        assert ratios == pytest.approx([speeds[peer] / ours] * len(slowdowns))
    assert set(turns.ratios) == set(list(speeds)[1:])


@given(fails_at=st.integers(0, 4), failing_name=st.sampled_from(["ours", "good", "bad"]))
def test_an_engine_that_fails_is_dropped_and_the_others_continue(fails_at, failing_name):
    turn = itertools.count()

    def failing():
        if next(turn) >= fails_at:
            raise BenchmarkError("it broke")
        return 1.0

    measures = {name: failing if name == failing_name else lambda: 2.0 for name in ("ours", "good", "bad")}
    turns = take_turns("ours", measures, 5)
    assert turns.failures == {failing_name: "it broke"}
    assert set(turns.amounts) == set(measures) - {failing_name}
    assert set(turns.ratios) == (set() if failing_name == "ours" else {"good", "bad"} - {failing_name})


@given(values=st.lists(st.floats(0.001, 1e6), min_size=1))
def test_a_spread_is_minimum_median_and_maximum(values):
    spread = Spread.of(values)
    assert spread.low == min(values)
    assert spread.high == max(values)
    assert spread.median == pytest.approx(float(np.median(values)))
