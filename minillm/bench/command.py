"""`minillm bench`: measure, print the table, write files."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from minillm.bench.benchmark import Benchmark, Settings, run_benchmark
from minillm.bench.plot import check_can_plot, draw
from minillm.bench.report import show, to_json
from minillm.catalog import Report
from minillm.errors import RequestError


def run(settings: Settings, *, json_file: str | None = None, plot_file: str | None = None) -> Benchmark:
    """Run the benchmark, print its table, and write it as JSON and as plots if files are given.

    Raises
    ------
    RequestError
        A setting is out of range, or the folder of a file does not exist. This is checked before anything is measured.
    BenchmarkError
        See `run_benchmark`.
    """
    for file in filter(None, (json_file, plot_file)):
        if not Path(file).absolute().parent.is_dir():
            raise RequestError(f"{file}: the folder {Path(file).absolute().parent} does not exist; create it first")
    if plot_file:
        check_can_plot()
    benchmark = run_benchmark(settings, announce=Report().line)
    show(benchmark, Console())
    if json_file:
        Path(json_file).write_text(json.dumps(to_json(benchmark), indent=2) + "\n", encoding="utf-8")
    if plot_file:
        draw(benchmark, Path(plot_file))
    return benchmark
