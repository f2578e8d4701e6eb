"""Fair comparison: who is compared takes turns, and only neighbours in time are divided by each other.

A machine wanders: it heats up, its neighbours wake. Measuring one engine for a minute and then the other compares two
minutes, not two engines. So each round measures ours and, right after, the other; its ratio is of these two alone;
and the result is the median of the rounds' ratios, shown with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from minillm.errors import BenchmarkError

Measure = Callable[[], float]  # one turn: an amount of which less is better, such as seconds


@dataclass(frozen=True)
class Spread:
    """A few numbers in short."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, smallest and largest of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Turns:
    """What taking turns gave: amounts by engine, and for each peer, round by round, its amount over ours."""

    amounts: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # engines that could not be measured, and why


def take_turns(ours: str, measures: Mapping[str, Measure], rounds: int) -> Turns:
    """Measure `ours`, a peer, `ours`, the next peer, ... and all that `rounds` times.

    Parameters
    ----------
    ours : the engine that the others are compared with; one of `measures`
    measures : how each engine takes its turn; a BenchmarkError ends the part of the engine that raises it

    Returns
    -------
    Turns. An engine that failed is in `failures` and nowhere else.
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
