"""A trace as the data of a page: small enough for thousands of steps, and nothing that a record says is lost,
but for the fifth decimal of log-probabilities and those behind it.

facts, names      what the run had in common, and what it is to be called
strings, tokens, names, requests, who      what numbers elsewhere stand for (`texts.py`)
steps             what each step changes (`steps.py`); `js/replay.js` makes StepRecords of them again
rows              a lane a sequence, with its cells as runs of equal ones: what Timeline says
columns           a number a step, for the charts
estimate          a roofline's (`estimate.py`)
requests, run     the metrics of `minillm.trace`
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
from minillm.view.look import COLOURS, OWNERS
from minillm.view.page.estimate import estimates
from minillm.view.page.steps import StepWriter
from minillm.view.page.texts import Texts, plain
from minillm.view.shown import shown
from minillm.view.timeline import Cell, Row, State, Timeline

STATES = list(State)
REQUEST_COLUMNS = (
    "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "queue_time", "ttft", "tpot", "end_to_end",
    "num_preemptions", "num_recomputed_tokens",
)  # fmt: skip
RUN_ROWS = (  # field, what people call it, how it is written
    ("num_finished", "requests finished", "count"),
    ("num_steps", "steps", "count"),
    ("seconds", "seconds", "seconds"),
    ("throughput", "tokens out a second", "rate"),
    ("median_ttft", "median TTFT", "milliseconds"),
    ("p95_ttft", "95th percentile TTFT", "milliseconds"),
    ("median_tpot", "median TPOT", "milliseconds"),
    ("p95_tpot", "95th percentile TPOT", "milliseconds"),
    ("mean_batch_sequences", "mean sequences a step", "rate"),
    ("kv_utilisation", "mean KV cache held", "share"),
    ("peak_blocks", "most blocks held", "count"),
    ("hit_rate", "prompts found in cache", "share"),
    ("num_preemptions", "preemptions", "count"),
    ("num_recomputed_tokens", "tokens computed again", "count"),
)


def look() -> dict[str, Any]:
    """The colours of states and owners, as all views have them; None stands for what the theme takes for quiet."""
    colours = {state: COLOURS[state].split()[-1] for state in STATES}
    return {
        "states": list(STATES),
        "colours": {state: colour if colour.startswith("#") else None for state, colour in colours.items()},
        "owners": OWNERS,
    }


def data(trace: Trace, name: str, roofline: Roofline | None = None) -> dict[str, Any]:
    """All that the page knows of a run; see the head of this file."""
    texts, timeline = Texts(), Timeline(trace.facts, history=None, kept_finished=None)
    writer = StepWriter(texts, trace.facts.num_blocks if trace.steps else 0)
    steps = []
    for record in trace:
        timeline.push(record)
        steps.append(writer.write(record))
    first = trace.steps[0].step if trace.steps else 0
    rows = [_row(row, first, texts) for row in timeline.everyone()]
    metrics = request_metrics(trace)
    return {
        "name": shown(name),
        "facts": plain(asdict(trace.facts)),
        "first": first,
        "stages": STAGES,
        "steps": steps,
        "rows": rows,
        "columns": _columns(trace.steps),
        "estimate": estimates(trace, roofline),
        "metrics": [_request(texts.request(request_id), fared) for request_id, fared in metrics.items()],
        "run": _run(run_metrics(trace, metrics)),
    } | texts.tables()


def _row(row: Row, first: int, texts: Texts) -> dict[str, Any]:
    return {
        "name": texts.name(row.name),
        "letter": row.letter,
        "came": row.came - first,
        "since": row.since - first,
        "until": None if row.until is None else row.until - first,
        "reason": row.reason and shown(row.reason),
        "cells": _runs(row.cells, first),
    }


def _runs(cells: dict[int, Cell], first: int) -> list[int]:
    """Cells as one flat list, four numbers a run of equal ones: from which step on, how many, which state, tokens.

    The cell in which an answer ended follows what the same step meant to it until then.
    """
    flat: list[int] = []
    following, last = None, None
    for step, cell in cells.items():
        if step == following and cell == last:
            flat[-3] += 1
        else:
            states = [cell.state] if cell.before is None else [cell.before, cell.state]
            flat += [number for state in states for number in (step - first, 1, STATES.index(state), cell.num_tokens)]
        following, last = step + 1, cell
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


def _request(number: int, metrics: RequestMetrics) -> list[Any]:
    """The request's number, why it ended, and REQUEST_COLUMNS."""
    reason = metrics.finish_reason and shown(metrics.finish_reason)
    return [number, reason, *(_measured(metrics, name) for name in REQUEST_COLUMNS)]


def _run(metrics: RunMetrics) -> list[list[Any]]:
    return [[label, kind, _measured(metrics, name)] for name, label, kind in RUN_ROWS]


def _measured(metrics: RequestMetrics | RunMetrics, name: str) -> float | None:
    """A metric; None as well where it is more than a number holds, as the rate of a run that took next to no time."""
    value = getattr(metrics, name)
    return value if value is None or isfinite(value) else None
