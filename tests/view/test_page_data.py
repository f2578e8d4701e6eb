"""The data of the page: every record can be rebuilt from it, and its estimates and metrics are finite."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_runs import simulated_runs, single_step_run
from support.traces import traces

from minillm.trace import Finish, Trace, to_json
from minillm.trace.roofline import ModelCosts, Roofline, step_work
from minillm.view.browser import page, write_page
from minillm.view.page.data import STATES, page_data
from minillm.view.page.estimate import estimates
from minillm.view.page.interning import page_value

PAGE = Path(__file__).parents[2] / "minillm" / "view" / "page"
COSTS = ModelCosts(1000, 8, 200, 50, 16)


@pytest.fixture(scope="module")
def replayed(browser, run, tmp_path_factory):
    """A function that rebuilds the records of a run in the page, once forwards and once backwards."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page([run], path)
    tab = browser.new_page()
    tab.goto(path.as_uri())
    script = """run => {
        const replay = new minillm.Replay(run), backwards = [], forwards = [];
        for (let i = 0; i < run.steps.length; i++) forwards.push(structuredClone(replay.at(i)));
        for (let i = run.steps.length; i--; ) backwards.unshift(structuredClone(replay.at(i)));
        return [forwards, backwards];
    }"""
    yield lambda run: tab.evaluate(script, run)
    tab.close()


def expected_record(record):
    """The record with printable texts, and with log-probabilities of four decimals."""
    record = page_value(to_json(record))
    for chunk in record["chunks"]:
        for token in chunk["sampled"]:
            token["logprob"] = token["logprob"] if token["logprob"] is None else round(token["logprob"], 4)
    return record


def without_indices(record):
    """The page's record without the indices that it adds."""
    record = {key: value for key, value in record.items() if key not in ("index", "waiting_names")}
    for name in ("arrived", "admitted", "preempted", "finished", "running", "chunks"):
        record[name] = [{key: value for key, value in part.items() if key != "sequence"} for part in record[name]]
    return record


@settings(max_examples=10)
@given(trace=traces() | simulated_runs())
def test_the_page_rebuilds_every_record(replayed, trace):
    forwards, backwards = replayed(json.loads(json.dumps(page_data(trace, "run"), allow_nan=False)))
    assert forwards == backwards
    assert [without_indices(record) for record in forwards] == [expected_record(record) for record in trace]


@settings(max_examples=30)
@given(trace=traces() | simulated_runs(), rates=st.none() | st.tuples(st.floats(1, 1e12), st.floats(1, 1e12)))
def test_estimates_follow_the_roofline(trace, rates):
    trace.facts.costs = COSTS
    roofline = Roofline(*rates) if rates else None
    estimate = estimates(trace, roofline)
    if estimate["milliseconds"] is None:
        assert "no estimate" in estimate["source"]
        assert roofline is None
        assert not any(record.chunks and sum(record.milliseconds.values()) for record in trace)
        return
    for record, best in zip(trace, estimate["milliseconds"], strict=True):
        measured = sum(record.milliseconds.values())
        if not record.chunks:
            assert best is None
        elif roofline:
            work = step_work(COSTS, [(chunk.start, chunk.num_tokens) for chunk in record.chunks])
            assert best == pytest.approx(roofline.seconds(work) * 1000, rel=1e-4)
        else:
            assert measured == 0 or best <= measured * 1.0001  # no step beats the best rates of its run
    trace.facts.costs = None
    assert estimates(trace, roofline)["milliseconds"] is None


def test_a_model_without_costs_takes_no_time(run):
    trace = Trace(run.facts, run.steps[:3])
    trace.facts.costs = ModelCosts(0, 0, 0, 0, 0)
    assert all(best == 0 for best in estimates(trace, None)["milliseconds"])
    trace.facts.costs = COSTS


@pytest.mark.parametrize(("length", "milliseconds"), [(0.0, 1e-320), (1.7e308, 0.0)])
def test_infinite_rates_are_left_out(open_page, make_run, length, milliseconds):
    trace = make_run("chunked")
    for record in trace:
        record.time = length * (record.step > 2)
        record.milliseconds = dict.fromkeys(record.milliseconds, milliseconds)
    tab = open_page(trace)
    tab.evaluate("minillm.clock.set(minillm.clock.end), minillm.frame()")
    assert tab.locator(".requests-table tbody tr").count() == 7


def test_a_page_needs_one_trace_or_two(run):
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"got {number}"):
            page([run] * number)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        page([run], names=["a", "b"])


def test_a_page_is_self_contained(run):
    """It refers to no address, and contains all of its files, which are declared as package data."""
    text = page([run])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.partition('<script type="application/json"')[0])
    declared = re.search(r'"minillm.view.page" = \[(.*?)\]', (PAGE.parents[2] / "pyproject.toml").read_text())[1]
    packaged = {path for pattern in re.findall(r'"(.*?)"', declared) for path in PAGE.glob(pattern)}
    assert packaged == {path for path in PAGE.rglob("*") if path.suffix in (".html", ".css", ".js")}
    for path in packaged:
        assert path.suffix == ".html" or path.read_text(encoding="utf-8") in text


def test_the_last_chunk_of_an_answer_keeps_its_state():
    """The state does not follow from the number of tokens: the prefill of one token is not a decode."""
    trace = single_step_run("r", "the prompt", "all")
    trace.steps[0].chunks[0].token_ids = [1]
    trace.steps[0].finished = [Finish("r", 0, "length")]
    cells = page_data(trace, "one")["tracks"][0]["cells"]
    assert cells == [0, 1, STATES.index("prefill"), 1, 0, 1, STATES.index("finished"), 1]
