"""The benchmark: its arithmetic, protocol and tables. That it measures is tested; how fast anything is, is not."""

import importlib.util
import io
import itertools
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.builders import random_llama, write_gguf

from minillm import BenchmarkError, RequestError, bench, cli
from minillm.bench import Settings, machine, peers, run_benchmark
from minillm.bench.benchmark import Benchmark, RowResult
from minillm.bench.client import NotInstalled, Worker
from minillm.bench.exactness import max_difference
from minillm.bench.machine import Machine
from minillm.bench.peers import FLOAT32, EngineSpec, stored_as
from minillm.bench.plot import draw
from minillm.bench.report import build_serving_table, build_table, conditions, footnotes, format_amount, show, to_json
from minillm.bench.rows import FRESH, NUM_REQUESTS, QUICK, SIZES, Row, choose_rows
from minillm.bench.serving import SimulatedEngine, serve_clients
from minillm.bench.turns import Spread, Turns, take_turns
from minillm.checkpoints import open_checkpoint
from minillm.engine import EngineConfig
from minillm.engine.scheduler import POLICIES
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.trace import RunMetrics, run_metrics
from minillm.trace.roofline import ModelCosts, Roofline, Work, decode_work, prefill_work, step_work

FAKE_ENGINE = """
import numpy as np

SHIFT = 0

class FakeEngine:
    def load(self, path, threads, **options):
        return {"version": f"fake with {threads}", "weight_bytes": 1000, "kv_bytes_per_token": 10}
    def prefill(self, tokens, repeats):
        return [0.5 * len(tokens)] * repeats
    def fill(self, prompts):
        assert len({len(prompt) for prompt in prompts}) == 1
        self.sequences = len(prompts)
    def decode(self, tokens, repeats):
        assert len(tokens) == self.sequences
        return [0.25] * repeats
    def logits(self, tokens, path):
        np.save(path, np.array([[token, 0.0] for token in tokens]) + SHIFT * len(tokens))
    def requantize(self, source, target, storage, threads):
        open(target, "w").write(storage)

ENGINE = FakeEngine
"""
CONFIG = ModelConfig("llama", 288, 64, 96, 2, 4, 2, 16, 128)
counts = st.integers(1, 200)


def engine_file(folder, text, name="engine.py"):
    file = Path(folder) / name
    file.write_text(text, encoding="utf-8")
    return file


# --- roofline ----------------------------------------------------------------------------------------------------


@given(num_tokens=counts)
def test_a_prefill_computes_what_its_tokens_would_one_by_one_but_for_their_scores(num_tokens):
    whole = prefill_work(CONFIG, 1000, 10, num_tokens)
    steps = [decode_work(CONFIG, 1000, 10, [context]) for context in range(num_tokens)]
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert whole.flops == sum(step.flops for step in steps) - (num_tokens - 1) * head
    assert whole.num_bytes == steps[-1].num_bytes


@given(contexts=st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_batch_shares_the_weights_and_nothing_else(contexts):
    together = decode_work(CONFIG, 1000, 10, contexts)
    alone = [decode_work(CONFIG, 1000, 10, [context]) for context in contexts]
    assert together.flops == sum(work.flops for work in alone)
    assert together.num_bytes == sum(work.num_bytes for work in alone) - 1000 * (len(contexts) - 1)


@given(num_tokens=counts, contexts=st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_step_of_one_kind_costs_what_that_kind_does(num_tokens, contexts):
    costs = ModelCosts.of(CONFIG, 1000, 10)
    assert step_work(costs, [(0, num_tokens)]) == prefill_work(CONFIG, 1000, 10, num_tokens)
    assert step_work(costs, [(context, 1) for context in contexts]) == decode_work(CONFIG, 1000, 10, contexts)


@given(pieces=st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_pieces_of_a_prompt_look_at_as_much_as_the_whole(pieces):
    costs = ModelCosts.of(CONFIG, 0, 10)
    starts = [sum(pieces[:n]) for n in range(len(pieces))]
    steps = [step_work(costs, [chunk]) for chunk in zip(starts, pieces, strict=True)]
    whole = prefill_work(CONFIG, 0, 10, sum(pieces))
    assert sum(step.flops for step in steps) == whole.flops + (len(pieces) - 1) * costs.head_flops
    assert steps[-1].num_bytes == whole.num_bytes


def test_operations_counted_by_hand():
    # A token: 2 operations for each weight of 2 layers and the head; and 4 for each of 4 heads x 16 numbers in 2 layers
    # and each of the 6 tokens that are looked at.
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96
    assert decode_work(CONFIG, 1000, 10, [5]) == Work(1000 + 6 * 10, 2 * (2 * layer + 288 * 64) + 4 * 2 * 4 * 16 * 6)


@given(work=st.builds(Work, counts, counts), bandwidth=st.floats(1, 1e12), peak=st.floats(1, 1e12))
def test_the_roof_is_the_lower_of_two(work, bandwidth, peak):
    roof = Roofline(bandwidth, peak)
    assert roof.seconds(work) == max(work.num_bytes / bandwidth, work.flops / peak)
    assert work.flops / roof.seconds(work) == pytest.approx(roof.attainable(work.intensity))
    assert (roof.bound(work) == "memory") == (work.num_bytes / bandwidth >= work.flops / peak)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_those_a_step_reads(tmp_path, tied):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "f32.gguf", random_llama(tie_word_embeddings=tied)))
    transformer = Transformer(checkpoint.config, lambda name: checkpoint.tensors[name].read(), backend("numpy"))
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in checkpoint.config.tensor_shapes().items()}
    assert transformer.weight_bytes == sum(sizes.values()) - (0 if tied else sizes["embedding.weight"])


# --- turns -------------------------------------------------------------------------------------------------------


@given(
    ours=st.floats(0.001, 10),
    theirs=st.lists(st.floats(0.001, 10), max_size=3),
    weather=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
)
def test_a_machine_that_slows_down_between_rounds_changes_no_ratio(ours, theirs, weather):
    speeds = {"ours": ours} | {f"peer {n}": amount for n, amount in enumerate(theirs)}
    calls = []

    def turn(name):
        calls.append(name)
        pace = 2 * max(1, len(theirs)) if theirs else 1  # turns in a round
        return speeds[name] * weather[(len(calls) - 1) // pace]

    turns = take_turns("ours", {name: lambda name=name: turn(name) for name in speeds}, len(weather))
    order = [name for peer in list(speeds)[1:] for name in ("ours", peer)] or ["ours"]
    assert calls == order * len(weather)
    for peer, ratios in turns.ratios.items():
        assert ratios == pytest.approx([speeds[peer] / ours] * len(weather))
    assert set(turns.ratios) == set(list(speeds)[1:])


@given(fails_at=st.integers(0, 4), who=st.sampled_from(["ours", "good", "bad"]))
def test_an_engine_that_fails_is_out_and_the_others_go_on(fails_at, who):
    turn = itertools.count()

    def failing():
        if next(turn) >= fails_at:
            raise BenchmarkError("it broke")
        return 1.0

    measures = {name: failing if name == who else lambda: 2.0 for name in ("ours", "good", "bad")}
    turns = take_turns("ours", measures, 5)
    assert turns.failures == {who: "it broke"}
    assert set(turns.amounts) == set(measures) - {who}
    assert set(turns.ratios) == (set() if who == "ours" else {"good", "bad"} - {who})


@given(values=st.lists(st.floats(0.001, 1e6), min_size=1))
def test_spread(values):
    spread = Spread.of(values)
    assert spread.low == min(values)
    assert spread.high == max(values)
    assert spread.median == pytest.approx(float(np.median(values)))


# --- rows --------------------------------------------------------------------------------------------------------


@given(groups=st.lists(st.sampled_from(list(SIZES)), min_size=1), size=st.integers(1, 10**6))
def test_rows_are_found_by_group_or_by_name_each_once(groups, size):
    rows = choose_rows(groups)
    assert choose_rows([row.name for row in rows]) == rows
    policies = {group: 3 if group == "serve" else 1 for group in SIZES}
    assert len(set(rows)) == len(rows) == sum((len(SIZES[group]) or 1) * policies[group] for group in set(groups))
    assert choose_rows([f"prefill-{size}"]) == [Row("prefill", size)]
    assert choose_rows([f"serve-{size}"]) == [Row("serve", size, policy) for policy in POLICIES]
    assert choose_rows([f"serve-{size}-static"]) == [Row("serve", size, "static")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "prefil",
        "prefill-",
        "prefill-0",
        "prefill-1x",
        "load-3",
        "-",
        "decode-99999999",
        "batch-4-chunked",
        "serve-4-",
    ],
)
def test_an_unknown_row_is_named(name):
    with pytest.raises(RequestError, match="unknown"):
        choose_rows(["load", name])


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [
        ("prefill-512", 0.5, "1,024 tokens/s"),
        ("batch-4", 0.1, "40.0 tokens/s"),
        ("serve-4", 10.64, "100 tokens/s"),
        ("load", 0.5, "500 ms"),
        ("start", 1.234, "1.23 s"),
        ("memory", 3e8, "300 MB"),
        ("exactness", 0.00012, "1.2e-04"),
    ],
)
def test_amounts_in_fitting_units(name, amount, text):
    assert format_amount(choose_rows([name])[0], amount) == text


# --- workers -----------------------------------------------------------------------------------------------------

PROTOCOL_ENGINE = """
import os, sys, time
class ProtocolEngine:
    def add(self, left, right):
        print("noise on standard output")
        os.write(1, b"noise below Python\\n")
        return left + right
    def fail(self):
        raise ValueError("so not")
    def die(self):
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    def sleep(self):
        time.sleep(60)

ENGINE = ProtocolEngine
"""


def test_a_worker_answers_survives_errors_and_dies_with_a_message(tmp_path):
    with Worker(engine_file(tmp_path, PROTOCOL_ENGINE)) as worker:
        assert worker.call("add", left=[1], right=["é"]) == [1, "é"]
        with pytest.raises(BenchmarkError, match="ValueError: so not"):
            worker.call("fail")
        with pytest.raises(BenchmarkError, match="no attribute 'unheard_of'"):
            worker.call("unheard_of")
        assert worker.call("add", left=1, right=2) == 3
        assert worker.call("peak_bytes") > 1e6
        with pytest.raises(BenchmarkError, match="ended with status 7; last line of stderr: last words"):
            worker.call("die")
        assert not worker.is_alive
        with pytest.raises(BenchmarkError, match="status 7"):
            worker.call("add", left=1, right=2)


def test_a_worker_that_does_not_answer_is_killed(tmp_path):
    with (
        Worker(engine_file(tmp_path, PROTOCOL_ENGINE), timeout=0.5) as worker,
        pytest.raises(BenchmarkError, match="did not answer within"),
    ):
        worker.call("sleep")


def test_workers_that_cannot_start(tmp_path):
    with pytest.raises(NotInstalled, match="no_such_package"):
        Worker(engine_file(tmp_path, "import no_such_package"))
    with pytest.raises(BenchmarkError, match="status 1; last line of stderr: ZeroDivisionError"):
        Worker(engine_file(tmp_path, "1 / 0"))
    with pytest.raises(BenchmarkError, match="cannot be started"):
        Worker(engine_file(tmp_path, PROTOCOL_ENGINE), python=str(tmp_path / "no_python"))


# --- exactness, and other storage --------------------------------------------------------------------------------


def test_the_max_difference_over_all_prompts(tmp_path):
    shifted = FAKE_ENGINE.replace("SHIFT = 0", "SHIFT = 0.125")
    with (
        Worker(engine_file(tmp_path, FAKE_ENGINE, "a.py")) as oracle,
        Worker(engine_file(tmp_path, shifted, "b.py")) as engine,
    ):
        assert max_difference(oracle, oracle, [[1, 2], [3]]) == 0
        assert max_difference(engine, oracle, [[1, 2], [3]]) == 0.25


def test_a_model_is_stored_in_another_type_once(tmp_path, monkeypatch, tiny_gguf):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "LLAMA_CPP", EngineSpec("fake", engine_file(tmp_path, FAKE_ENGINE), "fake-package"))
    stored = stored_as(tiny_gguf, "F16", [sys.executable], 1)
    assert stored.read_text() == "F16"
    stored.write_text("kept")
    assert stored_as(tiny_gguf, "F16", [sys.executable], 1).read_text() == "kept"
    assert list(stored.parent.iterdir()) == [stored]

    broken = FAKE_ENGINE.replace("write(storage)", "write(storage); 1 / 0")
    monkeypatch.setattr(peers, "LLAMA_CPP", EngineSpec("fake", engine_file(tmp_path, broken, "broken.py")))
    with pytest.raises(BenchmarkError, match="ZeroDivisionError"):
        stored_as(tiny_gguf, "F32", [sys.executable], 1)
    assert list(stored.parent.iterdir()) == [stored]

    with pytest.raises(RequestError, match="'Q9' is unknown"):
        stored_as(tiny_gguf, "Q9", [sys.executable], 1)
    with pytest.raises(RequestError, match="folder"):
        stored_as(tmp_path, "Q8_0", [sys.executable], 1)


# --- all of it ---------------------------------------------------------------------------------------------------


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


def test_every_row_is_measured_skipped_or_failed_and_says_so(benchmark):
    assert [result.row.name for result in benchmark.results] == [*QUICK, "prefill-4096"]
    assert set(benchmark.versions) == {"minillm", "peer", "crasher"}
    assert set(benchmark.not_measured) == {"absent"}
    assert "no-such-package" in benchmark.not_measured["absent"]
    assert "4096 positions" in result_of(benchmark, "prefill-4096").skipped
    for name in "decode-64", "batch-4", *FRESH:  # starting includes some decoding, to see the memory it takes
        turns = result_of(benchmark, name).turns
        assert set(turns.failures) == {"crasher"}, turns.failures
        assert set(turns.ratios) == {"peer"}
    prefill = result_of(benchmark, "prefill-32").turns
    assert not prefill.failures
    assert prefill.amounts["peer"] == [16.0]
    assert prefill.ratios["peer"][0] in [16.0 / ours for ours in prefill.amounts["minillm"]]


def test_ours_agrees_with_the_oracle_and_computes_beside_it(tiny_gguf, fake_peers):
    rows = ["prefill-8", "decode-9", "batch-2", "exactness"]
    settings = Settings(model=str(tiny_gguf), threads=1, rows=rows, peers=True, quick=True)
    benchmark = run_benchmark(settings, announce=lambda line: None, peers=[*fake_peers[:2], FLOAT32])
    for name in rows[:3]:
        assert FLOAT32.name in result_of(benchmark, name).turns.ratios
    turns = result_of(benchmark, "exactness").turns
    assert turns.amounts["minillm"][0] < 1e-3
    assert set(turns.failures) == {"peer", "crasher"}  # their logits are of another shape


def test_json_holds_all_of_it(benchmark):
    told = json.loads(json.dumps(to_json(benchmark)))
    assert [row["name"] for row in told["rows"]] == [*QUICK, "prefill-4096"]
    rows = {row["name"]: row for row in told["rows"]}
    assert told["model"]["weight_bytes"] == benchmark.weight_bytes
    decode = rows["decode-64"]
    assert decode["limit"]["bytes"] == benchmark.weight_bytes + 65 * benchmark.kv_bytes_per_token
    seconds = decode["amounts"]["minillm"]["median"]
    assert decode["limit"]["memory_share"] == pytest.approx(
        decode["limit"]["bytes"] / told["machine"]["bandwidth"]["high"] / seconds
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


def test_what_was_measured_is_drawn(benchmark, tmp_path):
    draw(benchmark, tmp_path / "pictures.png")
    assert (tmp_path / "pictures.png").read_bytes().startswith(b"\x89PNG")


def test_every_picture_that_has_rows_is_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    titles = ["Roofline of", "Decode rate", "Size of the KV cache", "Time per output token", "Time to first token"]
    work = Work(10**9, 10**9)
    results = {
        "none": [],
        "batch": [RowResult(Row("batch", 4), Turns({"minillm": [1.0]}), work)],
        "serve": [RowResult(Row("serve", 4, "chunked"), runs=[run_of(n) for n in (3, 1, 2)])],
    }
    for names, wanted in (("none", (0, 2)), ("batch", (0, 1, 2)), ("serve", (0, 2, 3, 4)), ("batch serve", range(5))):
        rows = [result for name in names.split() for result in results[name]]
        there = Machine("chip", 4, 2, "system", {}, 0.0, [1e9], [5e9])
        draw(Benchmark(there, Path("m.gguf"), 10, 10, 1, 3, {"minillm": ""}, {}, rows, CONFIG), tmp_path / "p.svg")
        drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
        assert [number for number, title in enumerate(titles) if f">{title}" in drawn] == list(wanted)
    assert results["serve"][0].typical_run.seconds == 2


def run_of(seconds):
    """The metrics of a run of which only its times are of interest."""
    return RunMetrics(1, 1, 1, seconds, 1, 1, 1 / seconds, *[0] * 8, *(seconds / part for part in (4, 3, 2, 1)))


def test_a_busy_machine_is_warned_about_and_ratios_show_their_spread():
    there = Machine("chip", 4, 2, "system", {}, 3.0, [1e9, 2e9], [5e9])
    turns = Turns({"minillm": [1.0, 1.0, 1.0], "peer": [2.0, 3.0, 2.5]}, {"peer": [2.0, 3.0, 2.5]})
    result = RowResult(Row("prefill", 10), turns, Work(10**9, 10**9))
    benchmark = Benchmark(there, Path("m.gguf"), 10, 10, 1, 3, {"minillm": "", "peer": ""}, {}, [result], CONFIG)
    page = io.StringIO()
    show(benchmark, Console(file=page))
    for wanted in "WARNING", "2.50 (2.00 to 3.00)", "50% of memory", "10.0 tokens/s", "4.0 tokens/s":
        assert wanted in page.getvalue()
    there.load_average = 0.1
    assert not [line for line in conditions(benchmark) if "WARNING" in line]


# --- serving -----------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    clients=st.integers(1, 5),
    policy=st.sampled_from(POLICIES),
    budget=st.integers(8, 64),
)
@settings(max_examples=30)
def test_each_client_waits_for_its_answer_and_time_is_what_the_roofline_says(lengths, clients, policy, budget):
    costs, roof = ModelCosts.of(CONFIG, 1000, 10), Roofline(1e6, 1e9)
    options = EngineConfig(policy=policy, num_blocks=64, max_batch_tokens=budget, prefix_caching=False)
    engine = SimulatedEngine(costs, roof, options)
    trace = serve_clients(engine, [([0] * prompt, answer) for prompt, answer in lengths], clients)
    under_way, arrived, finished = set(), [], []
    for record in trace:
        under_way |= {arrival.request_id for arrival in record.arrived}
        arrived += [(arrival.num_prompt_tokens, arrival.max_tokens) for arrival in record.arrived]
        assert len(under_way) == min(clients, len(lengths) - len(finished))
        finished += record.finished
        under_way -= {finish.request_id for finish in record.finished}
        work = step_work(costs, [(chunk.start, chunk.num_tokens) for chunk in record.chunks])
        assert sum(record.milliseconds.values()) == pytest.approx(1000 * roof.seconds(work), abs=1e-6)
    assert arrived == lengths
    assert len(finished) == len(lengths)
    assert run_metrics(trace).num_generated_tokens == sum(answer for _, answer in lengths)
    assert not engine.listeners


def test_policies_take_turns_in_serving(tmp_path_factory):
    model = random_llama(max_position_embeddings=512)
    path = write_gguf(tmp_path_factory.mktemp("serve") / "tiny.gguf", model, with_tokenizer=True)
    settings = Settings(model=str(path), threads=1, rows=["serve-4"], quick=True)
    benchmark = run_benchmark(settings, announce=lambda line: None)
    assert [result.row.name for result in benchmark.results] == [f"serve-4-{policy}" for policy in POLICIES]
    for result in benchmark.results:
        (run,) = result.runs
        assert result.turns.amounts["minillm"] == [run.seconds]
        assert run.num_finished == run.num_requests == NUM_REQUESTS
        assert run.num_generated_tokens == result.row.tokens
        assert 1 < run.mean_batch_sequences <= 4
    told = json.loads(json.dumps(to_json(benchmark)))
    assert [RunMetrics(**run) for row in told["rows"] for run in row["runs"]] == [
        run for result in benchmark.results for run in result.runs
    ]
    page = io.StringIO()
    show(benchmark, Console(file=page))
    lines = [line for line in page.getvalue().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(POLICIES)  # no other table
    assert all(f"4 clients, {policy}" in line for policy, line in zip(POLICIES, lines[2:], strict=True))
    assert build_serving_table(benchmark, plain=False).row_count == len(POLICIES)
    benchmark.versions["peer"] = ""
    assert "compares only minillm's own policies" in footnotes(benchmark)[0]


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "nonsense"], "row 'nonsense' is unknown"),
        (["--rounds", "0"], "rounds is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--threads", "100000"], "threads is 100000"),
        (["--json", "no/such/folder/file.json"], "does not exist; create it first"),
        (["--as", "Q9"], "storage type 'Q9' is unknown"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(arguments, message, capsys, monkeypatch, tiny_gguf):
    monkeypatch.setattr(bench.benchmark, "measure_machine", None)  # to call it would be an error
    assert cli.main(["bench", "--model", str(tiny_gguf), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch, tiny_gguf, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert cli.main(["bench", "--model", str(tiny_gguf), "--plot", str(tmp_path / "roofline.png")]) == 2
    assert "minillm[plot]" in capsys.readouterr().err


def test_the_command_prints_and_writes(capsys, monkeypatch, tiny_gguf, tmp_path):
    monkeypatch.setattr(bench.benchmark, "PEERS", ())
    arguments = [
        "--rows",
        "decode-64",
        "exactness",
        "--quick",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    assert cli.main(["bench", "--model", str(tiny_gguf), *arguments]) == 0
    assert "decode at 64 tokens of context" in capsys.readouterr().out
    told = json.loads((tmp_path / "figures.json").read_text())
    assert [row["name"] for row in told["rows"]] == ["decode-64", "exactness"]
    assert "--peers" in told["rows"][1]["skipped"]


def test_the_machine_is_described():
    there = machine.describe_machine(1)
    assert there.cpu
    assert there.cores >= 1
    assert machine.last_level_cache_bytes() >= 0
