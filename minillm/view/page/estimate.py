"""The shortest possible time of each step, estimated with a roofline from the costs that the trace records."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from minillm.trace import StepRecord, Trace
from minillm.trace.roofline import ModelCosts, Roofline, Work, step_work


def estimates(trace: Trace, roofline: Roofline | None) -> dict[str, Any]:
    """Return the estimates for the page.

    Parameters
    ----------
    roofline : the machine's roofline; None for the best rates that any step of this run reached. The estimate then
        shows how far each step stayed below the best of its own run.

    Returns
    -------
    milliseconds : one estimate per step, None for steps without work; or None instead of the list.
    source : a sentence that describes the roofline, or explains why there is no estimate.
    """
    costs = trace.facts.costs
    if costs is None:
        return {
            "milliseconds": None,
            "source": "The trace does not contain the model's costs, so there is no estimate.",
        }
    works = [_work(costs, record) for record in trace]
    source = "the machine's roofline, as given"
    if roofline is None:
        roofline = best_rates(trace, works)
        source = "the best rates that any step of this run reached"
    if roofline is None:
        return {"milliseconds": None, "source": "No step took any time, so there is no estimate."}
    rates = [f"{rate:.4g} {unit}" for rate, unit in _rates(roofline) if isfinite(rate)]
    milliseconds = [None if work is None else _finite(roofline.seconds(work) * 1000) for work in works]
    return {"milliseconds": milliseconds, "source": f"{', '.join(rates) or 'No limit'}: {source}."}


def best_rates(trace: Trace, works: list[Work | None]) -> Roofline | None:
    """Return the highest bytes and operations per second of any step; None if no step with work took any time."""
    timed = [(work, seconds(record)) for work, record in zip(works, trace, strict=True) if work and seconds(record) > 0]
    if not timed:
        return None
    bandwidth = max(work.num_bytes / duration for work, duration in timed)
    peak = max(work.flops / duration for work, duration in timed)
    return Roofline(bandwidth or inf, peak or inf)  # a model without costs has no limit


def seconds(record: StepRecord) -> float:
    """Return the duration of a step in seconds."""
    return sum(record.milliseconds.values()) / 1000


def _work(costs: ModelCosts, record: StepRecord) -> Work | None:
    chunks = [(chunk.start, chunk.num_tokens) for chunk in record.chunks]
    return step_work(costs, chunks) if chunks else None


def _rates(roofline: Roofline) -> list[tuple[float, str]]:
    return [(roofline.bandwidth / 1e9, "GB/s"), (roofline.peak / 1e9, "GFLOP/s")]


def _finite(number: float) -> float | None:
    return float(f"{number:.5g}") if isfinite(number) else None
