"""Are the exercises of lesson 9 right?"""

import random

import numpy as np
import pytest

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Sampled, Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan

B = 4


def scheduler_of(num_blocks, **options):
    return Scheduler(BlockAllocator(num_blocks, B), watermark=0.0, **options)


def serve(scheduler, requests, most_steps=400):
    """Serve (prompt, answer) lengths; return the plans of all steps."""
    for name, (prompt, answer) in zip("abcdefghijklmnop", requests, strict=False):
        scheduler.add(Sequence.of(name, [ord(name)] * prompt, answer))
    plans = []
    while scheduler.has_unfinished:
        assert len(plans) < most_steps, "there is still somebody unfinished"
        plan = scheduler.schedule()
        assert plan.chunks, "a step did nothing though somebody was there"
        plans.append(plan)
        choices = []
        for chunk in plan.chunks:
            ends = chunk.sequence.num_generated + 1 == chunk.sequence.max_tokens
            choices.append([Sampled(0, "length" if ends else None)] * chunk.num_samples)
        scheduler.commit(plan, choices)
    return plans


# _advance


@pytest.mark.parametrize(
    ("known", "computed", "planned", "wanted"),
    [(10, 0, 0, 8), (10, 0, 5, 3), (10, 8, 0, 2), (10, 8, 7, 1), (5, 0, 0, 5)],
)
def test_advance_adds_what_is_left_and_what_fits(exercises, known, computed, planned, wanted):
    scheduler, plan = scheduler_of(8, max_batch_tokens=8), StepPlan(num_tokens=planned)
    sequence = Sequence(list(range(known)), known, "a", num_computed=computed, prefill_end=known)
    exercises._advance(scheduler, sequence, plan)
    assert [(c.start, len(c.token_ids), c.is_prefill) for c in plan.chunks] == [(computed, wanted, True)]
    assert plan.num_tokens == planned + wanted


def test_advance_adds_nothing_to_a_full_step(exercises):
    scheduler, sequence = scheduler_of(8, max_batch_tokens=8), Sequence([1] * 10, 10, "a", prefill_end=10)
    for planned, wanted in ((8, 0), (7, 1)):
        plan = StepPlan(num_tokens=planned)
        exercises._advance(scheduler, sequence, plan)
        assert [len(chunk.token_ids) for chunk in plan.chunks] == [1] * wanted


def test_advance_stops_where_the_sequence_was_when_it_came(exercises):
    """The last known token may be one that was chosen since: it is a decode's, and no part of the prompt."""
    scheduler, plan = scheduler_of(8, max_batch_tokens=8), StepPlan()
    exercises._advance(scheduler, Sequence(list(range(7)), 6, "a", num_computed=4, prefill_end=6), plan)
    assert [c.token_ids for c in plan.chunks] == [[4, 5]]


def test_advance_reads_a_long_prompt_beside_decodes(exercises, monkeypatch):
    monkeypatch.setattr(Scheduler, "_advance", exercises._advance)
    plans = serve(scheduler_of(20, max_batch_tokens=8), [(3, 6), (20, 2)])
    tokens = [[(c.sequence.name, len(c.token_ids)) for c in plan.chunks] for plan in plans[:4]]
    assert tokens == [[("a", 3), ("b", 5)], [("a", 1), ("b", 7)], [("a", 1), ("b", 7)], [("a", 1), ("b", 1)]]


# _make_room


def running(scheduler, lengths, names="abcd"):
    """Sequences that have computed so many tokens each, and are about to decode one more."""
    for name, length in zip(names, lengths, strict=False):
        scheduler.add(Sequence.of(name, [ord(name)] * length, 9))
    plan = scheduler.schedule()
    scheduler.commit(plan, [[Sampled(0)] * chunk.num_samples for chunk in plan.chunks])
    return list(scheduler.running)


def test_make_room_leaves_a_table_with_room_alone(exercises):
    scheduler = scheduler_of(4)
    a, b = running(scheduler, [6, 3])
    tables, plan = [list(a.block_table), list(b.block_table)], StepPlan()
    assert exercises._make_room(scheduler, a, 1, plan) is True
    assert exercises._make_room(scheduler, b, 1, plan) is True
    assert [a.block_table, b.block_table] == tables
    assert repr(plan) == repr(StepPlan())


def test_make_room_takes_a_free_block(exercises):
    scheduler = scheduler_of(4)
    (a,) = running(scheduler, [8])
    assert exercises._make_room(scheduler, a, 1, StepPlan()) is True
    assert len(a.block_table) == 3


def test_make_room_sends_the_last_admitted_away(exercises):
    scheduler = scheduler_of(4)
    a, b, c = running(scheduler, [8, 3, 2])
    plan = StepPlan()
    assert exercises._make_room(scheduler, a, 1, plan) is True
    assert [(p.sequence.name, p.num_computed) for p in plan.preempted] == [("c", 2)]
    assert scheduler.running == [a, b]
    assert scheduler.waiting.peek() is c
    assert (len(a.block_table), len(c.block_table), c.num_computed) == (3, 0, 0)


def test_make_room_sends_away_even_the_one_who_asked(exercises):
    scheduler = scheduler_of(4)
    a, b = running(scheduler, [8, 8])
    plan = StepPlan()
    assert exercises._make_room(scheduler, b, 1, plan) is False
    assert scheduler.running == [a]
    assert [p.sequence.name for p in plan.preempted] == ["b"]


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_make_room_copies_a_shared_block(exercises, num_blocks):
    """Two completions of one prompt share its last block. Without a block to copy to, the second has to go."""
    scheduler = scheduler_of(num_blocks, max_sequences=2)
    scheduler.add(Sequence.of("a", [7] * 6, 3, num_forks=2))
    scheduler.commit(scheduler.schedule(), [[Sampled(0), Sampled(1)]])
    first, second = scheduler.running
    shared, plan = first.block_table[1], StepPlan()
    assert exercises._make_room(scheduler, first, 1, plan) is True
    if num_blocks == 3:
        assert plan.copies == [(shared, first.block_table[1])]
        assert (second.block_table[1], plan.preempted) == (shared, [])
    else:
        assert plan.copies == []  # it is alone now, and may write
        assert [p.sequence for p in plan.preempted] == [second]
    assert not scheduler.blocks.is_shared(first.block_table[1])


def test_make_room_says_what_it_evicted(exercises):
    scheduler = scheduler_of(4)
    serve(scheduler, [(8, 1)])  # leaves two cached blocks
    (b,) = running(scheduler, [8], names="b")
    plan = StepPlan()
    assert exercises._make_room(scheduler, b, 1, plan) is True
    assert len(plan.evicted) == 1


def test_make_room_finds_blocks_for_a_whole_chunk(exercises):
    """Behind a window a prompt takes its blocks chunk by chunk; if all but one are there, somebody must go."""
    scheduler = scheduler_of(8)
    a, b = running(scheduler, [8, 4])
    plan = StepPlan()
    plan.advance(b, 1, is_prefill=False)
    assert exercises._make_room(scheduler, a, 21, plan) is True
    assert len(a.block_table) == 8
    assert [p.sequence for p in plan.preempted] == [b]
    assert plan.chunks == []


def test_make_room_lets_everybody_finish(exercises, monkeypatch):
    monkeypatch.setattr(Scheduler, "_make_room", exercises._make_room)
    choose = random.Random(0)
    for _ in range(20):
        requests = [(choose.randrange(1, 20), choose.randrange(1, 15)) for _ in range(8)]
        scheduler = scheduler_of(9, max_batch_tokens=choose.choice((4, 64)))
        plans = serve(scheduler, requests)
        assert scheduler.blocks.num_held == 0
        first = [name for plan in plans for name in (f.sequence.name for f in plan.finished)]
        assert sorted(first) == list("abcdefgh")
        assert "a" not in {p.sequence.name for plan in plans for p in plan.preempted}


# percentile


def test_percentile_of_known_values(exercises):
    assert exercises.percentile([30, 10], 25) == 15.0
    assert exercises.percentile([5.0], 99) == 5.0
    assert [exercises.percentile([3, 1, 2], p) for p in (0, 50, 100)] == [1, 2, 3]


def test_percentile_of_nothing_is_none(exercises):
    assert exercises.percentile([1.0], 50) == 1.0
    assert exercises.percentile([], 50) is None


def test_percentile_agrees_with_numpy_and_keeps_the_list(exercises):
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.normal(size=random.integers(1, 30)).tolist()
        before = list(values)
        for percent in (0, 1, 33.3, 50, 95, 99, 100):
            assert exercises.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
        assert values == before
