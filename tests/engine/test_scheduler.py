"""The scheduler with a fake model: under every policy, each request gets the same answer as alone."""

import random
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.fake_model import FakeModel, check_tables, expected_answer, max_blocks

from minillm import RequestError
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import POLICIES, Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.waiting_queue import ADMISSIONS


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, some are aborted, and steps run or fail. All other requests get their expected answers."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        policy=st.sampled_from(POLICIES),
        max_batch_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 5),
        admission=st.sampled_from(ADMISSIONS),
        watermark=st.sampled_from([0.0, 0.1, 0.6]),
        prefix_caching=st.booleans(),
        windows=st.sampled_from([[None], [None, 3], [9, None, 9], [2, 5]]) | st.integers(1, 10).map(lambda n: [n]),
    )
    def make(self, num_blocks, block_size, windows, **options):
        num_blocks += (num_blocks - 2) * (len(windows) - 1)
        self.scheduler = Scheduler(BlockAllocator(num_blocks, block_size, windows), **options)
        self.model, self.requests, self.ids = FakeModel(self.scheduler), {}, count()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12) | st.lists(st.just(0), min_size=1, max_size=24),
        max_tokens=st.integers(1, 8) | st.integers(1, 30),
        num_completions=st.integers(1, 3),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, num_completions, priority):
        request_id = f"r{next(self.ids)}"
        sequence = Sequence.from_prompt(
            request_id, prompt, max_tokens, num_completions=num_completions, priority=priority
        )
        blocks = self.scheduler.blocks
        fits = max_blocks(self.scheduler, len(prompt) + max_tokens - 1) <= blocks.num_blocks
        if fits and num_completions <= self.scheduler.max_sequences:
            self.scheduler.add(sequence)
            self.requests[request_id] = (prompt, max_tokens, num_completions)
            with pytest.raises(RequestError, match=f"request '{request_id}' is still unfinished"):
                self.scheduler.add(Sequence.from_prompt(request_id, [0], 1))
        else:
            message = (
                f"a request for {num_completions} completions" if fits else f"has {blocks.num_blocks}|max_sequences is"
            )
            with pytest.raises(RequestError, match=message):
                self.scheduler.add(sequence)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.model.step()

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.blocks.reset_prefix_cache()

    @rule()
    def fail_a_step(self):
        """Fail a step after it has been scheduled and has written wrong keys and values, before it is committed."""
        plan = self.scheduler.schedule()
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                for slot in self.model.slots(chunk, position):
                    self.model.memory[slot] = "garbage"
        self.scheduler.abandon()

    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from([*self.requests, "unknown"]))
        if self.scheduler.is_unfinished(request_id):
            events = self.scheduler.end(request_id, "abort")
            assert {finished.reason for finished in events} == {"abort"}
            del self.requests[request_id]
        assert not self.scheduler.is_unfinished(request_id)
        with pytest.raises(RequestError, match=f"no unfinished request '{request_id}'"):
            self.scheduler.end(request_id, "abort")

    @invariant()
    def every_block_is_held_cached_or_free(self):
        blocks, running = self.scheduler.blocks, self.scheduler.running
        listed = [block for sequence in running for table in sequence.block_tables for block in table.live_blocks]
        assert blocks.references == [listed.count(block) for block in range(blocks.num_blocks)]
        assert blocks.num_free + blocks.num_cached + blocks.num_held == blocks.num_blocks
        assert set(blocks._free) | set(blocks.cached) | set(listed) == set(range(blocks.num_blocks))
        assert self.scheduler.prefix_caching or blocks.num_cached == 0

    @invariant()
    def tables_list_the_blocks_that_later_queries_can_read(self):
        check_tables(self.scheduler)

    @invariant()
    def every_sequence_is_in_one_queue(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting.first(1000)
        assert len(waiting) == len(self.scheduler.waiting)
        unfinished = [sequence for members in self.scheduler._requests.values() for sequence in members.values()]
        assert sorted(map(id, running + waiting)) == sorted(map(id, unfinished))
        assert [sequence.rank for sequence in running] == sorted(sequence.rank for sequence in running)
        assert all(not sequence.block_tables and sequence.num_computed == 0 for sequence in waiting)
        assert sum(sequence.num_completions for sequence in running) <= self.scheduler.max_sequences
        assert self.scheduler.policy in repr(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        max_tokens_to_compute = sum(
            len(prompt) + max_tokens for prompt, max_tokens, n in self.requests.values() for _ in range(n)
        )
        for _ in range(2 * max_tokens_to_compute + 2):  # more steps than any policy needs
            if not self.scheduler.has_unfinished:
                break
            self.model.step()
        assert not self.scheduler.has_unfinished
        for request_id, (prompt, max_tokens, num_completions) in self.requests.items():
            for completion in range(num_completions):
                expected = expected_answer(prompt, max_tokens, completion)
                assert self.model.answers[request_id, completion] == expected
        assert self.scheduler.blocks.num_held == 0
        assert repr(self.scheduler.schedule()) == "StepPlan(nothing to do)"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=30)


@pytest.mark.parametrize("other_windows", [[], [None]])  # of further KV-cache groups
@pytest.mark.parametrize("policy", POLICIES)
def test_with_windows_a_pool_barely_large_enough_for_one_request_serves_many(policy, other_windows):
    """Steps also fail. After a failure, an older sequence may be planned after a younger one and preempt it."""
    rng = random.Random(0)
    preempted_in_prefill = 0
    for _ in range(80):
        size, window, budget = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 6)
        min_blocks = (window + budget - 3) // size + 2 + len(other_windows) * (1 + 70 // size)
        scheduler = Scheduler(
            BlockAllocator(min_blocks + rng.randint(0, 4), size, [window, *other_windows]),
            policy=policy,
            max_batch_tokens=budget,
            max_sequences=rng.randint(3, 8),
            watermark=0,
        )
        model, requests = FakeModel(scheduler), {}
        assert scheduler.max_live_blocks(100) == max_blocks(scheduler, 100)
        for number in range(8):
            prompt = [int(rng.random() < 0.02) for _ in range(rng.randint(1, 40))]
            requests[f"r{number}"] = prompt, rng.randint(1, 30), rng.randint(1, 3)
            scheduler.add(
                Sequence.from_prompt(
                    f"r{number}", *requests[f"r{number}"][:2], num_completions=requests[f"r{number}"][2]
                )
            )
        steps = 0
        while scheduler.has_unfinished:
            if steps < 200 and rng.random() < 0.1:
                scheduler.schedule()
                scheduler.abandon()
            prefill_ends = {s.name: s.prefill_end for s in scheduler.running}
            plan = model.step()
            check_tables(scheduler)
            preempted_in_prefill += sum(p.num_computed < prefill_ends[p.name] for p in plan.preempted)
            steps += 1
            assert steps < 1000
        for request_id, (prompt, max_tokens, num_completions) in requests.items():
            for completion in range(num_completions):
                assert model.answers[request_id, completion] == expected_answer(prompt, max_tokens, completion)
        assert scheduler.blocks.num_held == 0
    assert other_windows or preempted_in_prefill > 15


def test_blocks_freed_behind_the_window_of_a_cached_prefix_are_not_allocated_again():
    """Three requests continue the same text. Each needs one more block per group."""
    # The text takes 10 blocks in the group without a window and 2 in the other. Each request adds one block to both.
    blocks = BlockAllocator(18, 4, [8, None])
    scheduler = Scheduler(blocks, max_batch_tokens=6, watermark=0)
    model, text = FakeModel(scheduler, end=None), [n % 2 for n in range(40)]
    scheduler.add(Sequence.from_prompt("text", text, 1))
    while scheduler.has_unfinished:
        model.step()
    for number in range(3):
        scheduler.add(Sequence.from_prompt(f"r{number}", [*text, 2, number], 2))
    plan = model.step()
    assert [admitted.num_cached_tokens for admitted in plan.admitted] == [40, 40, 40]
    assert blocks.num_held == 18


def test_preempting_a_sequence_withdraws_its_chunk_from_the_plan():
    """The first sequence computes its prompt again while the second decodes, so the second comes first in the plan."""
    scheduler = Scheduler(BlockAllocator(16, 1, [8]), max_batch_tokens=4, prefix_caching=False, watermark=0)
    model = FakeModel(scheduler, end=None)
    requests = {"first": ([0] * 40, 20), "second": ([1], 20)}
    for name, (prompt, max_tokens) in requests.items():
        scheduler.add(Sequence.from_prompt(name, prompt, max_tokens))
    while len(scheduler.running) < 2 or scheduler.running[1].in_prefill:
        model.step()
    plan = scheduler.schedule()
    assert [chunk.is_prefill for chunk in plan.chunks] == [False, False]
    del plan.chunks[1:]  # only the first sequence starts over
    scheduler.abandon()
    while not plan.preempted:
        plan = model.step()
    assert [preempted.name for preempted in plan.preempted] == ["second"]
    assert [(chunk.name, chunk.is_prefill) for chunk in plan.chunks] == [("first", True)]
    assert plan.num_tokens == len(plan.chunks[0].token_ids)
    while scheduler.has_unfinished:
        model.step()
    for name, (prompt, max_tokens) in requests.items():
        assert model.answers[name, 0] == expected_answer(prompt, max_tokens, 0, end=None)


def serve(scheduler, requests):
    """Serve the requests, all to their maximum length; return the plans of all steps."""
    model = FakeModel(scheduler, end=None)
    for number, (prompt, max_tokens) in enumerate(requests):
        scheduler.add(Sequence.from_prompt(f"r{number}", prompt, max_tokens))
    plans = []
    while scheduler.has_unfinished:
        plans.append(model.step())
    return plans


def test_what_each_policy_puts_into_a_step():
    requests = [([0] * 6, 4), ([1] * 6, 4), ([0, 1] * 3, 4)]

    def chunk_sizes(policy):
        scheduler = Scheduler(BlockAllocator(40, 4), policy=policy, max_batch_tokens=8, max_sequences=2)
        return [[(c.name, len(c.token_ids)) for c in plan.chunks] for plan in serve(scheduler, requests)]

    static, continuous, chunked = map(chunk_sizes, POLICIES)
    last = [any(name == "r2" for name, _ in step) for step in static].index(True)
    assert all(
        name == "r2" for step in static[last:] for name, _ in step
    )  # r2 starts only after the whole batch has finished
    assert any({"r2"} < {name for name, _ in step} for step in continuous + chunked)
    mixed = [step for step in chunked if {length > 1 for _, length in step} == {True, False}]
    assert mixed
    assert all(sum(length for _, length in step) <= 8 for step in chunked)


def test_the_newest_sequence_is_preempted_first_and_the_oldest_never():
    scheduler = Scheduler(BlockAllocator(8, 2), max_sequences=4, prefix_caching=False)
    plans = serve(scheduler, [([n % 2, n // 2], 14) for n in range(4)])
    preempted_names = [preempted.name for plan in plans for preempted in plan.preempted]
    assert preempted_names
    assert "r0" not in preempted_names
    assert preempted_names[0] == "r3"
    readmitted_names = [admitted.name for plan in plans for admitted in plan.admitted if admitted.after_preemption]
    assert sorted(readmitted_names) == sorted(preempted_names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "clever"}, "policy is 'clever'; it can be static, continuous, chunked"),
        ({"admission": "richest"}, "admission is 'richest'; it can be fcfs, priority, shortest"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0; it must be a whole number, 1 or more"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"watermark": 1.0}, "watermark is 1.0; it must be a finite number, at least 0 and less than 1"),
        ({"watermark": "a bit"}, "watermark is 'a bit'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(BlockAllocator(4, 4), **options)
