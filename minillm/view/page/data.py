"""A trace as the JSON data of the page. It is compact enough for thousands of steps, and lossless except for
log-probabilities, which are rounded to four decimals.

facts, name                the header of the trace, and its title
strings, tokens, names,
requests, sequences        the tables that indices elsewhere refer to (`interning.py`)
steps                      the changes of each step (`steps.py`), from which `js/replay.js` rebuilds the StepRecords
tracks                     one track per sequence, from Timeline; equal adjacent cells are run-length encoded
columns                    lists with one number per step, for the charts
estimate                   the shortest possible time of each step (`estimate.py`)
request_metrics,
run_metrics                the metrics of `minillm.trace`
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from minillm.trace import (
    DECODE,
    PREFILL,
    STAGES,
    RequestMetrics,
    RunMetrics,
    StepRecord,
    Trace,
    request_metrics,
    run_metrics,
)
from minillm.trace.roofline import Roofline
from minillm.view.glyphs import OWNER_COLOURS, STATE_STYLES
from minillm.view.page.estimate import estimates
from minillm.view.page.interning import Interner, page_value
from minillm.view.page.steps import StepWriter
from minillm.view.printable import printable
from minillm.view.timeline import Cell, State, Timeline, Track

STATES = list(State)
REQUEST_METRICS = (
    "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "queue_time", "ttft", "tpot", "end_to_end",
    "num_preemptions", "num_recomputed_tokens",
)  # fmt: skip
RUN_METRICS = (  # field, label, number format
    ("num_finished", "requests finished", "count"),
    ("num_steps", "steps", "count"),
    ("seconds", "duration", "seconds"),
    ("throughput", "output tokens per second", "rate"),
    ("median_ttft", "median TTFT", "milliseconds"),
    ("p95_ttft", "95th percentile TTFT", "milliseconds"),
    ("median_tpot", "median TPOT", "milliseconds"),
    ("p95_tpot", "95th percentile TPOT", "milliseconds"),
    ("mean_batch_sequences", "mean sequences per step", "rate"),
    ("kv_utilisation", "mean KV cache held", "share"),
    ("peak_blocks", "peak blocks held", "count"),
    ("hit_rate", "prefix cache hit rate", "share"),
    ("num_preemptions", "preemptions", "count"),
    ("num_recomputed_tokens", "recomputed tokens", "count"),
)


def palette() -> dict[str, Any]:
    """Return the colours of states and owners. None means the theme's colour of secondary text."""
    colours = {state: STATE_STYLES[state].split()[-1] for state in STATES}
    return {
        "states": list(STATES),
        "colours": {state: colour if colour.startswith("#") else None for state, colour in colours.items()},
        "owners": OWNER_COLOURS,
    }


def page_data(trace: Trace, name: str, roofline: Roofline | None = None) -> dict[str, Any]:
    """Return the page's data of one run; the head of this file lists its keys."""
    interner, timeline = Interner(), Timeline(trace.facts, max_cells=None, max_finished=None)
    writer = StepWriter(interner, trace.facts.num_blocks if trace.steps else 0, trace.facts.num_groups)
    steps = []
    for record in trace:
        timeline.push(record)
        steps.append(writer.write(record))
    first = trace.steps[0].step if trace.steps else 0
    tracks = [_track(track, first, interner) for track in timeline.all_tracks()]
    by_request = request_metrics(trace)
    return {
        "name": printable(name),
        "facts": page_value(asdict(trace.facts)),
        "first": first,
        "stages": STAGES,
        "steps": steps,
        "tracks": tracks,
        "columns": _columns(trace.steps),
        "estimate": estimates(trace, roofline),
        "request_metrics": [_request(interner.request(name), metrics) for name, metrics in by_request.items()],
        "run_metrics": _run(run_metrics(trace, by_request)),
    } | interner.tables()


def _track(track: Track, first: int, interner: Interner) -> dict[str, Any]:
    return {
        "name": interner.name(track.name),
        "letter": track.letter,
        "created": track.created_step - first,
        "first": track.first_step - first,
        "end": None if track.end_step is None else track.end_step - first,
        "finish_reason": track.finish_reason and printable(track.finish_reason),
        "cells": _run_lengths(track.cells, first),
    }


def _run_lengths(cells: dict[int, Cell], first: int) -> list[int]:
    """Return cells as a flat list with four numbers per run of equal cells: first step, length, state, tokens.

    The cell in which a sequence ended follows a cell with its state in the same step before the end.
    """
    flat: list[int] = []
    next_step: int | None = None
    previous: Cell | None = None
    for step, cell in cells.items():
        if step == next_step and cell == previous:
            flat[-3] += 1
        else:
            states = [cell.state] if cell.state_before_end is None else [cell.state_before_end, cell.state]
            flat += [number for state in states for number in (step - first, 1, STATES.index(state), cell.num_tokens)]
        next_step, previous = step + 1, cell
    return flat


def _columns(steps: list[StepRecord]) -> dict[str, list[int]]:
    def tokens(record: StepRecord, phase: str) -> int:
        return sum(chunk.num_tokens for chunk in record.chunks if chunk.phase == phase)

    return {
        "prefill": [tokens(record, PREFILL) for record in steps],
        "decode": [tokens(record, DECODE) for record in steps],
        "running": [len(record.running) for record in steps],
        "waiting": [record.num_waiting for record in steps],
        "held": [record.pool.num_held for record in steps],
        "cached": [record.pool.num_cached for record in steps],
    }


def _request(index: int, metrics: RequestMetrics) -> list[Any]:
    """Return the request's index, its finish reason, and its REQUEST_METRICS."""
    reason = metrics.finish_reason and printable(metrics.finish_reason)
    return [index, reason, *(_metric(metrics, name) for name in REQUEST_METRICS)]


def _run(metrics: RunMetrics) -> list[list[Any]]:
    return [[label, number_format, _metric(metrics, name)] for name, label, number_format in RUN_METRICS]


def _metric(metrics: RequestMetrics | RunMetrics, name: str) -> float | None:
    """Return a metric, or None if it is infinite, such as the rate of a run that took almost no time."""
    value = getattr(metrics, name)
    return value if value is None or isfinite(value) else None
