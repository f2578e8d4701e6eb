"""How long each step would have taken at best: a roofline's estimate, from the trace's costs alone."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from minillm.trace import StepRecord, Trace
from minillm.trace.roofline import Roofline, Work, step_work


def estimates(trace: Trace, roofline: Roofline | None) -> dict[str, Any]:
    """For the page: milliseconds a step, or None, and in words which roofline that is, or why there is none.

    Parameters
    ----------
    roofline : the machine's; None for the best rates that a step of this very run reached, so that the distance says
        how much slower than the run's best a step was.
    """
    if trace.facts.costs is None:
        return {"milliseconds": None, "source": "The trace does not say what its model costs, so there is no estimate."}
    works = [_work(trace, record) for record in trace]
    source = "the machine's roofline, as given"
    if roofline is None:
        roofline = reached(trace, works)
        source = "the best that any step of this run reached"
    if roofline is None:
        return {"milliseconds": None, "source": "No step took any time, so there is no estimate."}
    rates = [f"{rate:.4g} {unit}" for rate, unit in _rates(roofline) if isfinite(rate)]
    milliseconds = [None if work is None else _finite(roofline.seconds(work) * 1000) for work in works]
    return {"milliseconds": milliseconds, "source": f"{', '.join(rates) or 'No limit'}: {source}."}


def reached(trace: Trace, works: list[Work | None]) -> Roofline | None:
    """The most bytes and the most operations a second that any step came to; None if no step says."""
    timed = [(work, took(record)) for work, record in zip(works, trace, strict=True) if work and took(record) > 0]
    if not timed:
        return None
    bandwidth = max(work.num_bytes / seconds for work, seconds in timed)
    peak = max(work.flops / seconds for work, seconds in timed)
    return Roofline(bandwidth or inf, peak or inf)  # a model that costs nothing is limited by nothing


def took(record: StepRecord) -> float:
    """Seconds from the step's beginning to its end."""
    return sum(record.milliseconds.values()) / 1000


def _work(trace: Trace, record: StepRecord) -> Work | None:
    chunks = [(chunk.start, chunk.num_tokens) for chunk in record.chunks]
    return step_work(trace.facts.costs, chunks) if chunks else None


def _rates(roofline: Roofline) -> list[tuple[float, str]]:
    return [(roofline.bandwidth / 1e9, "GB/s"), (roofline.peak / 1e9, "GFLOP/s")]


def _finite(number: float) -> float | None:
    return float(f"{number:.5g}") if isfinite(number) else None
