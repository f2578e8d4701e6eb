"""Traces of the real scheduler with random tokens in place of a model: preemptions, shared prefixes, aborts, forks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from hypothesis import strategies as st

from minillm.engine import EngineConfig
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.recording import Abort, StepRecorder
from minillm.engine.scheduler import POLICIES, Scheduler
from minillm.engine.sequence import Sequence as EngineSequence
from minillm.trace import STAGES, Arrival, RunFacts, SampledToken, Trace

TEXTS = ("the ", "fox", " 한국", "é", "", "\n", ".")

Request = tuple[int, EngineSequence]  # the step before which it arrives, and its first sequence


@st.composite
def simulated_runs(draw: Callable) -> Trace:
    """The trace of up to seven requests under any policy, often in too small a pool."""
    size, budget = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    requests: list[Request] = []
    for number in range(draw(st.integers(1, 7))):
        prompt = [0] * draw(st.integers(0, 9)) + [number + 1] * draw(st.integers(1, 9))
        options = {"max_tokens": draw(st.integers(1, 30)), "num_completions": draw(st.sampled_from([1, 1, 1, 2, 3]))}
        requests.append((draw(st.integers(0, 10)), EngineSequence.from_prompt(f"r{number}", prompt, **options)))
    windows = draw(st.sampled_from([[None], [None], [7], [None, 7]]))
    num_needed = len(windows) * max(-(-sequence.max_positions // size) for _, sequence in requests)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICIES)),
        block_size=size,
        num_blocks=num_needed + draw(st.integers(0, 6)),
        max_batch_tokens=budget,
        max_sequences=draw(st.integers(3, 8)),
    )
    return simulate(config, requests, Random(draw(st.integers(0, 2**32))), windows)


def simulate(
    config: EngineConfig, requests: Sequence[Request], random: Random, windows: Sequence[int | None] = (None,)
) -> Trace:
    """The trace of the requests. Tokens, early ends and aborts are drawn from `random`."""
    scheduler = Scheduler(
        BlockAllocator(config.num_blocks, config.block_size, windows),
        policy=config.policy,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
    )
    facts = RunFacts(
        "none", config.policy, "fcfs", config.block_size, config.num_blocks, config.max_batch_tokens, 8, 0.01, True,
        windows=list(windows),
    )  # fmt: skip
    trace, recorder, number = Trace(facts), StepRecorder(lambda: 0.0), 0
    while requests or scheduler.has_unfinished:
        arriving = [sequence for time, sequence in requests if time <= number]
        requests = [(time, sequence) for time, sequence in requests if time > number]
        for sequence in arriving:
            scheduler.add(sequence)
            recorder.pending.arrived.append(arrival(sequence))
        if scheduler.running and random.random() < 0.005:
            aborted = random.choice(scheduler.running)
            finished = scheduler.end(aborted.request_id, "abort")
            recorder.pending.aborts.append(Abort(aborted.request_id, finished))
        plan = scheduler.schedule()
        recorder.scheduled(plan, scheduler)
        for chunk in plan.chunks:
            sequence = scheduler.sequence(chunk)
            is_last = sequence.num_generated + 1 == sequence.max_tokens
            for completion in sequence.completions[: chunk.num_samples]:
                token_id = random.randrange(3)
                token = SampledToken(token_id, None, completion, random.choice(TEXTS), f"={token_id}")
                token.finish_reason = "length" if is_last else "stop" if random.random() < 0.02 else None
                chunk.sampled.append(token)
        scheduler.commit(plan, [chunk.sampled for chunk in plan.chunks])
        record = recorder.complete(plan.finished)
        recorder.next_step()
        record.time, record.milliseconds = float(number), dict.fromkeys(STAGES, 1.0)
        trace.append(record)
        number += 1
    return trace


def arrival(sequence: EngineSequence) -> Arrival:
    """The arrival of a request at time 0, with a prompt text."""
    return Arrival(
        request_id=sequence.request_id,
        time=0.0,
        num_prompt_tokens=sequence.num_prompt_tokens,
        prompt=f"{sequence.request_id} says ",
        params={},
        n=sequence.num_completions,
        max_tokens=sequence.max_tokens,
        priority=0,
        token_texts=[f"<{token_id}>" for token_id in sequence.token_ids],
    )


def single_step_run(name: str, prompt: str, text: str) -> Trace:
    """A run of one step, in which a request with this name and prompt gets this text for an answer."""
    facts = RunFacts(name, "chunked", "fcfs", 4, 2, 8, 2, 0.0, True)
    scheduler, recorder = Scheduler(BlockAllocator(2, 4)), StepRecorder(lambda: 0.0)
    scheduler.add(EngineSequence.from_prompt(name, [1, 2, 3], 2))
    recorder.scheduled(scheduler.schedule(), scheduler)
    record = recorder.complete([])
    record.time, record.milliseconds = 0.0, dict.fromkeys(STAGES, 0.5)
    record.arrived = [Arrival(name, 0.0, 3, prompt, {}, 1, 2, 0)]
    record.chunks[0].sampled = [SampledToken(7, text=text)]
    return Trace(facts, [record])
