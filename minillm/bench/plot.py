"""The roofline, drawn: what the machine can do at best, and where each row of a benchmark lies below it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from minillm.bench.benchmark import Benchmark
from minillm.bench.turns import Spread
from minillm.errors import RequestError

MARKERS = {"minillm": "o", "llama.cpp": "s", "transformers float32": "^", "transformers bfloat16": "v"}


def check_can_plot() -> None:
    """RequestError unless matplotlib is installed: better before minutes of measuring than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError('--plot needs matplotlib; run: pip install "minillm[plot]"')


def draw_roofline(benchmark: Benchmark, path: Path) -> None:
    """Write the picture to `path`; its suffix says as what (.png, .svg, .pdf).

    Every engine is charged for the operations and bytes that minillm needs for the same row, so that higher is
    faster. All axes are logarithmic.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # files only: no window, no state shared with anybody's pyplot
    axes = figure.add_subplot(xscale="log", yscale="log")
    measured = [result for result in benchmark.results if result.work is not None and result.turns.amounts]
    intensities = [result.work.intensity for result in measured] or [1.0]
    roofline = benchmark.machine.roofline
    ridge = roofline.peak / roofline.bandwidth
    reach = np.geomspace(min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 4, 200)
    axes.plot(reach, [roofline.attainable(x) / 1e9 for x in reach], color="black", label="the machine's limit")
    for engine in benchmark.versions:
        rows = [result for result in measured if engine in result.turns.amounts]
        rates = [result.work.flops / Spread.of(result.turns.amounts[engine]).median / 1e9 for result in rows]
        axes.plot([result.work.intensity for result in rows], rates, MARKERS.get(engine, "d"), label=engine, alpha=0.8)
        if engine == "minillm":
            for result, rate in zip(rows, rates, strict=True):
                axes.annotate(
                    result.row.name,
                    (result.work.intensity, rate),
                    xytext=(5, -9),
                    textcoords="offset points",
                    fontsize=7,
                )
    axes.set_xlabel("operations for every byte read")
    axes.set_ylabel("GFLOP/s")
    machine = benchmark.machine
    axes.set_title(f"{benchmark.model.name} on {machine.cpu}, {machine.threads} threads", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)
