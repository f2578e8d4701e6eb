"""Budget: the work and the CPU time that one rendering of a template may still use."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.sandbox import SecurityError

STEP = 10  # units charged for a loop iteration, an operation or a call
BASE_SECONDS = 2.0  # CPU time that any rendering may take
UNITS_PER_SECOND = 50_000_000  # each 50 million units of the budget allow one more second
MAX_DEPTH = 100  # levels of nested containers
MAX_INTEGER = 2**64


class Budget:
    """The work and the CPU time of the current thread that a rendering may still use.

    Work is counted in units, each about one character or item of a result.

    Attributes
    ----------
    units : the initial budget
    remaining : the units not used yet
    seconds : the limit of CPU time
    deadline : CPU time of the thread at which the limit is reached, in seconds
    """

    def __init__(self, units: int):
        self.units = self.remaining = units
        self.seconds = BASE_SECONDS + units / UNITS_PER_SECOND
        self.deadline = time.thread_time() + self.seconds

    def charge(self, units: int) -> None:
        """Subtract `units` from the budget. Raise `SecurityError` if the budget or the time is exhausted."""
        self.remaining -= units
        if self.remaining < 0:
            raise SecurityError(
                f"stopped: it exceeds {self.units:,} units of work, because it loops too often or makes too much text"
            )
        if time.thread_time() > self.deadline:
            raise SecurityError(f"stopped: it is still running after {self.seconds:.1f} s of CPU time")

    def charge_each(self, texts: Iterable[str], extra: int = 0) -> Iterator[str]:
        """Yield each of `texts`, after charging its length plus `extra`."""
        for text in texts:
            self.charge(len(text) + extra)
            yield text

    def charge_result(self, result: Any) -> Any:
        """Charge the length of a result and return it. An iterator or a view of a dict is returned as a list.

        A lazy result would do its work later, outside the operation that was charged for it.
        """
        if isinstance(result, str | list | tuple | dict):
            self.charge(len(result))
        elif isinstance(result, int) and abs(result) >= MAX_INTEGER:
            raise SecurityError("stopped: a result is an integer of more than 64 bits")
        elif isinstance(result, Iterator | KeysView | ValuesView | ItemsView):
            items = []
            for item in result:
                self.charge(STEP)
                items.append(item)
            return items
        return result

    def charge_container(self, value: Any) -> Any:
        """Charge for building a container and return it. Raise `SecurityError` if its deep size exceeds the budget.

        Without this check, repeating `x = [x, x]` forty times builds a small object that takes 2^40 steps to print or
        to compare. The limit is the initial budget, not the remaining one.
        """
        self.charge(STEP)
        if deep_size(value, self.units) > self.units:
            raise SecurityError(f"stopped: a list or dict holds more than {self.units:,} characters and items")
        return value


def deep_size(value: Any, limit: int, depth: int = 0) -> int:
    """Return the number of characters and items in nested containers. The count stops once it exceeds `limit`.

    A shared part counts each time it occurs. Raise `SecurityError` if containers nest deeper than `MAX_DEPTH`, because
    C code that recurses into a value, for example to hash it, may not check its stack.
    """
    if isinstance(value, str):
        return len(value) + 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    if depth == MAX_DEPTH:
        raise SecurityError(f"stopped: lists or dicts are nested more than {MAX_DEPTH} levels deep")
    size = 1
    for part in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
        size += deep_size(part, limit - size, depth + 1)
        if size > limit:
            break
    return size
