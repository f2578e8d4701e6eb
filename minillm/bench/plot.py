"""A benchmark as plots, side by side in one file, for the rows that were measured. See `minillm.view.plots`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minillm.bench.benchmark import Benchmark, RowResult
from minillm.bench.rows import Row
from minillm.bench.turns import Spread
from minillm.errors import RequestError, install_command
from minillm.model.kv_cache import DTYPES
from minillm.trace import RunMetrics
from minillm.trace.roofline import kv_bytes_per_token
from minillm.view import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = (6.5, 4.4)  # inches


def check_can_plot() -> None:
    """Raise RequestError if matplotlib is not installed. Called before the measurements, which take minutes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(f"--plot needs matplotlib; run: {install_command('plot')}")


def draw(benchmark: Benchmark, path: Path) -> None:
    """Write the plots to `path`; its suffix determines the format (.png, .svg, .pdf).

    The roofline counts for every engine the operations and bytes that minillm needs for the same row, so that a higher
    point is a faster engine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(_panels(benchmark))
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(2 * PANEL[0], rows * PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)  # writes files only: no window, no state shared with pyplot
    grid = figure.add_gridspec(rows, 2)
    is_odd = len(panels) % 2  # then the first panel takes a whole row
    for number, panel in enumerate(panels):
        place = number + is_odd if number else 0
        panel(figure.add_subplot(grid[0, :] if is_odd and not number else grid[place // 2, place % 2]))
    machine = benchmark.machine
    figure.suptitle(f"{benchmark.model.name} on {machine.cpu}, {machine.threads} threads", fontsize=9)
    figure.savefig(path, dpi=150)


def _panels(benchmark: Benchmark) -> Iterator[Callable[[Axes], None]]:
    """Yield functions that each draw one panel into an Axes."""
    points = _roofline_points(benchmark)
    yield lambda axes: plots.roofline(axes, benchmark.machine.roofline, points)
    if rates := _decode_rates(benchmark):
        yield lambda axes: plots.decode_rate(axes, rates, _decode_limit(benchmark, max(map(max, rates.values()))))
    yield lambda axes: _draw_kv_bytes(axes, benchmark)
    if runs := _runs(benchmark):
        for latency in plots.LATENCIES:
            yield partial(plots.latency_against_throughput, runs=runs, latency=latency)


def _median(result: RowResult, engine: str) -> float:
    return Spread.of(result.turns.amounts[engine]).median


def _roofline_points(benchmark: Benchmark) -> dict[str, dict[str, tuple[float, float]]]:
    """Return operations per byte and operations per second, by engine and row."""
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for engine in benchmark.versions:
        for result in benchmark.results:
            if result.work is not None and engine in result.turns.amounts:
                point = result.work.intensity, result.work.flops / _median(result, engine)
                points.setdefault(engine, {})[result.row.name] = point
    return points


def _decode_rates(benchmark: Benchmark) -> dict[str, dict[int, float]]:
    """Return tokens per second by engine and batch size, for the engines that were measured."""
    rates: dict[str, dict[int, float]] = {}
    for result in sorted(benchmark.results, key=lambda result: result.row.size):
        if result.row.group == "batch":
            for engine in result.turns.amounts:
                rates.setdefault(engine, {})[result.row.size] = result.row.tokens / _median(result, engine)
    return rates


def _decode_limit(benchmark: Benchmark, max_size: int) -> dict[int, float]:
    """Return the highest possible tokens per second by batch size."""
    roofline = benchmark.machine.roofline
    works = {
        size: Row("batch", size).work(benchmark.config, benchmark.weight_bytes, benchmark.kv_bytes_per_token)
        for size in range(1, max_size + 1)
    }
    return {size: size / roofline.seconds(work) for size, work in works.items() if work is not None}


def _draw_kv_bytes(axes: Axes, benchmark: Benchmark) -> None:
    sizes = {dtype: kv_bytes_per_token(benchmark.config, np.dtype(dtype).itemsize) for dtype in DTYPES}
    weights = benchmark.weight_bytes
    levels = {f"the weights, {weights / 1e6:,.0f} MB": weights}
    plots.kv_bytes(axes, sizes, levels, (16, benchmark.config.context_length))


def _runs(benchmark: Benchmark) -> dict[str, dict[int, RunMetrics]]:
    """Return the typical run by policy and number of clients."""
    runs: dict[str, dict[int, RunMetrics]] = {}
    for result in sorted(benchmark.results, key=lambda result: result.row.size):
        if run := result.typical_run:
            runs.setdefault(result.row.policy, {})[result.row.size] = run
    return runs
