"""Tests of the exercises of lesson 7."""

import numpy as np
import pytest

from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.model.batch import Chunk
from minillm.trace import SampledToken

# from_chunks

MIXED = [Chunk([5, 8, 1], 0, [[7]]), Chunk([9], 6, [[2, 0]]), Chunk([3, 4], 3, [[1, 5, 6]])]  # blocks of 4


def test_from_chunks_lays_tokens_end_to_end(exercises):
    batch = exercises.from_chunks(MIXED, 4)
    assert batch.token_ids.tolist() == [5, 8, 1, 9, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 6, 3, 4]
    assert batch.query_starts.tolist() == [0, 3, 4, 6]


def test_from_chunks_computes_the_slot_of_each_token(exercises):
    # position 6 is at offset 2 of block 0, the second of its sequence; positions 3 and 4 are in blocks 1 and 5
    assert exercises.from_chunks(MIXED, 4).slots.tolist() == [[28, 29, 30, 2, 7, 20]]


def test_from_chunks_pads_short_block_tables(exercises):
    assert exercises.from_chunks(MIXED, 4).block_tables.tolist() == [[[7, -1, -1], [2, 0, -1], [1, 5, 6]]]


def test_from_chunks_returns_arrays_of_the_right_dtypes(exercises):
    batch = exercises.from_chunks(MIXED, 4)
    for name in ("token_ids", "positions", "query_starts", "block_tables"):
        assert getattr(batch, name).dtype == np.int32, name
    assert batch.slots.dtype == np.int64


def test_from_chunks_agrees_with_the_definition(exercises):
    random = np.random.default_rng(0)
    for _ in range(50):
        size, chunks, blocks = int(random.integers(1, 6)), [], iter(random.permutation(1000).tolist())
        for _ in range(random.integers(1, 6)):
            start, length = (int(n) for n in random.integers(1, 10, 2))
            table = [next(blocks) for _ in range(-(-(start + length) // size) + int(random.integers(0, 2)))]
            chunks.append(Chunk(random.integers(0, 100, length).tolist(), start, [table]))
        batch = exercises.from_chunks(chunks, size)
        for s, chunk in enumerate(chunks):
            own = slice(batch.query_starts[s], batch.query_starts[s + 1])
            positions, table = range(chunk.start, chunk.start + len(chunk.token_ids)), chunk.block_tables[0]
            assert batch.token_ids[own].tolist() == chunk.token_ids
            assert batch.positions[own].tolist() == list(positions)
            assert batch.slots[0, own].tolist() == [table[p // size] * size + p % size for p in positions]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [Chunk([], 0, [[1]])],
        [Chunk([1], -1, [[1]])],
        [Chunk([1, 2], 3, [[1]])],
        [MIXED[0], Chunk([1] * 5, 0, [[1]])],
    ],
)
def test_from_chunks_rejects_invalid_chunks(exercises, chunks):
    with pytest.raises(ValueError):  # noqa: PT011 - the exercise leaves the message open
        exercises.from_chunks(chunks, 4)


# schedule


@pytest.fixture
def serve(exercises, monkeypatch):
    """Return a function that serves prompts and answers of given lengths and returns the plans of all steps."""
    monkeypatch.setattr(Scheduler, "schedule", exercises.schedule)

    def serve(policy, requests, max_sequences=2, budget=8, late=()):
        blocks = BlockAllocator(50, 4)
        scheduler = Scheduler(blocks, policy=policy, max_sequences=max_sequences, max_batch_tokens=budget)
        arrivals = [*((0, *request) for request in requests), *late]
        plans = []
        while len(plans) < 100:
            for name, (step, prompt, answer) in zip("abcdefgh", arrivals, strict=False):
                if step == len(plans):
                    scheduler.add(Sequence.from_prompt(name, range(prompt), answer))
            if not scheduler.has_unfinished:
                return plans
            plan = scheduler.schedule()
            assert plan.chunks, "a step scheduled nothing although a request was unfinished"
            plans.append(plan)
            sequences = [scheduler.sequence(chunk) for chunk in plan.chunks]
            ends = [sequence.num_generated + 1 == sequence.max_tokens for sequence in sequences]
            tokens = [SampledToken(0, finish_reason="length" if end else None) for end in ends]
            scheduler.commit(plan, [[t] * c.num_samples for t, c in zip(tokens, plan.chunks, strict=True)])
        raise AssertionError("a request is unfinished after 100 steps")

    return serve


def format_plans(plans):
    """Format each step as a word: a capital letter for a chunk of a prompt, a small letter for a decode."""
    return " ".join("".join(c.name.upper() if c.is_prefill else c.name for c in plan.chunks) for plan in plans)


def test_schedule_static_admits_nothing_while_a_batch_runs(serve):
    assert format_plans(serve("static", [(2, 4), (2, 2), (2, 2)])) == "AB ab a a C c"


def test_schedule_static_finishes_a_batch_before_it_admits_a_late_request(serve):
    assert format_plans(serve("static", [(2, 3)], late=[(1, 2, 2)])) == "A a a B b"


def test_schedule_static_computes_all_prompts_of_the_batch_first(serve):
    assert format_plans(serve("static", [(12, 2), (4, 2)])) == "A AB ab"


def test_schedule_continuous_admits_a_sequence_as_soon_as_another_finishes(serve):
    assert format_plans(serve("continuous", [(2, 4), (2, 2), (2, 2)])) == "AB ab C ac a"


def test_schedule_continuous_computes_prompts_before_decodes(serve):
    assert format_plans(serve("continuous", [(2, 4)], late=[(2, 12, 2)])) == "A a B B ab a"


def test_schedule_chunked_mixes_decodes_and_prompts_with_decodes_first(serve):
    plans = serve("chunked", [(2, 4)], late=[(2, 12, 2)])
    assert format_plans(plans) == "A a aB aB b"
    assert [plan.num_tokens for plan in plans] == [2, 1, 8, 6, 1]  # the prompt gets the rest of the budget


def test_schedule_chunked_continues_a_prompt_before_it_admits_another(serve):
    assert format_plans(serve("chunked", [(12, 1), (4, 1)])) == "A AB"
