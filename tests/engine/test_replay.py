"""Production traces through scheduler and allocator, with no model: what is found in the cache, and what a step costs.

The traces are looked for in `../shared/data` beside the repository, or in the folder that MINILLM_DATA names.
"""

import csv
import json
import os
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import POLICIES, Sampled, Scheduler
from minillm.engine.sequence import Sequence

DATA = Path(os.environ.get("MINILLM_DATA", Path(__file__).parents[3] / "shared" / "data"))


def trace_file(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here; MINILLM_DATA can name the folder that has it")
    return path


@pytest.fixture(scope="module")
def conversations():
    """Mooncake's 12,031 requests as their prompts' blocks: equal ids are equal texts, everything before included."""
    lines = trace_file("mooncake_conversation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["hash_ids"] for line in lines]


@pytest.fixture(scope="module")
def arrivals():
    """Azure's 19,366 requests: seconds since the first, prompt tokens, answer tokens."""
    with trace_file("azure_llm_2023_conversation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        ((at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in zip(times, rows, strict=True)
    ]


def found_in(conversations, num_blocks):
    """Blocks found in the cache when the requests come one after another. A block is one symbolic token; a last one of
    the request's own stands for the rest of the prompt, so that all whole blocks of it can be found."""
    scheduler = Scheduler(BlockAllocator(num_blocks, 1), max_batch_tokens=10_000)
    found = 0
    for number, blocks in enumerate(conversations):
        scheduler.add(Sequence.of("request", [*blocks, -1 - number], 1))
        plan = scheduler.schedule()
        found += plan.admitted[0].num_cached_tokens
        scheduler.commit(plan, [[Sampled(0, "length")]])
        assert not scheduler.has_unfinished
    assert scheduler.blocks.num_held == 0
    return found


def test_an_unbounded_pool_finds_every_prefix_that_came_before(conversations):
    seen, repeated = set(), 0
    for blocks in conversations:
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        repeated += known
        seen.update(blocks)
    assert len(conversations) == 12_031
    assert found_in(conversations, num_blocks=len(seen) + len(conversations)) == repeated > 0


def test_a_smaller_pool_finds_less_and_never_falls_off_a_cliff(conversations):
    sizes = [500 * 2**n for n in range(10)]  # up to more than there are blocks
    found = [found_in(conversations, size) for size in sizes]
    assert found == sorted(found)
    assert found[0] < found[-1] / 2
    steps = [after - before for before, after in pairwise(found)]
    assert max(steps) < found[-1] / 3  # no doubling of the pool brings a third of it at once


def replay(requests, scheduler, seconds_a_step):
    """Serve the requests as they arrive, every step taking as long; (steps, scheduled sequences, preemptions).

    Nothing is computed, so a token is a zero, and an answer ends with the length that it had.
    """
    steps = scheduled = preempted = finished = 0
    now, coming = 0.0, iter(enumerate(requests))
    number, (at, prompt, answer) = next(coming)
    while scheduler.has_unfinished or number is not None:
        if not scheduler.has_unfinished:
            now = max(now, at)
        while number is not None and at <= now:
            scheduler.add(Sequence.of(str(number), [number] * prompt, answer))
            number, (at, prompt, answer) = next(coming, (None, (0, 0, 0)))
        plan = scheduler.schedule()
        sampled = [
            [Sampled(0, "length" if c.sequence.num_generated + 1 == c.sequence.max_tokens else None)] * c.num_samples
            for c in plan.chunks
        ]
        scheduler.commit(plan, sampled)
        now += seconds_a_step
        steps, scheduled = steps + 1, scheduled + len(plan.chunks)
        preempted, finished = preempted + len(plan.preempted), finished + len(plan.finished)
    assert finished == len(requests)
    assert scheduler.blocks.num_held == 0
    return steps, scheduled, preempted


@pytest.mark.parametrize("policy", POLICIES)
def test_an_hour_of_production_is_served(arrivals, policy):
    """A pool that preempts, and all requests are served nevertheless."""
    requests = arrivals[:1500]
    scheduler = Scheduler(BlockAllocator(2000, 16), policy=policy, max_batch_tokens=2048, max_sequences=64, watermark=0)
    steps, scheduled, preempted = replay(requests, scheduler, seconds_a_step=0.05)
    assert scheduled >= sum(answer for _, _, answer in requests)
    assert steps < scheduled
    assert policy == "static" or preempted
