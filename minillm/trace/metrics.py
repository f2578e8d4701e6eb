"""What can be measured from a trace alone: how each request fared, and how well the run used what it had.

The names are those of the field: TTFT, time to first token; TPOT, time per output token after the first. Times are in
seconds, from a request's arrival on; a token comes when its step is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minillm.trace.file import Trace
from minillm.trace.records import Arrival, StepRecord


@dataclass
class RequestMetrics:
    """How one request fared. What has not happened by the trace's end is None.

    Attributes
    ----------
    request_id, num_prompt_tokens : the request.
    num_cached_tokens : prompt tokens found in the cache when it was first admitted.
    num_generated_tokens : of all its completions.
    queue_time : from arrival to the step that admitted it first.
    ttft : from arrival to the first token of any completion.
    tpot : mean time between two tokens of a completion; None if none has two.
    inter_token_latencies : each time between two tokens of a completion, one completion after another.
    end_to_end : from arrival to the end of its last completion.
    num_preemptions : how often it, or a completion of it, lost its blocks.
    num_recomputed_tokens : positions computed once more after that.
    finish_reason : of the completion that ended last.
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
    """How well a run used its time, its batches and its memory. Shares are 0 to 1, means are over steps with chunks.

    Attributes
    ----------
    num_requests, num_finished : arrived, and ended with "stop" or "length".
    num_steps : steps that computed something.
    seconds : from the beginning of the first such step to the end of the last.
    num_computed_tokens, num_generated_tokens : tokens that went in and came out.
    throughput : tokens that came out a second.
    mean_batch_sequences, mean_batch_tokens : sequences, and tokens, a step advanced.
    batch_occupancy : share of `max_sequences` that a step advanced.
    kv_utilisation : share of the blocks that were held.
    peak_blocks : most blocks held in any step.
    hit_rate : share of the admitted prompts' tokens that were found in the cache.
    num_preemptions, num_recomputed_tokens : of all requests.
    median_ttft, p95_ttft, median_tpot, p95_tpot : of the requests that have them; None if none has.
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
    """How each request that arrived within the trace fared, by its id, in order of arrival.

    Where an id was given again after its request had finished, the later request is told of.
    """
    journeys: dict[str, _Journey] = {}
    for record in trace:
        for arrival in record.arrived:
            journeys.pop(arrival.request_id, None)
            journeys[arrival.request_id] = _Journey(arrival)
        _follow(record, journeys)
    return {request_id: journey.metrics() for request_id, journey in journeys.items()}


def run_metrics(trace: Trace, by_request: dict[str, RequestMetrics] | None = None) -> RunMetrics:
    """How well the run used its time, its batches and its memory.

    `by_request` is what `request_metrics(trace)` gave, for whoever has it already.
    """
    steps = [record for record in trace if record.chunks]
    requests = (request_metrics(trace) if by_request is None else by_request).values()
    firsts = [admission for record in steps for admission in record.admitted if not admission.after_preemption]
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
        hit_rate=sum(a.num_cached_tokens for a in firsts) / max(1, sum(a.num_tokens for a in firsts)),
        num_preemptions=sum(request.num_preemptions for request in requests),
        num_recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
        median_ttft=percentile(ttfts, 50),
        p95_ttft=percentile(ttfts, 95),
        median_tpot=percentile(tpots, 50),
        p95_tpot=percentile(tpots, 95),
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that `percent` of `values` do not exceed, between two of them by proportion; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass
class _Journey:
    """A request's metrics in the making."""

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
        """What they come to."""
        since, times = self.arrival.time, self.token_times.values()
        gaps = [after - before for own in times for before, after in pairwise(own)]
        first = min((own[0] for own in times), default=None)
        return RequestMetrics(
            request_id=self.arrival.request_id,
            num_prompt_tokens=self.arrival.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=sum(map(len, times)),
            queue_time=None if self.admitted_at is None else self.admitted_at - since,
            ttft=None if first is None else first - since,
            tpot=_mean(gaps) if gaps else None,
            inter_token_latencies=gaps,
            end_to_end=None if self.ended_at is None else self.ended_at - since,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            finish_reason=self.finish_reason,
        )


def _follow(record: StepRecord, journeys: dict[str, _Journey]) -> None:
    """Note what a step brought to each request; those that came before the trace began are left out."""
    for admission in record.admitted:
        if (journey := journeys.get(admission.request_id)) and not admission.after_preemption:
            journey.admitted_at, journey.num_cached_tokens = record.time, admission.num_cached_tokens
    for preemption in record.preempted:
        if journey := journeys.get(preemption.request_id):
            journey.num_preemptions += 1
    for chunk in record.chunks:
        if journey := journeys.get(chunk.request_id):
            # A further completion parted from the first at the prompt's end: so much was computed for it, too.
            already = journey.computed.get(chunk.completion, journey.arrival.num_prompt_tokens * (chunk.completion > 0))
            stop = chunk.start + chunk.num_tokens
            journey.num_recomputed_tokens += max(0, min(already, stop) - chunk.start)
            journey.computed[chunk.completion] = max(already, stop)
            for token in chunk.sampled:
                journey.token_times.setdefault(token.completion, []).append(record.end)
    for finish in record.finished:
        if journey := journeys.get(finish.request_id):
            journey.ended.add(finish.completion)
            if len(journey.ended) == journey.arrival.n:
                journey.ended_at = record.time if finish.reason == "abort" else record.end
                journey.finish_reason = finish.reason


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
