"""Metrics computed from a trace alone: the latencies of each request, and the throughput and utilisation of the run.

TTFT is the time to first token, TPOT the time per output token after the first. Times are in seconds. A token is
available when its step ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minillm.trace.file import Trace
from minillm.trace.records import Arrival, StepRecord


@dataclass
class RequestMetrics:
    """Metrics of one request. Metrics of events that had not happened by the end of the trace are None.

    Attributes
    ----------
    request_id, num_prompt_tokens : the request's id, and the length of its prompt.
    num_cached_tokens : prompt tokens found in the prefix cache at its first admission.
    num_generated_tokens : tokens generated in all of its completions.
    queue_time : seconds from arrival to the step that first admitted it.
    ttft : seconds from arrival to the first token of any completion.
    tpot : mean seconds between two successive tokens of a completion; None if no completion has two tokens.
    inter_token_latencies : seconds between successive tokens, one completion after another.
    end_to_end : seconds from arrival to the end of its last completion.
    num_preemptions : number of preemptions of its completions.
    num_recomputed_tokens : tokens computed again after preemptions.
    finish_reason : the reason why the last of its completions ended.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    queue_time: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    inter_token_latencies: list[float] = field(default_factory=list)
    end_to_end: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    finish_reason: str | None = None


@dataclass
class RunMetrics:
    """Metrics of a whole run. Shares are from 0 to 1. Means are over the steps that computed something.

    Attributes
    ----------
    num_requests, num_finished : requests that arrived, and requests that ended with "stop" or "length".
    num_steps : steps that computed something.
    seconds : from the beginning of the first of these steps to the end of the last.
    num_computed_tokens, num_generated_tokens : input tokens computed, and output tokens sampled.
    throughput : output tokens per second.
    mean_batch_sequences, mean_batch_tokens : sequences per step, and tokens per step.
    batch_occupancy : mean sequences per step, as a share of `max_sequences`.
    kv_utilisation : mean share of the blocks that were held.
    peak_blocks : the largest number of blocks held in any step.
    hit_rate : share of the admitted prompts' tokens that were found in the prefix cache.
    num_preemptions, num_recomputed_tokens : sums over all requests.
    median_ttft, p95_ttft, median_tpot, p95_tpot : over the requests that have the metric; None if no request has it.
    """

    num_requests: int
    num_finished: int
    num_steps: int
    seconds: float
    num_computed_tokens: int
    num_generated_tokens: int
    throughput: float
    mean_batch_sequences: float
    mean_batch_tokens: float
    batch_occupancy: float
    kv_utilisation: float
    peak_blocks: int
    hit_rate: float
    num_preemptions: int
    num_recomputed_tokens: int
    median_ttft: float | None
    p95_ttft: float | None
    median_tpot: float | None
    p95_tpot: float | None


def request_metrics(trace: Trace) -> dict[str, RequestMetrics]:
    """Return the metrics of each request that arrived within the trace, by id, in order of arrival.

    If an id was reused after its request had finished, only the last request is included.
    """
    histories: dict[str, _RequestHistory] = {}
    for record in trace:
        for arrival in record.arrived:
            histories.pop(arrival.request_id, None)
            histories[arrival.request_id] = _RequestHistory(arrival)
        _add_step(record, histories)
    return {request_id: history.metrics() for request_id, history in histories.items()}


def run_metrics(trace: Trace, by_request: dict[str, RequestMetrics] | None = None) -> RunMetrics:
    """Return the metrics of a run.

    Parameters
    ----------
    by_request : the result of `request_metrics(trace)`; None to compute it.
    """
    steps = [record for record in trace if record.chunks]
    requests = (request_metrics(trace) if by_request is None else by_request).values()
    first_admissions = [
        admission for record in steps for admission in record.admitted if not admission.after_preemption
    ]
    seconds = steps[-1].end - steps[0].time if steps else 0.0
    generated = sum(len(chunk.sampled) for record in steps for chunk in record.chunks)
    ttfts = [request.ttft for request in requests if request.ttft is not None]
    tpots = [request.tpot for request in requests if request.tpot is not None]
    sequences = _mean(len(record.chunks) for record in steps)
    return RunMetrics(
        num_requests=len(requests),
        num_finished=sum(request.finish_reason in ("stop", "length") for request in requests),
        num_steps=len(steps),
        seconds=seconds,
        num_computed_tokens=sum(record.num_tokens for record in steps),
        num_generated_tokens=generated,
        throughput=generated / seconds if seconds else 0.0,
        mean_batch_sequences=sequences,
        mean_batch_tokens=_mean(record.num_tokens for record in steps),
        batch_occupancy=sequences / trace.facts.max_sequences,
        kv_utilisation=_mean(record.pool.num_held / record.pool.num_blocks for record in steps),
        peak_blocks=max((record.pool.num_held for record in steps), default=0),
        hit_rate=sum(a.num_cached_tokens for a in first_admissions)
        / max(1, sum(a.num_tokens for a in first_admissions)),
        num_preemptions=sum(request.num_preemptions for request in requests),
        num_recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
        median_ttft=percentile(ttfts, 50),
        p95_ttft=percentile(ttfts, 95),
        median_tpot=percentile(tpots, 50),
        p95_tpot=percentile(tpots, 95),
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile of `values`, with linear interpolation between neighbours; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass
class _RequestHistory:
    """The events of one request so far, from which its metrics are computed."""

    arrival: Arrival
    admitted_at: float | None = None
    ended_at: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    finish_reason: str | None = None
    ended: set[int] = field(default_factory=set)  # completions
    token_times: dict[int, list[float]] = field(default_factory=dict)  # by completion
    computed: dict[int, int] = field(default_factory=dict)  # by completion: positions computed so far

    def metrics(self) -> RequestMetrics:
        """Return the metrics."""
        arrival_time, times = self.arrival.time, self.token_times.values()
        gaps = [after - before for completion in times for before, after in pairwise(completion)]
        first = min((completion[0] for completion in times), default=None)
        return RequestMetrics(
            request_id=self.arrival.request_id,
            num_prompt_tokens=self.arrival.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=sum(map(len, times)),
            queue_time=None if self.admitted_at is None else self.admitted_at - arrival_time,
            ttft=None if first is None else first - arrival_time,
            tpot=_mean(gaps) if gaps else None,
            inter_token_latencies=gaps,
            end_to_end=None if self.ended_at is None else self.ended_at - arrival_time,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            finish_reason=self.finish_reason,
        )


def _add_step(record: StepRecord, histories: dict[str, _RequestHistory]) -> None:
    """Add the events of a step to the histories. Requests that arrived before the trace began have none."""
    for admission in record.admitted:
        if (history := histories.get(admission.request_id)) and not admission.after_preemption:
            history.admitted_at, history.num_cached_tokens = record.time, admission.num_cached_tokens
    for preemption in record.preempted:
        if history := histories.get(preemption.request_id):
            history.num_preemptions += 1
    for chunk in record.chunks:
        if history := histories.get(chunk.request_id):
            # Forks inherit the prompt, which the first completion has computed.
            num_computed = history.computed.get(
                chunk.completion, history.arrival.num_prompt_tokens * (chunk.completion > 0)
            )
            history.num_recomputed_tokens += max(0, min(num_computed, chunk.stop) - chunk.start)
            history.computed[chunk.completion] = max(num_computed, chunk.stop)
            for token in chunk.sampled:
                history.token_times.setdefault(token.completion, []).append(record.end)
    for finish in record.finished:
        if history := histories.get(finish.request_id):
            history.ended.add(finish.completion)
            if len(history.ended) == history.arrival.n:
                history.ended_at = record.time if finish.reason == "abort" else record.end
                history.finish_reason = finish.reason


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
