"""Tests of the exercises of lesson 9."""

import random

import numpy as np
import pytest

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.trace import BlockCopy, SampledToken

B = 4


def scheduler_of(num_blocks, **options):
    return Scheduler(BlockAllocator(num_blocks, B), watermark=0.0, **options)


def serve(scheduler, requests, max_steps=400):
    """Serve requests of the given (prompt, answer) lengths; return the plans of all steps."""
    for name, (prompt, answer) in zip("abcdefghijklmnop", requests, strict=False):
        scheduler.add(Sequence.from_prompt(name, [ord(name)] * prompt, answer))
    plans = []
    while scheduler.has_unfinished:
        assert len(plans) < max_steps, f"a request is unfinished after {max_steps} steps"
        plan = scheduler.schedule()
        assert plan.chunks, "a step scheduled nothing although a request was unfinished"
        plans.append(plan)
        sampled = []
        for chunk in plan.chunks:
            sequence = scheduler.sequence(chunk)
            ends = sequence.num_generated + 1 == sequence.max_tokens
            sampled.append([SampledToken(0, finish_reason="length" if ends else None)] * chunk.num_samples)
        scheduler.commit(plan, sampled)
    return plans


# _schedule_chunk


@pytest.mark.parametrize(
    ("length", "computed", "planned", "expected"),
    [(10, 0, 0, 8), (10, 0, 5, 3), (10, 8, 0, 2), (10, 8, 7, 1), (5, 0, 0, 5)],
)
def test_schedule_chunk_takes_the_rest_of_the_prompt_or_of_the_budget(exercises, length, computed, planned, expected):
    scheduler, plan = scheduler_of(8, max_batch_tokens=8), StepPlan(num_tokens=planned)
    sequence = Sequence(list(range(length)), length, "a", num_computed=computed, prefill_end=length)
    exercises._schedule_chunk(scheduler, sequence, plan)
    assert [(c.start, c.num_tokens, c.is_prefill) for c in plan.chunks] == [(computed, expected, True)]
    assert plan.num_tokens == planned + expected


def test_schedule_chunk_adds_nothing_to_a_full_step(exercises):
    scheduler, sequence = scheduler_of(8, max_batch_tokens=8), Sequence([1] * 10, 10, "a", prefill_end=10)
    for planned, expected in ((8, 0), (7, 1)):
        plan = StepPlan(num_tokens=planned)
        exercises._schedule_chunk(scheduler, sequence, plan)
        assert [chunk.num_tokens for chunk in plan.chunks] == [1] * expected


def test_schedule_chunk_stops_at_the_end_of_the_prefill(exercises):
    """A token sampled since the last admission belongs to a decode, not to the prefill."""
    scheduler, plan = scheduler_of(8, max_batch_tokens=8), StepPlan()
    exercises._schedule_chunk(scheduler, Sequence(list(range(7)), 6, "a", num_computed=4, prefill_end=6), plan)
    assert [c.token_ids for c in plan.chunks] == [[4, 5]]


def test_schedule_chunk_adds_nothing_for_a_sequence_that_was_preempted(exercises, monkeypatch):
    scheduler, sequence = scheduler_of(8, max_batch_tokens=8), Sequence([1] * 10, 10, "a", prefill_end=10)
    for has_blocks, expected in ((True, 8), (False, 0)):
        monkeypatch.setattr(Scheduler, "_ensure_blocks", lambda *_, answer=has_blocks: answer)
        plan = StepPlan()
        exercises._schedule_chunk(scheduler, sequence, plan)
        assert sum(chunk.num_tokens for chunk in plan.chunks) == plan.num_tokens == expected


def test_schedule_chunk_splits_a_long_prompt_beside_decodes(exercises, monkeypatch):
    monkeypatch.setattr(Scheduler, "_schedule_chunk", exercises._schedule_chunk)
    plans = serve(scheduler_of(20, max_batch_tokens=8), [(3, 6), (20, 2)])
    tokens = [[(c.name, c.num_tokens) for c in plan.chunks] for plan in plans[:4]]
    assert tokens == [[("a", 3), ("b", 5)], [("a", 1), ("b", 7)], [("a", 1), ("b", 7)], [("a", 1), ("b", 1)]]


# _ensure_blocks


def running(scheduler, lengths, names="abcd"):
    """Return sequences whose prompts of these lengths have been computed and which are about to decode."""
    for name, length in zip(names, lengths, strict=False):
        scheduler.add(Sequence.from_prompt(name, [ord(name)] * length, 9))
    plan = scheduler.schedule()
    scheduler.commit(plan, [[SampledToken(0)] * chunk.num_samples for chunk in plan.chunks])
    return list(scheduler.running)


def blocks_of(sequence):
    """Return the blocks of a sequence's only table."""
    (table,) = sequence.block_tables
    return list(table.blocks)


def test_ensure_blocks_changes_nothing_if_the_last_block_has_room(exercises):
    scheduler = scheduler_of(4)
    a, b = running(scheduler, [6, 3])
    before, plan = [blocks_of(a), blocks_of(b)], StepPlan()
    assert exercises._ensure_blocks(scheduler, a, 1, plan) is True
    assert exercises._ensure_blocks(scheduler, b, 1, plan) is True
    assert [blocks_of(a), blocks_of(b)] == before
    assert repr(plan) == repr(StepPlan())


def test_ensure_blocks_takes_a_free_block(exercises):
    scheduler = scheduler_of(4)
    (a,) = running(scheduler, [8])
    assert exercises._ensure_blocks(scheduler, a, 1, StepPlan()) is True
    assert len(blocks_of(a)) == 3


def test_ensure_blocks_preempts_the_sequence_admitted_last(exercises):
    scheduler = scheduler_of(4)
    a, b, c = running(scheduler, [8, 3, 2])
    plan = StepPlan()
    assert exercises._ensure_blocks(scheduler, a, 1, plan) is True
    assert [(p.name, p.num_computed) for p in plan.preempted] == [("c", 2)]
    assert scheduler.running == [a, b]
    assert scheduler.waiting.peek() is c
    assert (len(blocks_of(a)), c.block_tables, c.num_computed) == (3, [], 0)


def test_ensure_blocks_preempts_the_sequence_itself_if_it_was_admitted_last(exercises):
    scheduler = scheduler_of(4)
    a, b = running(scheduler, [8, 8])
    plan = StepPlan()
    assert exercises._ensure_blocks(scheduler, b, 1, plan) is False
    assert scheduler.running == [a]
    assert [p.name for p in plan.preempted] == ["b"]


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_ensure_blocks_copies_a_shared_block(exercises, num_blocks):
    """Two completions of one prompt share its last block. If no block is left for a copy, the second is preempted."""
    scheduler = scheduler_of(num_blocks, max_sequences=2)
    scheduler.add(Sequence.from_prompt("a", [7] * 6, 3, num_completions=2))
    scheduler.commit(scheduler.schedule(), [[SampledToken(0), SampledToken(1)]])
    first, second = scheduler.running
    shared, plan = blocks_of(first)[1], StepPlan()
    assert exercises._ensure_blocks(scheduler, first, 1, plan) is True
    if num_blocks == 3:
        assert plan.copies == [BlockCopy(shared, blocks_of(first)[1])]
        assert (blocks_of(second)[1], plan.preempted) == (shared, [])
    else:
        assert plan.copies == []  # no other table lists the block now, so `first` may write to it
        assert [p.completion for p in plan.preempted] == [second.completion]
    assert not scheduler.blocks.is_shared(blocks_of(first)[1])


def test_ensure_blocks_records_the_evicted_blocks(exercises):
    scheduler = scheduler_of(4)
    serve(scheduler, [(8, 1)])  # leaves two cached blocks
    (b,) = running(scheduler, [8], names="b")
    plan = StepPlan()
    assert exercises._ensure_blocks(scheduler, b, 1, plan) is True
    assert len(plan.evicted) == 1


def test_ensure_blocks_allocates_for_a_whole_chunk(exercises):
    """In a model with windows, a prompt takes its blocks chunk by chunk, so a chunk can lack blocks, too."""
    scheduler = scheduler_of(8)
    a, b = running(scheduler, [8, 4])
    plan = StepPlan()
    plan.add_chunk(b, 1)
    assert exercises._ensure_blocks(scheduler, a, 21, plan) is True
    assert len(blocks_of(a)) == 8
    assert [p.name for p in plan.preempted] == ["b"]
    assert plan.chunks == []


def test_ensure_blocks_lets_every_sequence_finish(exercises, monkeypatch):
    monkeypatch.setattr(Scheduler, "_ensure_blocks", exercises._ensure_blocks)
    choose = random.Random(0)
    for _ in range(20):
        requests = [(choose.randrange(1, 20), choose.randrange(1, 15)) for _ in range(8)]
        scheduler = scheduler_of(9, max_batch_tokens=choose.choice((4, 64)))
        plans = serve(scheduler, requests)
        assert scheduler.blocks.num_held == 0
        finished = [finish.name for plan in plans for finish in plan.finished]
        assert sorted(finished) == list("abcdefgh")
        assert "a" not in {preemption.name for plan in plans for preemption in plan.preempted}


# percentile


def test_percentile_of_known_values(exercises):
    assert exercises.percentile([30, 10], 25) == 15.0
    assert exercises.percentile([5.0], 99) == 5.0
    assert [exercises.percentile([3, 1, 2], p) for p in (0, 50, 100)] == [1, 2, 3]


def test_percentile_without_values_is_none(exercises):
    assert exercises.percentile([1.0], 50) == 1.0
    assert exercises.percentile([], 50) is None


def test_percentile_agrees_with_numpy_and_leaves_the_list_unchanged(exercises):
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.normal(size=random.integers(1, 30)).tolist()
        before = list(values)
        for percent in (0, 1, 33.3, 50, 95, 99, 100):
            assert exercises.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
        assert values == before
