"""Fair comparison: engines take turns, and only measurements that follow each other directly are compared.

A machine's speed varies: it heats up, or other programs start. Measuring one engine for a minute and then the other
would compare two minutes instead of two engines. So each round measures ours and, right after it, a peer, and the
round's ratio is of these two measurements. The result is the median of the rounds' ratios, shown with the smallest and
the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from minillm.errors import BenchmarkError

Measure = Callable[[], float]  # runs one turn; returns an amount that should be small, such as seconds


@dataclass(frozen=True)
class Spread:
    """Summary of a few numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the median, smallest and largest of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Turns:
    """The result of taking turns: amounts by engine, and for each peer and round, its amount divided by ours."""

    amounts: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # reasons by engine that could not be measured


def take_turns(ours: str, measures: Mapping[str, Measure], rounds: int) -> Turns:
    """Measure `ours`, a peer, `ours`, the next peer, and so on, `rounds` times.

    Parameters
    ----------
    ours : the engine that the others are compared with; a key of `measures`
    measures : runs a turn of each engine; an engine that raises BenchmarkError is not measured again

    Returns
    -------
    Turns. An engine that failed appears only in `failures`.
    """
    turns = Turns()

    def measure(name: str) -> float | None:
        if name in turns.failures:
            return None
        try:
            amount = measures[name]()
        except BenchmarkError as error:
            turns.failures[name] = str(error)
            return None
        turns.amounts.setdefault(name, []).append(amount)
        return amount

    peers = [name for name in measures if name != ours]
    for _ in range(rounds):
        if not [peer for peer in peers if peer not in turns.failures]:
            measure(ours)
        for peer in peers:
            if peer in turns.failures:
                continue
            our_amount, peer_amount = measure(ours), measure(peer)
            if our_amount is not None and peer_amount is not None:
                turns.ratios.setdefault(peer, []).append(peer_amount / our_amount)
    for failed in turns.failures:
        turns.amounts.pop(failed, None)
        turns.ratios.pop(failed, None)
    if ours in turns.failures:
        turns.ratios.clear()
    return turns
