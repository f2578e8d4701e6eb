"""The page in a real browser: what it shows is what the records say, and it shows it to everybody.

It takes a Chromium that is there. Where none is, the tests say so and are skipped, but not where CI is set.
"""

import json
import os
import re
import shutil
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect, sync_playwright
from support.builders import random_llama, write_gguf
from test_console import runs, served, spoken
from test_trace import traces

from minillm import cli
from minillm.engine import EngineConfig
from minillm.engine.sequence import Sequence
from minillm.trace import GIVEN_BACK, Finish, Trace, held, request_metrics, sequence_name, to_json
from minillm.trace.roofline import ModelCosts, Roofline, step_work
from minillm.view import Timeline
from minillm.view.browser import page, write_page
from minillm.view.page.data import STATES, data
from minillm.view.page.estimate import estimates
from minillm.view.page.texts import plain
from minillm.view.shown import shown

PAGE = Path(__file__).parents[2] / "minillm" / "view" / "page"
COSTS = ModelCosts(1000, 8, 200, 50, 16)
SIZES = [(1280, 900), (390, 844)]


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        message = "no Chromium is here: install chromium (apt-get install chromium) to see the page tested"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of some traces. At the end: no error was written, nothing was asked of any network."""
    contexts, problems = [], []

    def open_page(*traces, size=SIZES[0], scheme="light", **more):
        path = tmp_path / "page.html"
        write_page(traces, path, **more)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)

        def route(asked):
            if asked.request.url == path.as_uri():
                return asked.continue_()
            problems.append(asked.request.url)
            return asked.abort()

        context.route("**/*", route)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def run_of(policy, seed=1, num_blocks=12, windows=(20,)):
    """Preemptions, shared prefixes, completions that part: seven requests in a pool too small, behind windows."""
    config = EngineConfig(
        policy=policy, block_size=4, num_blocks=num_blocks, max_batch_tokens=16, max_sequences=4
    )  # fmt: skip
    requests = [
        (n, Sequence.of(f"r{n}", [0] * 8 + [n + 1] * (n + 1), 10 + n, num_forks=2 if n == 2 else 1)) for n in range(7)
    ]
    trace = served(config, requests, Random(seed), windows)
    trace.facts.costs = COSTS
    return trace


@pytest.fixture(scope="module")
def run():
    trace = run_of("chunked", num_blocks=24, windows=(20, None))
    assert any(record.preempted for record in trace)
    assert any(record.pool.copies for record in trace)
    assert any(record.prefix_hits for record in trace)
    assert any(GIVEN_BACK in sequence.block_table for record in trace for sequence in record.running)
    return trace


# --- the data -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replayed(browser, run, tmp_path_factory):
    """Turns a run's data into its records, in the page's own way: forwards, then backwards."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page([run], path)
    tab = browser.new_page()
    tab.goto(path.as_uri())
    script = """run => {
        const there = new minillm.Replay(run), back = [], forth = [];
        for (let i = 0; i < run.steps.length; i++) forth.push(structuredClone(there.at(i)));
        for (let i = run.steps.length; i--; ) back.unshift(structuredClone(there.at(i)));
        return [forth, back];
    }"""
    yield lambda run: tab.evaluate(script, run)
    tab.close()


def as_shown(record):
    """The record as the page has it: its texts safe to show, log-probabilities with four decimals."""
    record = plain(to_json(record))
    for chunk in record["chunks"]:
        for token in chunk["sampled"]:
            token["logprob"] = token["logprob"] if token["logprob"] is None else round(token["logprob"], 4)
    return record


def without_numbers(record):
    """The page's record without what it adds: the numbers by which it knows who is meant."""
    record = {key: value for key, value in record.items() if key not in ("index", "waiting_names")}
    for name in ("arrived", "admitted", "preempted", "finished", "running", "chunks"):
        record[name] = [{key: value for key, value in part.items() if key != "who"} for part in record[name]]
    return record


@settings(max_examples=10)
@given(trace=traces() | runs())
def test_the_page_knows_every_step_as_it_was_recorded(replayed, trace):
    forth, back = replayed(json.loads(json.dumps(data(trace, "run"), allow_nan=False)))
    assert forth == back
    assert [without_numbers(record) for record in forth] == [as_shown(record) for record in trace]


@settings(max_examples=30)
@given(trace=traces() | runs(), rates=st.none() | st.tuples(st.floats(1, 1e12), st.floats(1, 1e12)))
def test_estimates_are_the_rooflines(trace, rates):
    trace.facts.costs = COSTS
    roofline = Roofline(*rates) if rates else None
    found = estimates(trace, roofline)
    if found["milliseconds"] is None:
        assert "no estimate" in found["source"]
        assert roofline is None
        assert not any(record.chunks and sum(record.milliseconds.values()) for record in trace)
        return
    for record, best in zip(trace, found["milliseconds"], strict=True):
        took = sum(record.milliseconds.values())
        if not record.chunks:
            assert best is None
        elif roofline:
            work = step_work(COSTS, [(chunk.start, chunk.num_tokens) for chunk in record.chunks])
            assert best == pytest.approx(roofline.seconds(work) * 1000, rel=1e-4)
        else:
            assert took == 0 or best <= took * 1.0001  # no step was faster than the best
    trace.facts.costs = None
    assert estimates(trace, roofline)["milliseconds"] is None


def test_a_model_that_costs_nothing_and_steps_that_take_no_time(run):
    trace = Trace(run.facts, run.steps[:3])
    trace.facts.costs = ModelCosts(0, 0, 0, 0, 0)
    assert all(best == 0 for best in estimates(trace, None)["milliseconds"])
    trace.facts.costs = COSTS


@pytest.mark.parametrize(("length", "took"), [(0.0, 1e-320), (1.7e308, 0.0)])
def test_rates_and_means_that_no_number_holds_are_left_out(opened, length, took):
    trace = run_of("chunked")
    for record in trace:
        record.time = length * (record.step > 2)
        record.milliseconds = dict.fromkeys(record.milliseconds, took)
    tab = opened(trace)
    tab.evaluate("minillm.clock.set(minillm.clock.end), minillm.frame()")
    assert tab.locator(".requests-table tbody tr").count() == 7


def test_pages_are_of_one_trace_or_two(run):
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"not {number}"):
            page([run] * number)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        page([run], names=["a", "b"])


def test_a_page_is_whole():
    """It names no address, and all of its own files are in it, and declared as data of the package."""
    text = page([run_of("static")])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.partition('<script type="application/json"')[0])
    declared = re.search(r'"minillm.view.page" = \[(.*?)\]', (PAGE.parents[2] / "pyproject.toml").read_text())[1]
    packed = {path for pattern in re.findall(r'"(.*?)"', declared) for path in PAGE.glob(pattern)}
    assert packed == {path for path in PAGE.rglob("*") if path.suffix in (".html", ".css", ".js")}
    for path in packed:
        assert path.suffix == ".html" or path.read_text(encoding="utf-8") in text


# --- the views ----------------------------------------------------------------------------------------------------


def choose(tab, step):
    tab.locator("#slider").fill(str(step))
    tab.evaluate("minillm.frame()")


def texts(tab, selector):
    return tab.locator(selector).evaluate_all("items => items.map(item => item.textContent)")


def wait_until(tab, condition):
    """Playwright's own `wait_for_function` would have the page evaluate a string, which its policy forbids."""
    for _ in range(500):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(20)
    pytest.fail(f"{condition} did not come true")


def pictures(tab):
    return tab.locator(".views canvas[role=img]").evaluate_all("all => all.map(canvas => canvas.toDataURL())")


def test_the_slider_moves_every_view_to_what_the_record_says(opened, run):
    tab, timeline = opened(run), Timeline(run.facts, history=None, kept_finished=None)
    answers, before = {}, None
    for record in run:
        timeline.push(record)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                answers.setdefault(name, []).append(shown(token.text))
        if record.step % 7 != 3:
            continue
        choose(tab, record.step)
        assert tab.evaluate("minillm.stateAt(0, minillm.clock.now).step") == record.step
        sentence = tab.locator(".sentence").text_content()
        pool = record.pool
        assert sentence.startswith(f"Step {record.step}: ")
        assert f"{len(record.running)} running, {record.num_waiting} waiting" in sentence
        assert f"{pool.num_held} of {pool.num_blocks} blocks held" in sentence
        said = tab.locator(".map").get_attribute("aria-label")
        assert f"{pool.num_held} of {pool.num_blocks} blocks held, {pool.num_cached} cached" in said
        assert texts(tab, ".tokens .chunk .name") == [
            sequence_name(c.request_id, c.completion) for c in record.chunks
        ]  # fmt: skip
        assert texts(tab, ".tokens .token.out") == [f"={t.token_id}" for c in record.chunks for t in c.sampled]
        tokens = texts(tab, ".tokens .token:not(.out)")
        assert [token[1:].strip(">") for token in tokens] == [str(i) for c in record.chunks for i in c.token_ids]
        happened = " ".join(texts(tab, ".happened li"))
        for part in record.admitted + record.preempted + record.finished:
            assert sequence_name(part.request_id, part.completion) in happened
        assert happened.count("preempted") == len(record.preempted)
        now = dict(zip(texts(tab, ".requests tbody .name"), texts(tab, ".requests tbody .now"), strict=True))
        for arrival in (arrival for step in run for arrival in step.arrived):
            row = timeline.rows.get(arrival.request_id)
            cell = row and row.cell(record.step)
            assert now[arrival.request_id] == (cell.state if cell else "ended" if row else "to come")
        drawn = pictures(tab)
        if before:
            assert all(one != other for one, other in zip(before, drawn, strict=True))
        before = drawn
        for sequence in record.running:
            name = sequence_name(sequence.request_id, sequence.completion)
            tab.evaluate(
                "number => { const [panel] = minillm.panels; panel.follow(panel.run.rows[number]); }",
                timeline.rows[name].number,
            )
            tab.evaluate("minillm.frame()")
            holds, gone = held(sequence.block_table), sequence.block_table.count(GIVEN_BACK)
            assert texts(tab, ".block-table li") == [f"{gone} given back"] * (gone > 0) + [
                f"{block}{f' ×{pool.references[block]}' if pool.references[block] > 1 else ''}" for block in holds
            ]
            end, which = len(sequence.block_table) // 2 * 4, "of group 1 of the layers (which see all)"
            last = f"positions {end - 4} to {end - 1} {which} lie in block {holds[-1]}"
            assert tab.locator(".block-table li").last.get_attribute("title") == last
            if gone:
                behind = (
                    f"no query reaches positions 0 to {4 * gone - 1} of group 0 of the layers (with a window of 20)"
                )
                assert tab.locator(".block-table li").first.get_attribute("title") == f"{behind} any more"
            said = tab.locator(".map").get_attribute("aria-label")
            assert f"{name} holds blocks {', '.join(map(str, holds))}" in said
            assert (f"given back {gone}." in said) == (gone > 0)
            assert tab.locator(".story-heading bdi").text_content() == name
            fresh = tab.locator(".fresh").text_content()
            told = tab.locator(".prompt").text_content(), tab.locator(".answer").text_content() + fresh
            assert told == (f"{sequence.request_id} says ", "".join(answers.get(name, [])))
            grown = [t for c in record.chunks for t in c.sampled if sequence_name(c.request_id, t.completion) == name]
            assert fresh == "".join(shown(token.text) for token in grown)


def test_keys(opened, run):
    tab, last = opened(run), len(run) - 1
    now = lambda: tab.evaluate("minillm.clock.now")  # noqa: E731
    for key, step in (
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last),
        ("PageUp", last - 10), ("PageDown", last), ("Home", 0), ("ArrowLeft", 0), ("PageDown", 10),
    ):  # fmt: skip
        tab.keyboard.press(key)
        assert now() == step, key
    expect(tab.locator("#live")).to_contain_text("Step 10: ")  # and whoever listens is told
    followed = tab.locator(".story-heading bdi")
    expect(followed).to_have_text("r0")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    expect(followed).to_have_text("r2")
    tab.keyboard.press("ArrowUp")
    expect(followed).to_have_text("r1")
    tab.select_option("#speed", "100")
    tab.keyboard.press("Home")
    tab.locator("#slider").focus()
    tab.keyboard.press("Space")
    wait_until(tab, "minillm.clock.now > 2")
    tab.keyboard.press("Space")
    stopped = now()
    tab.keyboard.press("ArrowRight")
    assert now() == min(last, stopped + 1)
    tab.keyboard.press("End")
    tab.locator("#play").press("Enter")  # from the end it begins anew
    wait_until(tab, "minillm.clock.now < minillm.clock.end")


def test_every_control_is_reached_with_tab_and_has_a_name(opened, run):
    tab = opened(run)
    names = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        name = tab.evaluate(
            "(e => e === document.body ? '' : (e.ariaLabel || e.labels?.[0]?.textContent || e.textContent))"
            "(document.activeElement)"
        )
        if not name:
            break
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", name
        names.append(name.strip())
    assert names[:6] == ["first step", "step back", "play", "step on", "last step", "step"]
    assert {"Lanes", "Text so far", "Table of requests"} <= set(names)
    unlabelled = tab.locator("canvas[role=img]:not([aria-label]), button:empty:not([aria-label])")
    assert unlabelled.count() == 0
    assert tab.locator("main, header, section[aria-label]").count() >= 7


def test_arrow_keys_walk_the_token_row_and_leave_the_clock(opened, run):
    tab = opened(run)
    choose(tab, 3)
    chunk = run.steps[3].chunks[0]
    tab.locator(".token").first.focus()
    assert f"position {chunk.start} of {chunk.request_id}" in tab.locator(".token-detail").text_content()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert tab.evaluate("minillm.clock.now") == 3


@pytest.mark.parametrize("size", SIZES)
def test_what_has_the_focus_is_not_under_the_controls(opened, run, size):
    tab = opened(run, size=size)
    tab.locator(".requests-table button").last.focus()
    script = """['.bar', ':focus'].map(name => document.querySelector(name).getBoundingClientRect())"""
    while True:  # upwards, which is where they could cover it
        tab.keyboard.press("Shift+Tab")
        bar, focused = tab.evaluate(script)
        if tab.locator("main :focus").count() == 0:
            break
        assert focused["top"] >= bar["bottom"]


def test_a_long_chunk_is_opened_by_key_and_walked_on_from_there(opened):
    trace = spoken("r", "the prompt", "all")
    trace.steps[0].chunks[0].token_ids = list(range(300))
    tab = opened(trace)
    tab.locator(".more").press("Enter")
    assert tab.locator(".more").count() == 0
    assert tab.locator(".token:not(.out)").count() == 300
    assert tab.locator(":focus").text_content() == "#72"  # the first of those that came
    tab.keyboard.press("ArrowRight")
    assert tab.locator(":focus").text_content() == "#73"
    assert tab.locator('.token[tabindex="0"]').count() == 1
    trace.steps[0].chunks[0].token_ids = list(range(4010))
    tab = opened(trace)
    tab.locator(".more").click()
    assert tab.locator("button.more").count() == 0
    assert tab.locator("span.more").text_content() == "… 10 more tokens …"


def test_a_click_chooses_step_and_sequence(opened, run):
    tab = opened(run)
    box = tab.locator(".lanes canvas").bounding_box()
    tab.mouse.click(box["x"] + box["width"] - 3, box["y"] + 18 + 18 * 2 + 5)  # the third lane, at the right edge
    tab.evaluate("minillm.frame()")
    expect(tab.locator(".story-heading bdi")).to_have_text("r2")
    assert tab.evaluate("minillm.clock.now") == len(run) - 1
    tab.locator(".charts").click(position={"x": 140, "y": 40})
    assert tab.evaluate("minillm.clock.now") == 0
    tab.select_option("#width", "time")
    tab.select_option("#width", "tokens")
    tab.locator("#closer").click()
    expect(tab.locator(".xscroll")).to_be_visible()


def test_requests_are_sorted_and_followed(opened, run):
    tab, metrics = opened(run), request_metrics(run)
    names = lambda: texts(tab, ".requests tbody .name")  # noqa: E731
    assert names() == list(metrics)
    head = tab.locator(".requests thead button", has_text="TTFT")
    for turns in (False, True):
        head.click()
        times = [metrics[name].ttft for name in names()]
        assert times == sorted(times, reverse=turns)
        assert tab.locator("th[aria-sort=descending]").count() == turns
    tab.locator(".requests tbody button", has_text="r5").press("Enter")
    expect(tab.locator(".story-heading bdi")).to_have_text("r5")
    expect(tab.locator("tr.chosen .name")).to_have_text("r5")


def test_two_runs_keep_one_clock(opened):
    two = [run_of("static"), run_of("chunked", num_blocks=30)]
    two[1].steps = two[1].steps[2:]  # a trace may begin anywhere: its clock begins with its first step
    tab = opened(*two, names=["one", "other"])
    begins = [[record.time - trace.steps[0].time for record in trace] for trace in two]
    moments = sorted({*begins[0], *begins[1]})
    said = lambda: [int(re.match(r"Step (\d+)", text)[1]) for text in texts(tab, ".sentence")]  # noqa: E731

    def expected(now):
        return [
            trace.steps[max(0, bisect_right(begin, now) - 1)].step for trace, begin in zip(two, begins, strict=True)
        ]

    for share in (0, 1234, 5000, 9100, 10_000):
        choose(tab, share)
        now = tab.evaluate("minillm.clock.now")
        assert now == pytest.approx(share / 10_000 * max(trace.steps[-1].end - trace.steps[0].time for trace in two))
        assert said() == expected(now)
    tab.keyboard.press("Home")
    for moment in moments[1:6]:
        tab.keyboard.press("ArrowRight")
        tab.evaluate("minillm.frame()")
        assert tab.evaluate("minillm.clock.now") == moment
        assert said() == expected(moment)
    scales = tab.evaluate("minillm.panels.map(panel => panel.axis.scale)")
    assert scales[0] == pytest.approx(scales[1])  # a second is as wide on both sides
    assert texts(tab, "#comparison tbody th") == ["one", "other"] == texts(tab, "h2.name")


# --- everybody ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_it_fits_every_screen_in_light_and_dark(opened, run, number):
    for size, scheme in zip(SIZES, ("light", "dark"), strict=True):
        tab = opened(*[run] * number, size=size, scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
        ground = "getComputedStyle(document.body).backgroundColor"
        for is_dark in (scheme == "dark", scheme == "light"):
            assert (tab.evaluate(ground) == "rgb(18, 20, 23)") == is_dark
            contrasts = tab.evaluate(CONTRASTS)
            assert len(contrasts) == 9
            assert min(contrasts) >= 4.5, contrasts
            tab.locator("#theme").click()
        tab.set_viewport_size({"width": SIZES[1][0], "height": 600})
        assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES[1][0]


# WCAG 2.2's contrast ratios of the three colours of text on the three grounds.
CONTRASTS = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = name => {
        const hex = style.getPropertyValue("--" + name).trim();
        const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
            .map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return ["text", "quiet", "accent"].flatMap(ink => ["bg", "card", "soft"].map(ground => {
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    }));
}"""

HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "]]>--><!--<svg onload=window.ran=1>",
    "\"'`&amp;&lt;${window.ran = 1}\\",
    "\u202egnirts\u2066\u2028\x00\x1b[31m\ud83d",
    "{{script}}",
]


@pytest.mark.parametrize("order", [1, -1])
def test_hostile_text_is_shown_and_never_run(opened, order):
    name, prompt, text = ("".join([*HOSTILE[shift:], *HOSTILE[:shift]][::order]) for shift in range(3))
    trace = spoken(name, prompt, text)
    trace.steps[0].chunks[0].sampled[0].token_text = prompt
    tab = opened(trace, names=[name])
    assert tab.locator(".name").first.text_content() == shown(name)
    assert tab.locator(".prompt").text_content() == shown(prompt)
    assert tab.locator(".fresh").text_content() == shown(text)
    assert tab.locator(".token.out").text_content() == shown(prompt)
    assert tab.evaluate("window.ran") is None
    assert tab.locator("img, script").count() == 2  # the data and the page's own
    assert tab.title() == f"{shown(name)} – minillm trace"


def test_texts_of_a_hundred_thousand_letters(opened):
    """Nobody waits for them: were anything done for each letter over all of them, the page would not open in time."""
    name, prompt, text = ("🙂" + letter * 10**5 for letter in "npt")
    tab = opened(spoken(name, prompt, text))
    tab.keyboard.press("ArrowDown")
    assert [len(tab.locator(part).text_content()) for part in (".prompt", ".fresh")] == [10**5 + 1] * 2


def test_a_pool_too_large_to_draw_says_how_much_is_drawn(opened, run):
    more = 60_000 - run.facts.num_blocks
    steps = [
        replace(record, pool=replace(record.pool, references=[*record.pool.references, *[1] * more]))
        for record in run.steps[:2]
    ]
    tab = opened(Trace(replace(run.facts, num_blocks=60_000), steps))
    held = steps[0].pool.num_held
    assert f"Block pool: {held} of 60000 blocks held" in tab.locator(".map").get_attribute("aria-label")
    assert tab.locator(".block-detail").text_content() == "Drawn are the first 40,000 of 60,000 blocks."


def test_where_an_answer_ended_its_last_chunk_is_drawn_as_what_it_was():
    """Not as what its number of tokens suggests: a prompt of one token is a prefill, too."""
    trace = spoken("r", "the prompt", "all")
    trace.steps[0].chunks[0].token_ids = [1]
    trace.steps[0].finished = [Finish("r", 0, "length")]
    cells = data(trace, "one")["rows"][0]["cells"]
    assert cells == [0, 1, STATES.index("prefill"), 1, 0, 1, STATES.index("finished"), 1]


@settings(max_examples=4)
@given(trace=traces())
def test_any_records_make_a_page_without_errors(browser, tmp_path, trace):
    write_page([trace, trace], tmp_path / "any.html")
    tab, errors = browser.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto((tmp_path / "any.html").as_uri())
    tab.evaluate("for (const share of [0, 0.5, 1]) { minillm.clock.set(share * minillm.clock.end); minillm.frame(); }")
    tab.close()
    assert errors == []


def test_the_policy_lets_nothing_out_and_nothing_else_run(browser, run, tmp_path):
    write_page([run], tmp_path / "page.html")
    tab = browser.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    refused = tab.evaluate("""async () => {
        const refused = [];
        document.addEventListener("securitypolicyviolation", event => refused.push(event.effectiveDirective));
        const add = (tag, fields) => document.body.append(Object.assign(document.createElement(tag), fields));
        await fetch("https://example.org/").catch(() => 0);
        add("img", {src: "https://example.org/x.png"});
        add("script", {textContent: "window.ran = 1"});
        add("iframe", {src: "https://example.org/"});
        await new Promise(resolve => setTimeout(resolve, 100));
        return window.ran ? "ran" : refused.map(name => name.split("-")[0]).sort();
    }""")
    tab.close()
    assert refused == ["connect", "frame", "img", "script"]


def test_a_trace_without_steps_says_so(opened, run):
    tab = opened(Trace(run.facts), Trace(run.facts))
    assert "This trace has no steps" in tab.locator(".empty").first.text_content()
    assert tab.locator(".views:visible").count() == 0
    tab.keyboard.press("ArrowRight")


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_beside_the_run(run, tmp_path, capsys, monkeypatch):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run.write(one)
    run.write(other)
    seen = []
    monkeypatch.setattr("webbrowser.open", seen.append)
    assert cli.main(["trace", str(one), "--open"]) == 0
    assert seen == [(tmp_path / "one.html").as_uri()]
    assert cli.main(["trace", str(one), str(other), "-o", str(tmp_path / "two.html"), "--roofline", "46.5,247"]) == 0
    text = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert '"name":"one"' in text
    assert '"name":"other"' in text
    assert "46.5 GB/s, 247 GFLOP/s: the machine's roofline, as given." in text
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.html"), str(tmp_path / "two.html")]
    assert cli.main(["trace", str(one), str(one), "-o", str(tmp_path / "two.html")]) == 0
    assert f'"name":"{one}"' in (tmp_path / "two.html").read_text(encoding="utf-8")  # of one name: told apart by path


def test_the_command_writes_for_perfetto_too(run, tmp_path, capsys):
    one, events = tmp_path / "one.jsonl", tmp_path / "events.json"
    run.write(one)
    assert cli.main(["trace", str(one), "--perfetto", str(events)]) == 0
    assert json.loads(events.read_text(encoding="utf-8"))["traceEvents"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.html"), str(events)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.jsonl", "-o", "one.jsonl"], "error: one.jsonl is the run itself, which would be lost"),
        (["one.jsonl", "-o", "link.html"], "error: link.html is the run itself"),
        (["one.jsonl"] * 3, "error: 3 runs; a page shows one, or two side by side"),
        (["one.jsonl", "--perfetto", "one.jsonl"], "error: one.jsonl is the run itself"),
        (["one.jsonl", "--perfetto", "one.html"], "error: one.html was named for the page and for Perfetto"),
        (["one.jsonl", "one.jsonl", "--perfetto", "x.json"], "error: --perfetto writes one run, and 2 are given"),
        (["absent.jsonl"], "error: .*absent.jsonl"),
        (["."], "error: .*Is a directory: '.'"),
        ([""], "error: .*(Is a directory|No such file)"),
        (["cut.jsonl"], "error: cut.jsonl: line 3 has no end; the file was cut off"),
        (["empty.jsonl"], "error: empty.jsonl: line 1 is missing: the file is empty"),
        (["one.jsonl", "-o", "no/such/folder.html"], "error: .*no/such/folder.html"),
        (["one.jsonl", "--roofline", "fast"], "'fast' is not two numbers over 0"),
        (["one.jsonl", "--roofline", "1,-2"], "'1,-2' is not two numbers over 0"),
        (["one.jsonl", "--roofline", "1,nan"], "'1,nan' is not two numbers over 0"),
    ],
)
def test_bad_input_of_the_command(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    run.write("one.jsonl")
    whole = Path("one.jsonl").read_bytes()
    Path("cut.jsonl").write_bytes(b"\n".join(whole.splitlines()[:3]))
    Path("empty.jsonl").touch()
    monkeypatch.setattr(cli, "_let_go_of_stdout", lambda: None)  # pytest's stands in its place
    Path("link.html").symlink_to("one.jsonl")
    try:
        status = cli.main(["trace", *arguments])
    except SystemExit as left:  # argparse's way
        status = left.code
    assert status == 2
    assert re.search(message, capsys.readouterr().err)
    assert Path("one.jsonl").read_bytes() == whole
    assert not list(tmp_path.glob("[!l]*.html"))


def test_a_run_is_recorded_and_looked_at(tmp_path, capsys, monkeypatch):
    model = write_gguf(tmp_path / "tiny.gguf", random_llama(vocab_size=262), with_tokenizer=True)
    saved = tmp_path / "run.jsonl"
    command = ["generate", "hello", "--raw", "--model", str(model), "--max-tokens", "4"]
    assert cli.main([*command, "--trace", str(saved)]) == 0
    trace = Trace.read(saved)
    assert [len(chunk.sampled) for record in trace for chunk in record.chunks] == [1] * 4
    assert trace.facts.costs
    assert trace.steps[0].arrived[0].token_texts == ["hell", "o"]
    assert cli.main(["trace", str(saved)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(cli, "_let_go_of_stdout", lambda: None)  # pytest's stands in its place
    assert cli.main([*command, "--trace", str(tmp_path / "no" / "folder.jsonl")]) == 2
    assert capsys.readouterr().out == "hello"  # it fails before it answers
