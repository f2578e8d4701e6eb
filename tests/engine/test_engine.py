"""The engine: under every policy and with any pool size, a request gets the same bits as when it runs alone.

MINILLM_EXAMPLES=5000 runs 5000 examples instead of 100. This takes minutes.
"""

import os
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_cases import MODELS, RecordedAnswers, overwrite_unused_blocks

from minillm import EngineConfig, RequestError, SamplingParams
from minillm.engine.scheduler import POLICIES
from minillm.engine.waiting_queue import ADMISSIONS
from minillm.trace import StepRecord, Trace, from_json, request_metrics, run_metrics, to_json

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "


tails = st.lists(st.integers(3, 6), max_size=6)


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 3),
    stop=st.sampled_from([(), tuple(LETTERS[:20]), ("ab", *LETTERS[20:40])]),
    stop_token_ids=st.sampled_from([(), tuple(range(100, 120))]),
    ignore_eos=st.booleans(),
    logprobs=st.just(True),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)


@st.composite
def workloads(draw):
    """Draw a model, requests that share prefixes, the steps at which they arrive and are aborted, and a config."""
    model_index = draw(st.integers(0, len(MODELS) - 1))
    prefixes = draw(st.lists(st.lists(st.integers(3, 6), max_size=20), min_size=1, max_size=2))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        prefix = draw(st.sampled_from(prefixes))
        prompt = prefix[: draw(st.integers(0, len(prefix)))] + draw(tails)
        requests.append((prompt or [3], draw(sampling_params), draw(st.integers(0, 2))))
    arrivals = [draw(st.integers(0, 8)) for _ in requests]  # each request arrives before this step
    aborts = draw(st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 12), max_size=2))
    block_size = draw(st.integers(1, 9))
    num_positions = max(len(prompt) + params.max_tokens - 1 for prompt, params, _ in requests)
    blocks_of_longest, max_batch_tokens = -(-num_positions // block_size), draw(st.integers(1, 40))
    live_blocks = [  # of the longest request, per KV-cache group
        blocks_of_longest if window is None else 1 - (2 - window - max_batch_tokens) // block_size
        for window in MODELS[model_index][2]
    ]
    min_blocks = sum(min(blocks_of_longest, live) for live in live_blocks)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICIES)),
        block_size=block_size,
        num_blocks=min_blocks + draw(st.integers(0, 6)),
        max_batch_tokens=max_batch_tokens,
        max_sequences=draw(st.integers(max(params.n for _, params, _ in requests), 6)),
        prefix_caching=draw(st.booleans()),
        admission=draw(st.sampled_from(ADMISSIONS)),
        watermark=draw(st.sampled_from([0.0, 0.3])),
        kv_dtype=draw(st.sampled_from(["float32", "float16"])),
    )
    return model_index, requests, arrivals, aborts, config


def serve(engine, requests, arrivals, aborts):
    """Return the records of all steps, and the indices of the aborted requests."""
    records, aborted, step = [], set(), 0
    while step <= max(arrivals) or engine.has_unfinished:
        for number, (prompt, params, priority) in enumerate(requests):
            if arrivals[number] == step:
                engine.add_request(prompt, params, request_id=str(number), priority=priority)
        for number, abort_step in aborts.items():
            if abort_step == step and engine.scheduler.is_unfinished(str(number)):
                engine.abort(str(number))
                aborted.add(number)
        records.append(engine.step())
        overwrite_unused_blocks(engine)
        step += 1
        assert step < 2000
    records.append(engine.step())  # reports the aborts since the last step
    return records, aborted


def check_metrics(trace, requests, answers):
    """Check the metrics against the requests and the answers, and against each other."""
    run, by_request = run_metrics(trace), request_metrics(trace)
    assert sorted(by_request) == sorted(str(number) for number in range(len(requests)))
    assert run.num_generated_tokens == sum(map(len, answers.tokens.values()))
    assert run.peak_blocks <= trace.facts.num_blocks
    assert 0 <= run.hit_rate < 1
    assert 0 < run.batch_occupancy <= 1 or not run.num_steps
    assert trace.facts.prefix_caching or run.hit_rate == 0
    for number, (prompt, _, _) in enumerate(requests):
        metrics = by_request[str(number)]
        assert metrics.num_cached_tokens < metrics.num_prompt_tokens == len(prompt)
        assert metrics.num_recomputed_tokens == 0 or metrics.num_preemptions
        stages = [metrics.queue_time, metrics.ttft, metrics.end_to_end]
        times = [time for time in stages if time is not None]
        assert times == sorted(times)
        assert metrics.finish_reason in ("stop", "length", "abort")


def one_token(**options):
    return SamplingParams(max_tokens=1, temperature=0, seed=0, logprobs=True, **options)


@settings(max_examples=int(os.environ.get("MINILLM_EXAMPLES", "100")))
@given(workload=workloads())
@example(  # aborted before its completions were forked
    workload=(
        0,
        [([3], one_token(), 0), ([3], one_token(n=2), 0)],
        [0, 0],
        {1: 0},
        EngineConfig(num_blocks=1, max_sequences=2),
    )
)
def test_every_answer_has_the_same_bits_as_alone(models, workload):
    model_index, requests, arrivals, aborts, config = workload
    model = models[model_index]
    engine, answers = model.engine(config), RecordedAnswers()
    engine.listeners.append(answers.push)
    records, aborted = serve(engine, requests, arrivals, aborts)
    for number, (prompt, params, _) in enumerate(requests):
        for completion in range(params.n):
            expected = model.expected_answer(prompt, params, completion, config.kv_dtype)
            tokens, logprobs, text, reason = answers.of(str(number), completion)
            if reason == "abort":
                assert number in aborted
                assert tokens == expected[0][: len(tokens)]
                assert logprobs == expected[1][: len(tokens)]
                assert expected[2].startswith(text)
            else:
                assert (tokens, logprobs, text, reason) == expected
    blocks = engine.scheduler.blocks
    assert blocks.num_held == 0
    assert not engine._requests
    check_metrics(Trace(engine.facts, records), requests, answers)
    for record in records:
        assert from_json(StepRecord, to_json(record), "line 1") == record
        pool = record.pool
        tables = [
            block for sequence in record.running for table in sequence.block_tables for block in table if block >= 0
        ]
        assert pool.references == [tables.count(block) for block in range(config.num_blocks)]
        assert pool.num_held + pool.num_cached + pool.num_free == config.num_blocks
        assert record.num_tokens <= config.max_batch_tokens
        assert {(c.request_id, c.completion) for c in record.chunks} <= {
            (s.request_id, s.completion) for s in record.running
        }


def test_hundreds_of_preemptions_lose_no_answer_and_leak_no_block(models):
    """A pool for a few requests serves a hundred, twice. Afterwards the engine keeps no trace of the requests."""
    model, rng = models[1], random.Random(0)
    engine = model.engine(EngineConfig(num_blocks=24, block_size=2, max_sequences=32, max_batch_tokens=24, watermark=0))
    requests, answers = {}, RecordedAnswers()
    for half in ("a", "b"):
        for number in range(100):
            prompt = [3, 4, 5, 6][: rng.randint(0, 4)] + rng.choices(range(3, 7), k=rng.randint(1, 8))
            params = SamplingParams(max_tokens=rng.randint(8, 24), temperature=1, seed=number, logprobs=True)
            requests[f"{half}{number}"] = prompt, params
            engine.add_request(prompt, params, request_id=f"{half}{number}")
        num_preempted = 0
        while engine.has_unfinished:
            record = engine.step()
            answers.push(record)
            num_preempted += len(record.preempted)
        assert num_preempted > 100
        assert engine.scheduler.blocks.num_held == 0
        assert len(engine.scheduler.blocks.prefixes) == engine.scheduler.blocks.num_cached
        assert not engine._requests
        assert not engine.scheduler.waiting._heap
    for request_id, (prompt, params) in requests.items():
        assert answers.of(request_id, 0) == model.expected_answer(prompt, params)


@pytest.mark.parametrize("prompt_length", [1, 40])
def test_a_sequence_with_windows_may_be_longer_than_the_pool(models, prompt_length):
    """The sequence is eight times as long as all blocks together. A model without windows refuses it."""
    model, config = models[3], EngineConfig(block_size=2, num_blocks=4, max_batch_tokens=4, max_sequences=2)
    params = SamplingParams(max_tokens=64 - prompt_length, temperature=1, seed=1, logprobs=True, ignore_eos=True)
    prompt, answers = [3, 4, 5, 6, 4, 4, 3] * 6, RecordedAnswers()
    engine = model.engine(config)
    engine.listeners.append(answers.push)
    engine.add_request(prompt[:prompt_length], params, request_id="long")
    max_held = 0
    while engine.has_unfinished:
        record = engine.step()
        overwrite_unused_blocks(engine)
        max_held = max(max_held, record.pool.num_held)
    assert max_held <= 4
    (table,) = record.running[0].block_tables
    assert [block for block in table if block >= 0] == table[-2:]
    assert answers.of("long", 0) == model.expected_answer(prompt[:prompt_length], params)
    with pytest.raises(
        RequestError, match="fill 63 positions, which takes 32 blocks of 2, but the pool has 4: shorten"
    ):
        models[1].engine(config).add_request(prompt[:prompt_length], params)
    message = "takes 8 blocks of 2 at once, with a window of 12 and max_batch_tokens of 4, .* 4: lower max_batch_tokens"
    with pytest.raises(RequestError, match=message):
        models[5].engine(config).add_request(prompt[:prompt_length], params)
