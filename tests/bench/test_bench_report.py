"""A whole benchmark with fake engines: its results, tables, JSON and plots. No test depends on speed."""

import io
import json
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console
from support.bench_engines import CONFIG, FAKE_ENGINE, engine_file

from minillm.bench import Settings, run_benchmark
from minillm.bench.benchmark import Benchmark, RowResult
from minillm.bench.machine import Machine
from minillm.bench.peers import FLOAT32, EngineSpec
from minillm.bench.plot import draw
from minillm.bench.report import build_table, conditions, footnotes, show, to_json
from minillm.bench.rows import FRESH, QUICK, Row
from minillm.bench.turns import Turns
from minillm.trace import RunMetrics
from minillm.trace.roofline import Work


@pytest.fixture(scope="module")
def fake_peers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    crashing = FAKE_ENGINE.replace("assert len(tokens)", "import os; os._exit(3)  # ")
    return [
        EngineSpec("peer", engine_file(folder, FAKE_ENGINE, "peer.py")),
        EngineSpec("crasher", engine_file(folder, crashing, "crasher.py")),
        EngineSpec("absent", engine_file(folder, "import no_such_package", "absent.py"), "no-such-package"),
    ]


@pytest.fixture(scope="module")
def benchmark(tiny_gguf, fake_peers):
    rows = [*QUICK, "prefill-4096"]
    settings = Settings(model=str(tiny_gguf), threads=1, rows=rows, peers=True, quick=True)
    return run_benchmark(settings, announce=lambda line: None, peers=fake_peers)


def result_of(benchmark, name):
    return next(result for result in benchmark.results if result.row.name == name)


def test_every_row_is_measured_skipped_or_reported_as_failed(benchmark):
    assert [result.row.name for result in benchmark.results] == [*QUICK, "prefill-4096"]
    assert set(benchmark.versions) == {"minillm", "peer", "crasher"}
    assert set(benchmark.not_measured) == {"absent"}
    assert "no-such-package" in benchmark.not_measured["absent"]
    assert "4096 positions" in result_of(benchmark, "prefill-4096").skipped
    for name in "decode-64", "batch-4", *FRESH:  # rows of fresh processes also decode, to measure their memory
        turns = result_of(benchmark, name).turns
        assert set(turns.failures) == {"crasher"}, turns.failures
        assert set(turns.ratios) == {"peer"}
    prefill = result_of(benchmark, "prefill-32").turns
    assert not prefill.failures
    assert prefill.amounts["peer"] == [16.0]
    assert prefill.ratios["peer"][0] in [16.0 / ours for ours in prefill.amounts["minillm"]]


def test_minillm_agrees_with_the_oracle_which_is_also_measured(tiny_gguf, fake_peers):
    rows = ["prefill-8", "decode-9", "batch-2", "exactness"]
    settings = Settings(model=str(tiny_gguf), threads=1, rows=rows, peers=True, quick=True)
    benchmark = run_benchmark(settings, announce=lambda line: None, peers=[*fake_peers[:2], FLOAT32])
    for name in rows[:3]:
        assert FLOAT32.name in result_of(benchmark, name).turns.ratios
    turns = result_of(benchmark, "exactness").turns
    assert turns.amounts["minillm"][0] < 1e-3
    assert set(turns.failures) == {"peer", "crasher"}  # their logits have another shape


def test_the_json_holds_every_row(benchmark):
    report = json.loads(json.dumps(to_json(benchmark)))
    assert [row["name"] for row in report["rows"]] == [*QUICK, "prefill-4096"]
    rows = {row["name"]: row for row in report["rows"]}
    assert report["model"]["weight_bytes"] == benchmark.weight_bytes
    decode = rows["decode-64"]
    assert decode["limit"]["bytes"] == benchmark.weight_bytes + 65 * benchmark.kv_bytes_per_token
    seconds = decode["amounts"]["minillm"]["median"]
    assert decode["limit"]["memory_share"] == pytest.approx(
        decode["limit"]["bytes"] / report["machine"]["bandwidth"]["high"] / seconds
    )
    assert rows["batch-4"]["amounts"]["peer"]["tokens_per_second"] == 4 / 0.25
    assert "limit" not in rows["load"]
    assert rows["prefill-4096"]["amounts"] == {}


def test_the_table_shows_every_row_and_engine(benchmark):
    page = io.StringIO()
    show(benchmark, Console(file=page))
    text = page.getvalue()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].split("|")][2:5] == ["minillm", "of the limit", "peer"]
    assert len(lines) == 2 + len(benchmark.results)
    for result in benchmark.results:
        assert result.row.title in text
    for line in conditions(benchmark) + footnotes(benchmark):
        assert line in text
    assert "crasher: the engine's process ended with status 3" in text
    assert build_table(benchmark, plain=False).row_count == len(benchmark.results)


def test_a_plot_is_written(benchmark, tmp_path):
    draw(benchmark, tmp_path / "plots.png")
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_the_panels_for_which_there_are_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text, not as outlines
    titles = ["Roofline of", "Decode rate", "Size of the KV cache", "Time per output token", "Time to first token"]
    work = Work(10**9, 10**9)
    results = {
        "none": [],
        "batch": [RowResult(Row("batch", 4), Turns({"minillm": [1.0]}), work)],
        "serve": [RowResult(Row("serve", 4, "chunked"), runs=[run_of(n) for n in (3, 1, 2)])],
    }
    for names, expected in (("none", (0, 2)), ("batch", (0, 1, 2)), ("serve", (0, 2, 3, 4)), ("batch serve", range(5))):
        rows = [result for name in names.split() for result in results[name]]
        machine = Machine("chip", 4, 2, "system", {}, 0.0, [1e9], [5e9])
        draw(Benchmark(machine, Path("m.gguf"), 10, 10, 1, 3, {"minillm": ""}, {}, rows, CONFIG), tmp_path / "p.svg")
        drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
        assert [number for number, title in enumerate(titles) if f">{title}" in drawn] == list(expected)
    assert results["serve"][0].typical_run.seconds == 2


def run_of(seconds):
    """Return the metrics of a run that takes `seconds`. Only the times matter."""
    return RunMetrics(1, 1, 1, seconds, 1, 1, 1 / seconds, *[0] * 8, *(seconds / part for part in (4, 3, 2, 1)))


def test_the_report_warns_of_a_busy_machine_and_shows_the_spread_of_ratios():
    busy = Machine("chip", 4, 2, "system", {}, 3.0, [1e9, 2e9], [5e9])
    turns = Turns({"minillm": [1.0, 1.0, 1.0], "peer": [2.0, 3.0, 2.5]}, {"peer": [2.0, 3.0, 2.5]})
    result = RowResult(Row("prefill", 10), turns, Work(10**9, 10**9))
    benchmark = Benchmark(busy, Path("m.gguf"), 10, 10, 1, 3, {"minillm": "", "peer": ""}, {}, [result], CONFIG)
    page = io.StringIO()
    show(benchmark, Console(file=page))
    for text in "WARNING", "2.50 (2.00 to 3.00)", "50% of memory", "10.0 tokens/s", "4.0 tokens/s":
        assert text in page.getvalue()
    busy.load_average = 0.1
    assert not [line for line in conditions(benchmark) if "WARNING" in line]
