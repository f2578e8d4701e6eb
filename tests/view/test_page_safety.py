"""The page is usable by keyboard and screen reader, on every screen, and no text in a trace can run as code."""

import pytest
from hypothesis import given, settings
from support.pages import SIZES, choose_step
from support.simulated_runs import single_step_run
from support.traces import traces

from minillm.view.browser import write_page
from minillm.view.printable import printable


def test_every_control_is_reached_with_tab_and_has_a_name(open_page, run):
    tab = open_page(run)
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
    assert names[:6] == ["first step", "previous step", "play", "next step", "last step", "step"]
    assert {"Tracks", "Text so far", "Table of requests"} <= set(names)
    unlabelled = tab.locator("canvas[role=img]:not([aria-label]), button:empty:not([aria-label])")
    assert unlabelled.count() == 0
    assert tab.locator("main, header, section[aria-label]").count() >= 7


def test_arrow_keys_move_between_tokens_and_not_the_clock(open_page, run):
    tab = open_page(run)
    choose_step(tab, 3)
    chunk = run.steps[3].chunks[0]
    tab.locator(".token").first.focus()
    assert f"position {chunk.start} of {chunk.request_id}" in tab.locator(".token-detail").text_content()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert tab.evaluate("minillm.clock.now") == 3


@pytest.mark.parametrize("size", SIZES)
def test_the_focused_element_is_not_under_the_controls(open_page, run, size):
    tab = open_page(run, size=size)
    tab.locator(".requests-table button").last.focus()
    script = """['.bar', ':focus'].map(name => document.querySelector(name).getBoundingClientRect())"""
    while True:  # upwards, because the controls are at the top
        tab.keyboard.press("Shift+Tab")
        bar, focused = tab.evaluate(script)
        if tab.locator("main :focus").count() == 0:
            break
        assert focused["top"] >= bar["bottom"]


def test_a_long_chunk_can_be_expanded_with_the_keyboard(open_page):
    trace = single_step_run("r", "the prompt", "all")
    trace.steps[0].chunks[0].token_ids = list(range(300))
    tab = open_page(trace)
    tab.locator(".more").press("Enter")
    assert tab.locator(".more").count() == 0
    assert tab.locator(".token:not(.out)").count() == 300
    assert tab.locator(":focus").text_content() == "#72"  # the first token that was hidden
    tab.keyboard.press("ArrowRight")
    assert tab.locator(":focus").text_content() == "#73"
    assert tab.locator('.token[tabindex="0"]').count() == 1
    trace.steps[0].chunks[0].token_ids = list(range(4010))
    tab = open_page(trace)
    tab.locator(".more").click()
    assert tab.locator("button.more").count() == 0
    assert tab.locator("span.more").text_content() == "… 10 more tokens …"


@pytest.mark.parametrize("number", [1, 2])
def test_the_page_fits_every_screen_in_light_and_dark(open_page, run, number):
    for size, scheme in zip(SIZES, ("light", "dark"), strict=True):
        tab = open_page(*[run] * number, size=size, scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
        background = "getComputedStyle(document.body).backgroundColor"
        for is_dark in (scheme == "dark", scheme == "light"):
            assert (tab.evaluate(background) == "rgb(18, 20, 23)") == is_dark
            contrasts = tab.evaluate(CONTRASTS)
            assert len(contrasts) == 9
            assert min(contrasts) >= 4.5, contrasts
            tab.locator("#theme").click()
        tab.set_viewport_size({"width": SIZES[1][0], "height": 600})
        assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES[1][0]


# WCAG 2.2's contrast ratios of the three text colours on the three backgrounds.
CONTRASTS = """() => {
    const style = getComputedStyle(document.documentElement);
    const luminance = name => {
        const hex = style.getPropertyValue("--" + name).trim();
        const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
            .map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return ["text", "quiet", "accent"].flatMap(text => ["bg", "card", "soft"].map(background => {
        const [a, b] = [luminance(text), luminance(background)].sort((x, y) => y - x);
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
def test_hostile_text_is_shown_and_never_executed(open_page, order):
    name, prompt, text = ("".join([*HOSTILE[shift:], *HOSTILE[:shift]][::order]) for shift in range(3))
    trace = single_step_run(name, prompt, text)
    trace.steps[0].chunks[0].sampled[0].token_text = prompt
    tab = open_page(trace, names=[name])
    assert tab.locator(".name").first.text_content() == printable(name)
    assert tab.locator(".prompt").text_content() == printable(prompt)
    assert tab.locator(".new-text").text_content() == printable(text)
    assert tab.locator(".token.out").text_content() == printable(prompt)
    assert tab.evaluate("window.ran") is None
    assert tab.locator("img, script").count() == 2  # the data, and the page's own script
    assert tab.title() == f"{printable(name)} – minillm trace"


def test_texts_of_a_hundred_thousand_letters(open_page):
    """The page opens in time only if its work grows linearly with the length of the texts."""
    name, prompt, text = ("🙂" + letter * 10**5 for letter in "npt")
    tab = open_page(single_step_run(name, prompt, text))
    tab.keyboard.press("ArrowDown")
    assert [len(tab.locator(part).text_content()) for part in (".prompt", ".new-text")] == [10**5 + 1] * 2


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


def test_the_security_policy_blocks_requests_and_other_scripts(browser, run, tmp_path):
    write_page([run], tmp_path / "page.html")
    tab = browser.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    blocked = tab.evaluate("""async () => {
        const blocked = [];
        document.addEventListener("securitypolicyviolation", event => blocked.push(event.effectiveDirective));
        const add = (tag, fields) => document.body.append(Object.assign(document.createElement(tag), fields));
        await fetch("https://example.org/").catch(() => 0);
        add("img", {src: "https://example.org/x.png"});
        add("script", {textContent: "window.ran = 1"});
        add("iframe", {src: "https://example.org/"});
        await new Promise(resolve => setTimeout(resolve, 100));
        return window.ran ? "ran" : blocked.map(name => name.split("-")[0]).sort();
    }""")
    tab.close()
    assert blocked == ["connect", "frame", "img", "script"]
