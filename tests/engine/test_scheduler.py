"""The scheduler with a toy model: under every policy, each request gets the answer that it gets alone."""

import random
import zlib
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minillm import RequestError
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.block_table import FREED, BlockTable
from minillm.engine.scheduler import POLICIES, Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.engine.waiting_queue import ADMISSIONS, WaitingQueue
from minillm.trace import BlockCopy, SampledToken

END = 3  # the token that ends a text


def next_token(tokens, completion):
    """Return the next token of the toy model, a function of all tokens so far, as in a real model."""
    return zlib.crc32(bytes([*tokens, 0, completion])) % 5


def alone(prompt, max_tokens, completion, end=END):
    """Return the prompt and the answer of a request that is served alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (len(tokens) == len(prompt) or tokens[-1] != end):
        tokens.append(next_token(tokens, completion))
    return tokens


class Paper:
    """Executes plans. At every position of a block, its memory holds the text up to that position.

    It reads the memory through the block table of each group, as attention does: only the positions within the window.
    """

    def __init__(self, scheduler, end=END):
        self.scheduler, self.end, self.memory = scheduler, end, {}
        self.answers = {}  # (request id, completion) -> tokens
        self.prompts, self.texts = {}, {}  # by request id; and by request id and completion
        add = scheduler.add

        def add_and_remember(sequence):
            add(sequence)
            self.prompts[sequence.request_id] = list(sequence.token_ids)

        scheduler.add = add_and_remember

    def step(self):
        plan = self.scheduler.schedule()
        self.check(plan)
        for copy in plan.copies:
            for offset in range(self.scheduler.blocks.block_size):
                self.memory[copy.target, offset] = self.memory.get((copy.source, offset))
        places = [
            place
            for chunk in plan.chunks
            for position in range(chunk.start, chunk.stop)
            for place in self.places(chunk, position)
        ]
        assert len(places) == len(set(places))  # no two tokens are written to the same slot
        sequences = [self.scheduler.sequence(chunk) for chunk in plan.chunks]
        texts = [tuple(sequence.token_ids) for sequence in sequences]
        for chunk, text in zip(plan.chunks, texts, strict=True):
            for position in range(chunk.start, chunk.stop):
                for group, place in enumerate(self.places(chunk, position)):
                    self.memory[place] = group, text[: position + 1]
        for chunk, text in zip(plan.chunks, texts, strict=True):
            for group, window in enumerate(self.scheduler.blocks.windows):
                for position in range(0 if window is None else max(0, chunk.start - window + 1), chunk.stop):
                    assert self.memory[self.places(chunk, position)[group]] == (group, text[: position + 1])
        self.scheduler.commit(plan, [self.sample(chunk) for chunk in plan.chunks])
        for chunk in plan.chunks:
            for token in chunk.sampled:
                self.texts.setdefault((chunk.request_id, token.completion), []).append(token.token_id)
        for finish in plan.finished:
            key = finish.request_id, finish.completion
            self.answers[key] = self.prompts[finish.request_id] + self.texts[key]
        return plan

    def places(self, chunk, position):
        """Return the block and the offset of a position in each group."""
        size = self.scheduler.blocks.block_size
        return [(table[position // size], position % size) for table in chunk.block_tables]

    def sample(self, chunk):
        sequence = self.scheduler.sequence(chunk)
        for completion in range(chunk.completion, chunk.completion + chunk.num_samples):
            token = next_token(sequence.token_ids, completion)
            is_last = sequence.num_generated + 1 == sequence.max_tokens
            reason = "stop" if token == self.end else "length" if is_last else None
            chunk.sampled.append(SampledToken(token, completion=completion, finish_reason=reason))
        return chunk.sampled

    def check(self, plan):
        """Check the properties of every plan."""
        scheduler = self.scheduler
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) == plan.num_tokens <= scheduler.max_batch_tokens
        advanced = [scheduler.sequence(chunk) for chunk in plan.chunks]
        assert len(set(advanced)) == len(advanced)
        assert set(advanced) <= set(scheduler.running)
        assert bool(plan.chunks) == scheduler.has_unfinished
        kinds = [chunk.is_prefill for chunk in plan.chunks]
        assert scheduler.policy == "chunked" or len(set(kinds)) <= 1
        assert kinds == sorted(kinds)  # decodes first
        for chunk, sequence in zip(plan.chunks, advanced, strict=True):
            assert chunk.token_ids == sequence.token_ids[chunk.start : chunk.stop]
            assert chunk.is_prefill or len(chunk.token_ids) == 1
        for admitted in plan.admitted:
            assert admitted.num_cached_tokens < admitted.num_tokens
        assert not (plan.admitted and plan.preempted)
        assert (f"{plan.num_tokens} tokens" in repr(plan)) == bool(plan.chunks)


def most_rows(scheduler, positions, window):
    """Return the maximum number of live blocks: of all positions, or of a window and one step wherever they begin."""
    size = scheduler.blocks.block_size
    at_once = positions if window is None else window - 1 + scheduler.max_batch_tokens
    return min((positions - 1) // size + 1, max((start + at_once - 1) // size + 1 for start in range(size)))


def most_blocks(scheduler, positions):
    return sum(most_rows(scheduler, positions, window) for window in scheduler.blocks.windows)


def check_tables(scheduler):
    """Check that, between steps, the tables list exactly the blocks that later queries can read."""
    size, windows = scheduler.blocks.block_size, scheduler.blocks.windows
    for sequence in scheduler.running:
        for table, window in zip(sequence.block_tables, windows, strict=True):
            next_one = sequence.num_computed
            hidden = 0 if window is None else max(0, next_one - window + 1) // size
            assert table.blocks[:hidden] == [FREED] * hidden
            assert FREED not in table.blocks[hidden:]
            assert table.capacity >= next_one
            assert len(table.live_blocks) <= most_rows(scheduler, sequence.max_positions, window)


class Serving(RuleBasedStateMachine):
    """Requests arrive and are aborted, steps run or fail; at the end every remaining request is answered correctly."""

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
        self.paper, self.requests, self.ids = Paper(self.scheduler), {}, count()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12) | st.lists(st.just(0), min_size=1, max_size=24),
        max_tokens=st.integers(1, 8) | st.integers(1, 30),
        num_forks=st.integers(1, 3),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, num_forks, priority):
        request_id = f"r{next(self.ids)}"
        sequence = Sequence.from_prompt(request_id, prompt, max_tokens, num_forks=num_forks, priority=priority)
        blocks = self.scheduler.blocks
        fits = most_blocks(self.scheduler, len(prompt) + max_tokens - 1) <= blocks.num_blocks
        if fits and num_forks <= self.scheduler.max_sequences:
            self.scheduler.add(sequence)
            self.requests[request_id] = (prompt, max_tokens, num_forks)
            with pytest.raises(RequestError, match=f"request '{request_id}' is still unfinished"):
                self.scheduler.add(Sequence.from_prompt(request_id, [0], 1))
        else:
            message = f"a request for {num_forks} completions" if fits else f"has {blocks.num_blocks}|max_sequences is"
            with pytest.raises(RequestError, match=message):
                self.scheduler.add(sequence)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.paper.step()

    @rule()
    def forget(self):
        self.scheduler.blocks.reset_prefix_cache()

    @rule()
    def a_step_fails(self):
        """A step fails between scheduling and committing, after garbage was written."""
        plan = self.scheduler.schedule()
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                for place in self.paper.places(chunk, position):
                    self.paper.memory[place] = "garbage"
        self.scheduler.abandon()

    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from([*self.requests, "unknown"]))
        if self.scheduler.is_unfinished(request_id):
            ended = self.scheduler.end(request_id, "abort")
            assert {finished.reason for finished in ended} == {"abort"}
            del self.requests[request_id]
        assert not self.scheduler.is_unfinished(request_id)
        with pytest.raises(RequestError, match=f"no unfinished request '{request_id}'"):
            self.scheduler.end(request_id, "abort")

    @invariant()
    def every_block_is_accounted_for(self):
        blocks, running = self.scheduler.blocks, self.scheduler.running
        named = [block for sequence in running for table in sequence.block_tables for block in table.live_blocks]
        assert blocks.references == [named.count(block) for block in range(blocks.num_blocks)]
        assert blocks.num_free + blocks.num_cached + blocks.num_held == blocks.num_blocks
        assert set(blocks._free) | set(blocks.cached) | set(named) == set(range(blocks.num_blocks))
        assert self.scheduler.prefix_caching or blocks.num_cached == 0

    @invariant()
    def tables_name_what_can_be_reached(self):
        check_tables(self.scheduler)

    @invariant()
    def every_sequence_is_in_one_queue(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting.first(1000)
        assert len(waiting) == len(self.scheduler.waiting)
        unfinished = [sequence for members in self.scheduler._requests.values() for sequence in members.values()]
        assert sorted(map(id, running + waiting)) == sorted(map(id, unfinished))
        assert [sequence.rank for sequence in running] == sorted(sequence.rank for sequence in running)
        assert all(not sequence.block_tables and sequence.num_computed == 0 for sequence in waiting)
        assert sum(sequence.num_forks for sequence in running) <= self.scheduler.max_sequences
        assert self.scheduler.policy in repr(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        most = sum(len(prompt) + max_tokens for prompt, max_tokens, n in self.requests.values() for _ in range(n))
        for _ in range(2 * most + 2):  # more steps than needed: at most a small multiple of the number of tokens
            if not self.scheduler.has_unfinished:
                break
            self.paper.step()
        assert not self.scheduler.has_unfinished
        for request_id, (prompt, max_tokens, num_forks) in self.requests.items():
            for completion in range(num_forks):
                expected = alone(prompt, max_tokens, completion)
                assert self.paper.answers[request_id, completion] == expected
        assert self.scheduler.blocks.num_held == 0
        assert repr(self.scheduler.schedule()) == "StepPlan(nothing to do)"


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=200, stateful_step_count=30)


@pytest.mark.parametrize("others", [[], [None]])  # the windows of another group of layers
@pytest.mark.parametrize("policy", POLICIES)
def test_behind_windows_a_pool_that_is_hardly_enough_for_one_serves_many(policy, others):
    """Steps also fail. Afterwards an older sequence may be behind a younger one, and takes its blocks in this step."""
    drawn = random.Random(0)
    preempted_in_prefill = 0
    for _ in range(80):
        size, window, budget = drawn.randint(1, 3), drawn.randint(1, 9), drawn.randint(1, 6)
        enough = (window + budget - 3) // size + 2 + len(others) * (1 + 70 // size)
        scheduler = Scheduler(
            BlockAllocator(enough + drawn.randint(0, 4), size, [window, *others]),
            policy=policy,
            max_batch_tokens=budget,
            max_sequences=drawn.randint(3, 8),
            watermark=0,
        )
        paper, requests = Paper(scheduler), {}
        assert scheduler.max_live_blocks(100) == most_blocks(scheduler, 100)
        for number in range(8):
            prompt = [int(drawn.random() < 0.02) for _ in range(drawn.randint(1, 40))]
            requests[f"r{number}"] = prompt, drawn.randint(1, 30), drawn.randint(1, 3)
            scheduler.add(
                Sequence.from_prompt(f"r{number}", *requests[f"r{number}"][:2], num_forks=requests[f"r{number}"][2])
            )
        steps = 0
        while scheduler.has_unfinished:
            if steps < 200 and drawn.random() < 0.1:
                scheduler.schedule()
                scheduler.abandon()
            prefill_ends = {s.name: s.prefill_end for s in scheduler.running}
            plan = paper.step()
            check_tables(scheduler)
            preempted_in_prefill += sum(p.num_computed < prefill_ends[p.name] for p in plan.preempted)
            steps += 1
            assert steps < 1000
        for request_id, (prompt, max_tokens, num_forks) in requests.items():
            for completion in range(num_forks):
                assert paper.answers[request_id, completion] == alone(prompt, max_tokens, completion)
        assert scheduler.blocks.num_held == 0
    assert others or preempted_in_prefill > 15


def test_what_a_found_prefix_lacks_behind_its_window_is_not_reckoned_with():
    """Three who go on from one text: each needs a row more, and nothing in the place of what was given back."""
    blocks = BlockAllocator(18, 4, [8, None])  # ten rows of the text are ten blocks and two, and three times one row
    scheduler = Scheduler(blocks, max_batch_tokens=6, watermark=0)
    paper, text = Paper(scheduler, end=None), [n % 2 for n in range(40)]
    scheduler.add(Sequence.from_prompt("text", text, 1))
    while scheduler.has_unfinished:
        paper.step()
    for number in range(3):
        scheduler.add(Sequence.from_prompt(f"r{number}", [*text, 2, number], 2))
    plan = paper.step()
    assert [admitted.num_cached_tokens for admitted in plan.admitted] == [40, 40, 40]
    assert blocks.num_held == 18


def test_who_makes_way_for_a_prompt_gives_up_what_the_step_had_for_it():
    """The first starts over while the second decodes: its prompt then comes after the second's decode in the plan."""
    scheduler = Scheduler(BlockAllocator(16, 1, [8]), max_batch_tokens=4, prefix_caching=False, watermark=0)
    paper = Paper(scheduler, end=None)
    requests = {"first": ([0] * 40, 20), "second": ([1], 20)}
    for name, (prompt, max_tokens) in requests.items():
        scheduler.add(Sequence.from_prompt(name, prompt, max_tokens))
    while len(scheduler.running) < 2 or scheduler.running[1].in_prefill:
        paper.step()
    plan = scheduler.schedule()
    assert [chunk.is_prefill for chunk in plan.chunks] == [False, False]
    del plan.chunks[1:]  # only the first sequence starts over
    scheduler.abandon()
    while not plan.preempted:
        plan = paper.step()
    assert [preempted.name for preempted in plan.preempted] == ["second"]
    assert [(chunk.name, chunk.is_prefill) for chunk in plan.chunks] == [("first", True)]
    assert plan.num_tokens == len(plan.chunks[0].token_ids)
    while scheduler.has_unfinished:
        paper.step()
    for name, (prompt, max_tokens) in requests.items():
        assert paper.answers[name, 0] == alone(prompt, max_tokens, 0, end=None)


def test_a_chunk_that_is_withdrawn_takes_its_copies_along():
    plan, sequences = StepPlan(copies=[BlockCopy(7, 1), BlockCopy(7, 2)]), []
    for name, table in (("a", [0, 1]), ("b", [FREED, 2])):
        sequences.append(Sequence.from_prompt(name, [3] * 4, 1))
        sequences[-1].block_tables = [BlockTable(4, 8, table)]
        plan.add_chunk(sequences[-1], 4)
    plan.withdraw(sequences[1])
    assert ([chunk.name for chunk in plan.chunks], plan.num_tokens, plan.copies) == (["a"], 4, [BlockCopy(7, 1)])
    plan.withdraw(sequences[1])
    assert plan.num_tokens == 4


def serve(scheduler, requests):
    """All answered, as long as they may be; the plans, in order."""
    paper = Paper(scheduler, end=None)
    for number, (prompt, max_tokens) in enumerate(requests):
        scheduler.add(Sequence.from_prompt(f"r{number}", prompt, max_tokens))
    plans = []
    while scheduler.has_unfinished:
        plans.append(paper.step())
    return plans


def test_the_policies_differ_as_their_names_say():
    requests = [([0] * 6, 4), ([1] * 6, 4), ([0, 1] * 3, 4)]

    def shape(policy):
        scheduler = Scheduler(BlockAllocator(40, 4), policy=policy, max_batch_tokens=8, max_sequences=2)
        return [[(c.name, len(c.token_ids)) for c in plan.chunks] for plan in serve(scheduler, requests)]

    static, continuous, chunked = map(shape, POLICIES)
    last = [any(name == "r2" for name, _ in step) for step in static].index(True)
    assert all(name == "r2" for step in static[last:] for name, _ in step)  # only when the whole batch is through
    assert any({"r2"} < {name for name, _ in step} for step in continuous + chunked)
    mixed = [step for step in chunked if {length > 1 for _, length in step} == {True, False}]
    assert mixed
    assert all(sum(length for _, length in step) <= 8 for step in chunked)


def test_the_first_admitted_is_never_preempted_and_the_last_goes_first():
    scheduler = Scheduler(BlockAllocator(8, 2), max_sequences=4, prefix_caching=False)
    plans = serve(scheduler, [([n % 2, n // 2], 14) for n in range(4)])
    gone = [preempted.name for plan in plans for preempted in plan.preempted]
    assert gone
    assert "r0" not in gone
    assert gone[0] == "r3"
    back = [admitted.name for plan in plans for admitted in plan.admitted if admitted.after_preemption]
    assert sorted(back) == sorted(gone)


@given(
    st.sampled_from(ADMISSIONS),
    st.lists(st.tuples(st.sampled_from(["push", "pop", "discard", "return"]), st.integers(0, 5), st.integers(1, 5))),
)
@example("fcfs", [("push", 0, 1)] * 30 + [("discard", n % 6, 1) for n in range(28)])
def test_a_queue_is_a_sorted_list(admission, operations):
    """Its next, its first few and its length are those of a list sorted anew each time."""
    queue, expected, ranks = WaitingQueue(admission), [], iter(range(1000))
    for number, (operation, which, size) in enumerate(operations):
        if operation == "push":
            sequence = Sequence.from_prompt(str(number), [0] * size, 1, priority=which)
            order = {"fcfs": 0, "priority": which, "shortest": size}[admission]
            expected.append(((1, order, number), sequence))
            queue.push(sequence)
        elif operation == "return":
            sequence = Sequence.from_prompt(str(number), [0] * size, 1)
            sequence.rank = (next(ranks), 0)
            expected.append(((0, *sequence.rank), sequence))
            queue.push(sequence)
        elif expected and operation == "discard":
            _, sequence = expected.pop(which % len(expected))
            queue.discard(sequence)
            queue.discard(sequence)  # whoever left is no longer there to leave
            assert sequence not in queue
        elif expected:
            assert queue.pop() is expected.pop(0)[1]
        expected.sort(key=lambda entry: entry[0])
        order = [sequence for _, sequence in expected]
        assert queue.first(100) == order
        assert queue.first(3) == order[:3]
        assert len(queue) == len(order)
        assert len(queue._heap) <= 2 * len(order) + 9
        assert f"{len(order)} waiting" in repr(queue)
        if order:
            assert queue.peek() is order[0]


def test_a_queue_of_thousands_who_left_does_not_keep_them():
    queue = WaitingQueue("shortest")
    sequences = [Sequence.from_prompt(str(n), [0] * (1 + n), 1) for n in range(2000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        queue.discard(sequence)
    assert len(queue._heap) < 12


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
