"""The page in a real browser: every view agrees with the records."""

import re
from bisect import bisect_right
from dataclasses import replace

import pytest
from playwright.sync_api import expect
from support.pages import choose_step, pictures, texts, wait_until

from minillm.trace import FREED, Trace, request_metrics, sequence_name
from minillm.view import Timeline
from minillm.view.printable import printable


def test_the_slider_moves_every_view_to_its_record(open_page, run):
    tab, timeline = open_page(run), Timeline(run.facts, max_cells=None, max_finished=None)
    answers, before = {}, None
    for record in run:
        timeline.push(record)
        for chunk in record.chunks:
            for token in chunk.sampled:
                name = sequence_name(chunk.request_id, token.completion)
                answers.setdefault(name, []).append(printable(token.text))
        if record.step % 7 != 3:
            continue
        choose_step(tab, record.step)
        assert tab.evaluate("minillm.recordAt(0, minillm.clock.now).step") == record.step
        summary = tab.locator(".summary").text_content()
        pool = record.pool
        assert summary.startswith(f"Step {record.step}: ")
        assert f"{len(record.running)} running, {record.num_waiting} waiting" in summary
        assert f"{pool.num_held} of {pool.num_blocks} blocks held" in summary
        label = tab.locator(".map").get_attribute("aria-label")
        assert f"{pool.num_held} of {pool.num_blocks} blocks held, {pool.num_cached} cached" in label
        assert texts(tab, ".tokens .chunk .name") == [chunk.name for chunk in record.chunks]
        assert texts(tab, ".tokens .token.out") == [f"={t.token_id}" for c in record.chunks for t in c.sampled]
        tokens = texts(tab, ".tokens .token:not(.out)")
        assert [token[1:].strip(">") for token in tokens] == [str(i) for c in record.chunks for i in c.token_ids]
        events = " ".join(texts(tab, ".events li"))
        for event in record.admitted + record.preempted + record.finished:
            assert event.name in events
        assert events.count("preempted") == len(record.preempted)
        states = dict(zip(texts(tab, ".requests tbody .name"), texts(tab, ".requests tbody .state"), strict=True))
        for arrival in (arrival for step in run for arrival in step.arrived):
            track = timeline.tracks.get(arrival.request_id)
            cell = track and track.cell(record.step)
            assert states[arrival.request_id] == (cell.state if cell else "ended" if track else "not arrived")
        drawn = pictures(tab)
        if before:
            assert all(one != other for one, other in zip(before, drawn, strict=True))
        before = drawn
        for sequence in record.running:
            name = sequence.name
            tab.evaluate(
                "number => { const [panel] = minillm.panels; panel.follow(panel.run.tracks[number]); }",
                timeline.tracks[name].number,
            )
            tab.evaluate("minillm.frame()")
            items, held, num_freed = [], [], 0
            for group, table in enumerate(sequence.block_tables):
                freed, live = table.count(FREED), [block for block in table if block != FREED]
                num_freed, held = num_freed + freed, held + live
                items += ["group 0, window 20", "group 1, no window"][group : group + 1]
                items += [f"{freed} freed"] * (freed > 0)
                shared = [pool.references[block] for block in live]
                items += [f"{b}{f' ×{count}' if count > 1 else ''}" for b, count in zip(live, shared, strict=True)]
            assert texts(tab, ".block-table li") == items
            end = 4 * len(sequence.block_tables[1])
            title = f"positions {end - 4} to {end - 1} are in block {held[-1]}"
            assert tab.locator(".block-table li").last.get_attribute("title") == title
            if num_freed:
                title = f"no later query can read positions 0 to {4 * num_freed - 1}"
                assert tab.locator(".block-table .freed").first.get_attribute("title") == title
            label = tab.locator(".map").get_attribute("aria-label")
            assert f"{name} holds blocks {', '.join(map(str, held))}" in label
            assert (f"has freed {num_freed}." in label) == (num_freed > 0)
            assert tab.locator(".followed-heading bdi").text_content() == name
            new_text = tab.locator(".new-text").text_content()
            shown = tab.locator(".prompt").text_content(), tab.locator(".answer").text_content() + new_text
            assert shown == (f"{sequence.request_id} says ", "".join(answers.get(name, [])))
            sampled = [t for c in record.chunks for t in c.sampled if sequence_name(c.request_id, t.completion) == name]
            assert new_text == "".join(printable(token.text) for token in sampled)


def test_keys(open_page, run):
    tab, last = open_page(run), len(run) - 1
    now = lambda: tab.evaluate("minillm.clock.now")  # noqa: E731
    for key, step in (
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last),
        ("PageUp", last - 10), ("PageDown", last), ("Home", 0), ("ArrowLeft", 0), ("PageDown", 10),
    ):  # fmt: skip
        tab.keyboard.press(key)
        assert now() == step, key
    expect(tab.locator("#live")).to_contain_text("Step 10: ")  # announced to screen readers
    followed = tab.locator(".followed-heading bdi")
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
    tab.locator("#play").press("Enter")  # at the end, it starts again from the beginning
    wait_until(tab, "minillm.clock.now < minillm.clock.end")


def test_a_click_chooses_a_step_and_a_sequence(open_page, run):
    tab = open_page(run)
    box = tab.locator(".tracks canvas").bounding_box()
    tab.mouse.click(box["x"] + box["width"] - 3, box["y"] + 18 + 18 * 2 + 5)  # the third track, at the right edge
    tab.evaluate("minillm.frame()")
    expect(tab.locator(".followed-heading bdi")).to_have_text("r2")
    assert tab.evaluate("minillm.clock.now") == len(run) - 1
    tab.locator(".charts").click(position={"x": 140, "y": 40})
    assert tab.evaluate("minillm.clock.now") == 0
    tab.select_option("#width", "time")
    tab.select_option("#width", "tokens")
    tab.locator("#zoomIn").click()
    expect(tab.locator(".xscroll")).to_be_visible()


def test_requests_can_be_sorted_and_followed(open_page, run):
    tab, metrics = open_page(run), request_metrics(run)
    names = lambda: texts(tab, ".requests tbody .name")  # noqa: E731
    assert names() == list(metrics)
    head = tab.locator(".requests thead button", has_text="TTFT")
    for descending in (False, True):
        head.click()
        times = [metrics[name].ttft for name in names()]
        assert times == sorted(times, reverse=descending)
        assert tab.locator("th[aria-sort=descending]").count() == descending
    tab.locator(".requests tbody button", has_text="r5").press("Enter")
    expect(tab.locator(".followed-heading bdi")).to_have_text("r5")
    expect(tab.locator("tr.chosen .name")).to_have_text("r5")


def test_two_runs_share_one_clock(open_page, make_run):
    two = [make_run("static"), make_run("chunked", num_blocks=30)]
    two[1].steps = two[1].steps[2:]  # a trace can begin at any step; its clock begins there
    tab = open_page(*two, names=["one", "other"])
    begins = [[record.time - trace.steps[0].time for record in trace] for trace in two]
    moments = sorted({*begins[0], *begins[1]})
    steps = lambda: [int(re.match(r"Step (\d+)", text)[1]) for text in texts(tab, ".summary")]  # noqa: E731

    def expected(now):
        return [
            trace.steps[max(0, bisect_right(begin, now) - 1)].step for trace, begin in zip(two, begins, strict=True)
        ]

    for position in (0, 1234, 5000, 9100, 10_000):
        choose_step(tab, position)
        now = tab.evaluate("minillm.clock.now")
        assert now == pytest.approx(position / 10_000 * max(trace.steps[-1].end - trace.steps[0].time for trace in two))
        assert steps() == expected(now)
    tab.keyboard.press("Home")
    for moment in moments[1:6]:
        tab.keyboard.press("ArrowRight")
        tab.evaluate("minillm.frame()")
        assert tab.evaluate("minillm.clock.now") == moment
        assert steps() == expected(moment)
    scales = tab.evaluate("minillm.panels.map(panel => panel.axis.scale)")
    assert scales[0] == pytest.approx(scales[1])  # both have the same time scale
    assert texts(tab, "#comparison tbody th") == ["one", "other"] == texts(tab, "h2.name")


def test_a_very_large_pool_is_drawn_in_part(open_page, run):
    num_added = 60_000 - run.facts.num_blocks
    steps = [
        replace(record, pool=replace(record.pool, references=[*record.pool.references, *[1] * num_added]))
        for record in run.steps[:2]
    ]
    tab = open_page(Trace(replace(run.facts, num_blocks=60_000), steps))
    held = steps[0].pool.num_held
    assert f"Block pool: {held} of 60000 blocks held" in tab.locator(".map").get_attribute("aria-label")
    assert tab.locator(".block-detail").text_content() == "Only the first 40,000 of 60,000 blocks are drawn."


def test_a_trace_without_steps(open_page, run):
    tab = open_page(Trace(run.facts), Trace(run.facts))
    assert "This trace has no steps" in tab.locator(".empty").first.text_content()
    assert tab.locator(".views:visible").count() == 0
    tab.keyboard.press("ArrowRight")
