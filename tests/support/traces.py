"""Records and traces for tests: written by hand, or drawn at random by Hypothesis without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from minillm.trace import (
    FREED,
    STAGES,
    Admission,
    Arrival,
    BlockCopy,
    Finish,
    PoolState,
    Preemption,
    RunFacts,
    RunningSequence,
    SampledToken,
    ScheduledChunk,
    StepRecord,
    Trace,
)
from minillm.trace.roofline import ModelCosts

NUM_BLOCKS = 8
COSTS = ModelCosts(100, 8, 200, 50, 16)
FACTS = RunFacts("tiny", "chunked", "fcfs", 4, NUM_BLOCKS, 64, 4, 0.01, True, COSTS)

names = st.text(max_size=5)
counts = st.integers(0, 100)
numbers = st.floats(0, 1e6)
blocks = st.integers(0, NUM_BLOCKS - 1)
params = st.dictionaries(names, counts | names | st.lists(counts, max_size=2), max_size=2)
tokens = st.builds(SampledToken, counts, st.none() | st.floats(-50, 0), counts, names, st.none() | names)

# Texts with control characters, direction marks, joiners, wide characters and lone surrogates.
hostile_texts = st.text(
    st.characters() | st.sampled_from("\x1b[]\u202e\u200d\ufe0f\ud83d👩한\u0301\n\t\x00\x9b"), max_size=30
)


def step(number: int, **fields: Any) -> StepRecord:
    """A step of half a second, all of it in the forward pass. Block 0 has one reference and block 1 has two."""
    events = ("arrived", "aborted", "admitted", "preempted", "finished", "chunks", "running")
    defaults = {name: [] for name in events} | {"waiting": [], "num_waiting": 0}
    return StepRecord(
        step=number,
        time=float(number),
        milliseconds=dict.fromkeys(STAGES, 0.0) | {"forward": 500.0},
        pool=PoolState([1, 2] + [0] * (NUM_BLOCKS - 2)),
        **(defaults | fields),
    )


def pairs(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """Lists of up to two."""
    return st.lists(strategy, max_size=2)


@st.composite
def block_tables(draw: Callable, num_groups: int) -> list[list[int]]:
    """The block tables of a sequence, one per KV-cache group. The first blocks of each may have been freed."""
    length = draw(st.integers(0, 5))
    tables = []
    for _ in range(num_groups):
        num_freed = draw(st.integers(0, length))
        live = draw(st.lists(blocks, min_size=length - num_freed, max_size=length - num_freed))
        tables.append([FREED] * num_freed + live)
    return tables


def chunks(num_groups: int) -> st.SearchStrategy:
    """Any chunks."""
    phases, token_ids = st.sampled_from(["prefill", "decode"]), st.lists(counts, min_size=1, max_size=5)
    sampled = st.lists(tokens, max_size=3)
    return st.builds(ScheduledChunk, names, counts, phases, counts, token_ids, block_tables(num_groups), sampled)


def arrivals(latest: float) -> st.SearchStrategy:
    """Arrivals up to a time."""
    times, texts = st.floats(0, latest), st.none() | pairs(names)
    return st.builds(
        Arrival, names, times, counts, st.none() | names, params, counts, counts, counts, texts
    )  # fmt: skip


@st.composite
def pools(draw: Callable, running: list[RunningSequence]) -> PoolState:
    """A pool whose reference counts agree with the block tables of the running sequences."""
    listed = [block for sequence in running for table in sequence.block_tables for block in table]
    references = [listed.count(block) for block in range(NUM_BLOCKS)]
    cached = [block for block, count in enumerate(references) if count == 0 and draw(st.booleans())]
    evicted = draw(st.lists(blocks, max_size=4))
    return PoolState(references, cached, evicted, draw(pairs(st.builds(BlockCopy, blocks, blocks))))


@st.composite
def traces(draw: Callable) -> Trace:
    """A trace of up to three steps that passes the reader's checks, but that no engine would produce."""
    windows = draw(st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3))
    trace, first, time, num_groups = Trace(replace(FACTS, windows=windows)), draw(counts), 0.0, len(windows)
    errors = st.just(ValueError("not written to the file"))
    for number in range(draw(st.integers(0, 3))):
        time += draw(numbers)
        tables = block_tables(num_groups)
        running = draw(pairs(st.builds(RunningSequence, names, counts, counts, counts, tables)))
        waiting = draw(pairs(names))
        trace.append(
            StepRecord(
                step=first + number,
                time=time,
                milliseconds={stage: draw(numbers) for stage in STAGES},
                arrived=draw(pairs(arrivals(time))),
                aborted=draw(pairs(names)),
                admitted=draw(pairs(st.builds(Admission, names, counts, counts, counts, st.booleans()))),
                preempted=draw(pairs(st.builds(Preemption, names, counts, counts))),
                finished=draw(pairs(st.builds(Finish, names, counts, names, st.none() | names, errors))),
                chunks=draw(pairs(chunks(num_groups))),
                running=running,
                waiting=waiting,
                num_waiting=len(waiting) + draw(counts),
                pool=draw(pools(running)),
            )
        )
    return trace
