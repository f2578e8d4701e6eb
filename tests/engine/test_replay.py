"""The scheduler and the allocator with requests like those of production services, without a model.

The requests are drawn from the statistics of two published traces. If the traces are present, they are replayed too.
"""

from itertools import pairwise

import numpy as np
import pytest
from support.request_traces import (
    ANSWER_TOKENS,
    AZURE,
    FRACTION_CONTINUED,
    MEAN_GAP,
    MOONCAKE,
    PROMPT_TOKENS,
    QUANTILES,
    azure_requests,
    mooncake_prompts,
    reused_blocks,
    synthetic_prompts,
    synthetic_requests,
)

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import POLICIES, Scheduler
from minillm.engine.sequence import Sequence
from minillm.trace import SampledToken


@pytest.fixture(scope="module", params=["synthetic", *(["mooncake"] if MOONCAKE.exists() else [])])
def prompts(request):
    """Prompts of one service in order of arrival, each as the ids of its blocks."""
    return synthetic_prompts(12_031) if request.param == "synthetic" else mooncake_prompts()


@pytest.fixture(scope="module", params=["synthetic", *(["azure"] if AZURE.exists() else [])])
def requests(request):
    """Arrivals, prompt lengths and answer lengths of one service, in order of arrival."""
    return synthetic_requests(19_366) if request.param == "synthetic" else azure_requests()


def test_the_requests_have_the_measured_distributions(requests):
    times, num_prompt_tokens, num_answer_tokens = np.array(requests).T
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(MEAN_GAP, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.15)
    for lengths, measured in ((num_prompt_tokens, PROMPT_TOKENS), (num_answer_tokens, ANSWER_TOKENS)):
        assert np.quantile(lengths, QUANTILES[:-2]) == pytest.approx(measured[:-2], rel=0.05, abs=1)
        assert measured[0] <= lengths.min() <= lengths.max() <= measured[-1]
    assert abs(np.corrcoef(np.log(num_prompt_tokens), np.log(num_answer_tokens))[0, 1]) < 0.15


def test_the_prompts_share_prefixes_as_measured(prompts):
    reused, lengths = np.array(reused_blocks(prompts)), np.array([len(blocks) for blocks in prompts])
    assert {blocks[0] for blocks in prompts} == {0}
    assert np.mean(reused > 1) == pytest.approx(FRACTION_CONTINUED, abs=0.06)
    assert reused.sum() / lengths.sum() == pytest.approx(0.36, abs=0.06)
    assert lengths.mean() == pytest.approx(24, rel=0.15)


@pytest.fixture(scope="module")
def first_prompts(prompts):
    """The first 2000 prompts, few enough to be served many times."""
    return prompts[:2000]


def num_cached_blocks(prompts, num_blocks):
    """Return how many blocks are found in the prefix cache when the requests are served one after another.

    Each block is represented by one token. One more token, which no other prompt contains, represents the rest of the
    prompt, because the last token of a prompt is always computed.
    """
    scheduler = Scheduler(BlockAllocator(num_blocks, 1), max_batch_tokens=10_000)
    num_cached = 0
    for number, blocks in enumerate(prompts):
        scheduler.add(Sequence.from_prompt("request", [*blocks, -1 - number], 1))
        plan = scheduler.schedule()
        num_cached += plan.admitted[0].num_cached_tokens
        scheduler.commit(plan, [[SampledToken(0, finish_reason="length")]])
        assert not scheduler.has_unfinished
    assert scheduler.blocks.num_held == 0
    return num_cached


def test_a_pool_that_evicts_nothing_finds_every_earlier_prefix(first_prompts):
    num_distinct = len({block for blocks in first_prompts for block in blocks})
    num_blocks = num_distinct + len(first_prompts)
    assert num_cached_blocks(first_prompts, num_blocks) == sum(reused_blocks(first_prompts)) > 0


def test_hits_grow_gradually_with_the_pool(first_prompts):
    sizes = [1000 * 2**n for n in range(7)]  # the largest pool holds every block
    found = [num_cached_blocks(first_prompts, size) for size in sizes]
    assert found == sorted(found)
    assert found[0] < found[-1] / 2
    gains = [after - before for before, after in pairwise(found)]
    assert max(gains) < found[-1] / 3  # no doubling of the pool accounts for a third of the hits


def replay(requests, scheduler, seconds_per_step):
    """Serve the requests as they arrive; return the numbers of steps, of chunks and of preemptions.

    Nothing is computed. Every token is 0, and an answer ends at the length that it had in the trace.
    """
    num_steps = num_chunks = num_preempted = num_finished = 0
    now, arriving = 0.0, list(enumerate(requests))[::-1]
    while scheduler.has_unfinished or arriving:
        if not scheduler.has_unfinished:
            now = max(now, arriving[-1][1].time)
        while arriving and arriving[-1][1].time <= now:
            number, request = arriving.pop()
            prompt = [number] * request.num_prompt_tokens
            scheduler.add(Sequence.from_prompt(str(number), prompt, request.num_answer_tokens))
        plan = scheduler.schedule()
        scheduler.commit(plan, [zero_tokens(scheduler.sequence(chunk), chunk.num_samples) for chunk in plan.chunks])
        now += seconds_per_step
        num_steps, num_chunks = num_steps + 1, num_chunks + len(plan.chunks)
        num_preempted, num_finished = num_preempted + len(plan.preempted), num_finished + len(plan.finished)
    assert num_finished == len(requests)
    assert scheduler.blocks.num_held == 0
    return num_steps, num_chunks, num_preempted


def zero_tokens(sequence, number):
    """Return `number` sampled tokens 0. They finish the sequence if it reaches its maximum length."""
    is_last = sequence.num_generated + 1 == sequence.max_tokens
    return [SampledToken(0, finish_reason="length" if is_last else None)] * number


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_from_a_pool_that_preempts(requests, policy):
    requests = requests[:300]
    scheduler = Scheduler(BlockAllocator(1500, 16), policy=policy, max_batch_tokens=2048, max_sequences=64, watermark=0)
    num_steps, num_chunks, num_preempted = replay(requests, scheduler, seconds_per_step=0.05)
    assert num_chunks >= sum(request.num_answer_tokens for request in requests)
    assert num_steps < num_chunks
    assert policy == "static" or num_preempted
