"""Helpers for the tests of the browser page."""

from __future__ import annotations

from typing import Any

import pytest

SIZES = [(1280, 900), (390, 844)]


def choose_step(tab: Any, position: int) -> None:
    """Move the slider, and draw."""
    tab.locator("#slider").fill(str(position))
    tab.evaluate("minillm.frame()")


def texts(tab: Any, selector: str) -> list[str]:
    """The texts of all matching elements."""
    return tab.locator(selector).evaluate_all("items => items.map(item => item.textContent)")


def wait_until(tab: Any, condition: str) -> None:
    """Wait for a condition. Playwright's `wait_for_function` needs `eval`, which the page's policy forbids."""
    for _ in range(500):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(20)
    pytest.fail(f"{condition} did not become true")


def pictures(tab: Any) -> list[str]:
    """All canvases of the views, as data URLs."""
    return tab.locator(".views canvas[role=img]").evaluate_all("all => all.map(canvas => canvas.toDataURL())")
