"""Plots: the drawn points equal the given numbers, and series differ in more than their colours."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minillm.trace import RunMetrics
from minillm.trace.roofline import Roofline
from minillm.view import plots

positive = st.floats(1e-3, 1e6)
names = st.sampled_from(["static", "continuous", "chunked", "minillm", "llama.cpp"])
times = st.none() | st.floats(1e-4, 1e3)
runs_of = st.builds(
    RunMetrics,
    **dict.fromkeys(("seconds", "throughput"), positive),
    **dict.fromkeys(("median_ttft", "p95_ttft", "median_tpot", "p95_tpot"), times),
)


def by_name(values, max_size=3):
    return st.dictionaries(names, values, min_size=1, max_size=max_size)


def by_size(values):
    return st.dictionaries(st.integers(1, 64), values, min_size=1, max_size=4).map(lambda d: dict(sorted(d.items())))


def drawn(axes):
    """The points of each non-empty line."""
    lines = [[tuple(map(float, point)) for point in line.get_xydata()] for line in axes.lines]
    return [line for line in lines if line]


def new_axes():
    return Figure(layout="constrained").add_subplot()


def texts(axes):
    return [text.get_text() for text in axes.texts]


@settings(max_examples=15)
@given(runs=by_name(by_size(runs_of)), latency=st.sampled_from(list(plots.LATENCIES)))
def test_latency_against_throughput(runs, latency):
    plots.latency_against_throughput(axes := new_axes(), runs, latency)
    expected = []
    for by_load in runs.values():
        for quantile in ("median", "p95"):
            values = {load: getattr(run, f"{quantile}_{latency}") for load, run in by_load.items()}
            expected.append(
                [(by_load[load].throughput, 1000 * value) for load, value in values.items() if value is not None]
            )
    assert drawn(axes) == [points for points in expected if points]
    for policy, by_load in runs.items():
        loads = [load for load, run in by_load.items() if getattr(run, f"median_{latency}") is not None]
        if loads:
            assert f"{max(loads)}, {policy}" in texts(axes)
    check_distinct(
        [line for line in axes.lines if not line.get_label().startswith(("median", "95th"))][::2], "get_marker"
    )


@settings(max_examples=15)
@given(rates=by_name(by_size(positive)), limit=by_size(positive))
def test_decode_rate(rates, limit):
    plots.decode_rate(axes := new_axes(), rates, limit)
    assert drawn(axes) == [list(limit.items()), *(list(by_batch.items()) for by_batch in rates.values())]
    assert set(texts(axes)) == {"at best", *rates}
    check_distinct(axes.lines[1:], "get_marker", "get_linestyle")


@settings(max_examples=15)
@given(sizes=by_name(positive), levels=st.dictionaries(st.sampled_from(["the weights", "memory"]), positive))
def test_kv_bytes(sizes, levels):
    plots.kv_bytes(axes := new_axes(), sizes, levels, (10, 1000))
    assert drawn(axes)[: len(sizes)] == [[(10, 10 * size), (1000, 1000 * size)] for size in sizes.values()]
    assert [line.get_ydata()[0] for line in axes.lines[len(sizes) :]] == list(levels.values())
    assert set(texts(axes)) == {*sizes, *levels}
    check_distinct(axes.lines[: len(sizes)], "get_linestyle")


@settings(max_examples=15)
@given(
    points=by_name(st.dictionaries(st.sampled_from(["decode-64", "batch-4"]), st.tuples(positive, positive))),
    roof=st.builds(Roofline, st.floats(1e9, 1e12), st.floats(1e9, 1e12)),
)
def test_roofline(points, roof):
    plots.roofline(axes := new_axes(), roof, points)
    limit, *engines = axes.lines
    for x, y in limit.get_xydata():
        assert y == pytest.approx(roof.attainable(x) / 1e9)
    for line, by_measurement in zip(engines, points.values(), strict=True):
        assert [tuple(point) for point in line.get_xydata()] == [(x, y / 1e9) for x, y in by_measurement.values()]
    assert sorted(texts(axes)) == sorted(next(iter(points.values())))
    check_distinct(engines, "get_marker")


def check_distinct(lines, *features):
    """The lines differ in colour and in each of these features."""
    for feature in ("get_color", *features):
        assert len({str(getattr(line, feature)()) for line in lines}) == len(lines)


@given(heights=st.lists(positive, min_size=2, max_size=5))
@settings(max_examples=15)
def test_labels_at_the_ends_do_not_overlap(heights):
    rates = {f"engine {n}": {1: height, 2: height} for n, height in enumerate(heights)}
    plots.decode_rate(axes := new_axes(), rates, {})
    positions = sorted(text.get_position()[1] for text in axes.texts)
    assert all(after - before > 0.99 * plots.LINE_HEIGHT for before, after in pairwise(positions))


def test_importing_it_needs_no_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import minillm.view.plots, minillm.bench.plot"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
