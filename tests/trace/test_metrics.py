"""Metrics: computed by hand for a small run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.traces import FACTS, step

from minillm.trace import (
    Admission,
    Arrival,
    Finish,
    Preemption,
    SampledToken,
    ScheduledChunk,
    Trace,
    percentile,
    request_metrics,
    run_metrics,
)


def chunk(request_id, start, tokens, sampled=(), completion=0):
    output = [SampledToken(7, None, of_completion, "g") for of_completion in sampled]
    return ScheduledChunk(request_id, completion, "prefill", start, [5] * tokens, [[0]], output)


def test_metrics_of_a_small_run():
    """Request a has two completions; the second is preempted after three tokens. Request b waits for one step, and half
    of its prompt is cached. Request c is aborted while it waits."""
    trace = Trace(
        FACTS,
        [
            step(
                0,
                arrived=[Arrival(name, 0.0, 4, None, {}, n, 9, 0) for name, n in (("a", 2), ("b", 1), ("c", 1))],
                admitted=[Admission("a", 0, 4, 0, False)],
                chunks=[chunk("a", 0, 4, sampled=[0, 1])],
            ),
            step(
                1,
                aborted=["c"],
                finished=[Finish("c", 0, "abort")],
                admitted=[Admission("b", 0, 4, 2, False)],
                chunks=[chunk("a", 4, 1, [0]), chunk("a", 4, 1, [1], 1), chunk("b", 2, 2, [0])],
            ),
            step(
                2,
                preempted=[Preemption("a", 1, 5)],
                finished=[Finish("a", 0, "stop"), Finish("b", 0, "length")],
                chunks=[chunk("a", 5, 1, [0]), chunk("b", 4, 1, [0])],
            ),
            step(3),  # an empty step, which no mean includes
            step(
                4,
                admitted=[Admission("a", 1, 6, 1, True)],
                finished=[Finish("a", 1, "length")],
                chunks=[chunk("a", 1, 5, [1], 1)],
            ),
        ],
    )
    requests = request_metrics(trace)
    assert list(requests) == ["a", "b", "c"]
    a, b, c = requests.values()
    assert (a.queue_time, a.ttft, a.end_to_end, a.finish_reason) == (0.0, 0.5, 4.5, "length")
    assert a.inter_token_latencies == [1.0, 1.0, 1.0, 3.0]
    assert a.tpot == 1.5
    assert (a.num_generated_tokens, a.num_preemptions, a.num_recomputed_tokens) == (6, 1, 4)  # positions 1 to 4
    assert (b.queue_time, b.ttft, b.tpot, b.end_to_end) == (1.0, 1.5, 1.0, 2.5)
    assert (b.num_cached_tokens, b.num_recomputed_tokens) == (2, 0)
    assert (c.queue_time, c.ttft, c.tpot, c.end_to_end, c.finish_reason) == (None, None, None, 1.0, "abort")
    run = run_metrics(trace)
    assert (run.num_requests, run.num_finished, run.num_steps, run.seconds) == (3, 2, 4, 4.5)
    assert (run.num_computed_tokens, run.num_generated_tokens) == (4 + 4 + 2 + 5, 8)
    assert run.throughput == 8 / 4.5
    assert (run.mean_batch_sequences, run.batch_occupancy) == (7 / 4, 7 / 16)
    assert (run.kv_utilisation, run.peak_blocks, run.hit_rate) == (2 / 8, 2, 2 / 8)
    assert (run.num_preemptions, run.num_recomputed_tokens) == (1, 4)
    assert (run.median_ttft, run.median_tpot) == (1.0, 1.25)


def test_metrics_of_an_empty_trace():
    run = run_metrics(Trace(FACTS))
    assert (run.num_requests, run.seconds, run.throughput, run.median_ttft) == (0, 0.0, 0.0, None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_equal_numpy(values, percent):
    np.testing.assert_allclose(percentile(values, percent), np.percentile(values, percent), rtol=1e-9, atol=1e-6)
    assert percentile([], percent) is None
