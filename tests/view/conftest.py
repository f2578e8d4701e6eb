"""Fixtures of the browser tests: a Chromium, pages opened in it, and a run to show."""

import os
import shutil
from random import Random

import pytest
from playwright.sync_api import sync_playwright
from support.pages import SIZES
from support.simulated_runs import simulate

from minillm.engine import EngineConfig
from minillm.engine.sequence import Sequence
from minillm.trace import FREED
from minillm.trace.roofline import ModelCosts
from minillm.view.browser import write_page

COSTS = ModelCosts(1000, 8, 200, 50, 16)


@pytest.fixture(scope="package")
def browser():
    """The installed Chromium. Without one the tests are skipped, except in CI, where they fail."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        message = "Chromium is not installed; the browser tests need it (apt-get install chromium)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """A function that opens the page of some traces. Afterwards: no error was logged, and no network request made."""
    contexts, problems = [], []

    def open_page(*traces, size=SIZES[0], scheme="light", **options):
        path = tmp_path / "page.html"
        write_page(traces, path, **options)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)

        def handle(route):
            if route.request.url == path.as_uri():
                return route.continue_()
            problems.append(route.request.url)
            return route.abort()

        context.route("**/*", handle)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def simulated_run(policy, seed=1, num_blocks=12, windows=(20,)):
    """Seven requests in a pool too small for them, with preemptions, shared prefixes, forks and sliding windows."""
    config = EngineConfig(policy=policy, block_size=4, num_blocks=num_blocks, max_batch_tokens=16, max_sequences=4)
    requests = []
    for number in range(7):
        prompt, num_completions = [0] * 8 + [number + 1] * (number + 1), 2 if number == 2 else 1
        requests.append(
            (number, Sequence.from_prompt(f"r{number}", prompt, 10 + number, num_completions=num_completions))
        )
    trace = simulate(config, requests, Random(seed), windows)
    trace.facts.costs = COSTS
    return trace


@pytest.fixture(scope="session")
def make_run():
    return simulated_run


@pytest.fixture(scope="session")
def run():
    trace = simulated_run("chunked", num_blocks=24, windows=(20, None))
    assert any(record.preempted for record in trace)
    assert any(record.pool.copies for record in trace)
    assert any(record.prefix_hits for record in trace)
    assert any(FREED in table for record in trace for sequence in record.running for table in sequence.block_tables)
    return trace
