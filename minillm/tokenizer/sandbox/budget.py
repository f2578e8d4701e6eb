"""The budget for a rendering: units of work and seconds of CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MappingView
from typing import Any, cast

from jinja2.sandbox import SecurityError

from minillm.tokenizer.sandbox.syntax_tree import MAX_INTEGER

STEP = 10  # units that a loop iteration, an operation or a call costs
SECONDS = 2.0  # base limit on computing time; each UNITS_PER_SECOND of the budget adds one second
UNITS_PER_SECOND = 50_000_000
MAX_DEPTH = 100  # levels of nested containers


class Budget:
    """The units of work and the seconds of its thread's CPU time that a rendering may still spend."""

    def __init__(self, units: int):
        self.units = self.left = units
        self.seconds = SECONDS + units / UNITS_PER_SECOND
        self.deadline = time.thread_time() + self.seconds

    def spend(self, units: int) -> None:
        """Charge `units`. Raise `SecurityError` if the units or the time are used up."""
        self.left -= units
        if self.left < 0:
            raise SecurityError(f"stopped: it loops too often or makes too much text (more than {self.units:,} units)")
        if time.thread_time() > self.deadline:
            raise SecurityError(f"stopped: still running after {self.seconds:.1f} s of computing")

    def charge_each(self, texts: Iterable[str], extra: int = 0) -> Iterator[str]:
        """Yield `texts`, charging the length of each plus `extra`."""
        for text in texts:
            self.spend(len(text) + extra)
            yield text

    def charge_result(self, result: Any) -> Any:
        """Return `result` after charging its length. Iterators and the views of a dict become lists.

        A lazy result would defer its work to a place where the budget cannot see it.
        """
        if isinstance(result, str | list | tuple | dict):
            self.spend(len(result))
        elif isinstance(result, int) and abs(result) >= MAX_INTEGER:
            raise SecurityError("stopped: an integer of more than 64 bits")
        elif isinstance(result, Iterator | MappingView):
            items = []
            for item in cast(Iterable[Any], result):  # every view of a dict is iterable, unlike the base class
                self.spend(STEP)
                items.append(item)
            return items
        return result

    def check_size(self, value: Any) -> Any:
        """Return `value`. Raise `SecurityError` if its contents, shared parts counted each time, exceed the budget.

        Called whenever a container is built. Without this check, `x = [x, x]` repeated forty times is a small
        object that takes 2^40 steps to print or to compare.
        """
        self.spend(STEP)
        if deep_size(value, self.units) > self.units:
            raise SecurityError(f"stopped: a list or dict that holds more than {self.units:,} characters and items")
        return value


def deep_size(value: Any, limit: int, depth: int = 0) -> int:
    """Count the characters and items in nested containers, shared parts each time. Stop counting beyond `limit`.

    Raises `SecurityError` if containers nest deeper than `MAX_DEPTH`: C code that recurses into a value, for
    example to hash it, may not check its stack.
    """
    if isinstance(value, str):
        return len(value) + 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    if depth == MAX_DEPTH:
        raise SecurityError(f"stopped: lists or dicts nested more than {MAX_DEPTH} deep")
    size = 1
    for part in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
        size += deep_size(part, limit - size, depth + 1)
        if size > limit:
            break
    return size
