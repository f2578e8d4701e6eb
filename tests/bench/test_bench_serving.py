"""The benchmark of serving, in simulated time and with a tiny model."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.bench_engines import CONFIG
from support.builders import random_llama, write_gguf

from minillm.bench import Settings, run_benchmark
from minillm.bench.report import build_serving_table, footnotes, show, to_json
from minillm.bench.rows import NUM_REQUESTS
from minillm.bench.serving import SimulatedEngine, serve_clients
from minillm.engine import EngineConfig
from minillm.engine.scheduler import POLICIES
from minillm.trace import RunMetrics, run_metrics
from minillm.trace.roofline import ModelCosts, Roofline, step_work


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    clients=st.integers(1, 5),
    policy=st.sampled_from(POLICIES),
    budget=st.integers(8, 64),
)
@settings(max_examples=30)
def test_each_client_waits_for_its_answer_and_steps_take_the_time_of_the_roofline(lengths, clients, policy, budget):
    costs, roof = ModelCosts.of(CONFIG, 1000, 10), Roofline(1e6, 1e9)
    options = EngineConfig(policy=policy, num_blocks=64, max_batch_tokens=budget, prefix_caching=False)
    engine = SimulatedEngine(costs, roof, options)
    trace = serve_clients(engine, [([0] * prompt, answer) for prompt, answer in lengths], clients)
    unfinished, arrived, finished = set(), [], []
    for record in trace:
        unfinished |= {arrival.request_id for arrival in record.arrived}
        arrived += [(arrival.num_prompt_tokens, arrival.max_tokens) for arrival in record.arrived]
        assert len(unfinished) == min(clients, len(lengths) - len(finished))
        finished += record.finished
        unfinished -= {finish.request_id for finish in record.finished}
        work = step_work(costs, [(chunk.start, chunk.num_tokens) for chunk in record.chunks])
        assert sum(record.milliseconds.values()) == pytest.approx(1000 * roof.seconds(work), abs=1e-6)
    assert arrived == lengths
    assert len(finished) == len(lengths)
    assert run_metrics(trace).num_generated_tokens == sum(answer for _, answer in lengths)
    assert not engine.listeners


def test_serving_measures_every_policy(tmp_path_factory):
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
    report = json.loads(json.dumps(to_json(benchmark)))
    assert [RunMetrics(**run) for row in report["rows"] for run in row["runs"]] == [
        run for result in benchmark.results for run in result.runs
    ]
    page = io.StringIO()
    show(benchmark, Console(file=page))
    lines = [line for line in page.getvalue().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(POLICIES)  # only one table
    assert all(f"4 clients, {policy}" in line for policy, line in zip(POLICIES, lines[2:], strict=True))
    assert build_serving_table(benchmark, plain=False).row_count == len(POLICIES)
    benchmark.versions["peer"] = ""
    assert "compares only minillm's own policies" in footnotes(benchmark)[0]
