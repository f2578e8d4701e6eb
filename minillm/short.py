"""Long lists in a line that a debugger shows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

MOST = 8  # items that are named


def few(items: Iterable[object], separator: str = " ") -> str:
    """The first MOST items with `separator` between them, and how many more there are."""
    items = iter(items)
    named, more = [str(item) for item in islice(items, MOST)], sum(1 for _ in items)
    return separator.join([*named, f"and {more} more"] if more else named)
