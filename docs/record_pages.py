"""Take the screenshots of the browser view, `docs/images/trace.png` and `docs/images/traces-side-by-side.png`.

    python docs/record_pages.py

The script serves the requests of `examples/batching.py` with the default model, writes the pages, and opens them in an
installed Chromium. It needs Playwright and Pillow, which the extra `test` installs.
"""

from __future__ import annotations

import io
import runpy
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from minillm import LLM
from minillm.trace import Trace
from minillm.view import write_page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
STEP = 24  # in the picture of one trace: the second chunk of a long prompt, beside a decode
SHARE = 0.36  # of the duration, in the picture of two traces
FOLLOWED = 4  # track number


def record(llm: LLM, policy: str) -> Trace:
    """Serve the example's requests twice, so that the kernels are compiled, and return the second run."""
    example = runpy.run_path(str(ROOT / "examples" / "batching.py"))
    list(example["serve"](llm, example["make_engine"](llm, policy), example["REQUESTS"]))
    engine = example["make_engine"](llm, policy)
    return Trace(engine.facts, list(example["serve"](llm, engine, example["REQUESTS"])))


def save_screenshot(page: Page, position: str, path: Path) -> None:
    """Move the page's clock, follow one sequence, and save a picture with a palette of 256 colours."""
    page.evaluate(f"minillm.clock.set({position})")
    page.evaluate(f"minillm.panels.forEach(panel => panel.follow(panel.run.tracks[{FOLLOWED}])), minillm.frame()")
    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot()))
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


def main() -> None:
    """Record the runs under two policies, and take both screenshots."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("error: Chromium is not installed (apt-get install chromium)")
    llm = LLM()
    static, chunked = record(llm, "static"), record(llm, "chunked")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        one, two = Path(folder) / "one.html", Path(folder) / "two.html"
        write_page([chunked], one)
        write_page([static, chunked], two)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1180})
        page.goto(one.as_uri())
        save_screenshot(page, str(STEP), IMAGES / "trace.png")
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="dark")
        page.goto(two.as_uri())
        save_screenshot(page, f"{SHARE} * minillm.clock.end", IMAGES / "traces-side-by-side.png")
        browser.close()


if __name__ == "__main__":
    main()
