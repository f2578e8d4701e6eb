"""A fake model that executes the plans of a scheduler and checks them."""

import zlib

from minillm.engine.block_table import FREED
from minillm.trace import SampledToken

END = 3  # the token that ends a text


def next_token(tokens, completion):
    """Return the next token of the fake model, a function of all tokens so far, as in a real model."""
    return zlib.crc32(bytes([*tokens, 0, completion])) % 5


def expected_answer(prompt, max_tokens, completion, end=END):
    """Return the prompt and the answer of a request that is served alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (len(tokens) == len(prompt) or tokens[-1] != end):
        tokens.append(next_token(tokens, completion))
    return tokens


class FakeModel:
    """Execute the plans of a scheduler. The memory of each slot holds the text up to its position.

    Each step reads the memory through the block table of each group, as attention does: only within the window.
    """

    def __init__(self, scheduler, end=END):
        self.scheduler, self.end, self.memory = scheduler, end, {}
        self.answers = {}  # (request id, completion) -> tokens
        self.prompts = {}  # request id -> tokens
        self.generated = {}  # (request id, completion) -> tokens
        add = scheduler.add

        def add_and_remember(sequence):
            add(sequence)
            self.prompts[sequence.request_id] = list(sequence.token_ids)

        scheduler.add = add_and_remember

    def step(self):
        """Run one step: check its plan, write and read the memory, and sample."""
        plan = self.scheduler.schedule()
        self.check(plan)
        for copy in plan.copies:
            for offset in range(self.scheduler.blocks.block_size):
                self.memory[copy.target, offset] = self.memory.get((copy.source, offset))
        slots = [
            slot
            for chunk in plan.chunks
            for position in range(chunk.start, chunk.stop)
            for slot in self.slots(chunk, position)
        ]
        assert len(slots) == len(set(slots))  # no two tokens are written to the same slot
        sequences = [self.scheduler.sequence(chunk) for chunk in plan.chunks]
        texts = [tuple(sequence.token_ids) for sequence in sequences]
        for chunk, text in zip(plan.chunks, texts, strict=True):
            for position in range(chunk.start, chunk.stop):
                for group, slot in enumerate(self.slots(chunk, position)):
                    self.memory[slot] = group, text[: position + 1]
        for chunk, text in zip(plan.chunks, texts, strict=True):
            for group, window in enumerate(self.scheduler.blocks.windows):
                for position in range(0 if window is None else max(0, chunk.start - window + 1), chunk.stop):
                    assert self.memory[self.slots(chunk, position)[group]] == (group, text[: position + 1])
        self.scheduler.commit(plan, [self.sample(chunk) for chunk in plan.chunks])
        for chunk in plan.chunks:
            for token in chunk.sampled:
                self.generated.setdefault((chunk.request_id, token.completion), []).append(token.token_id)
        for finish in plan.finished:
            key = finish.request_id, finish.completion
            self.answers[key] = self.prompts[finish.request_id] + self.generated[key]
        return plan

    def slots(self, chunk, position):
        """Return the slot of a position in each KV-cache group, as a block and an offset."""
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


def max_blocks_per_group(scheduler, positions, window):
    """Return the maximum number of live blocks that a sequence has in one KV-cache group.

    Without a window, they hold all positions. With a window, they hold the window and one step at any alignment.
    """
    size = scheduler.blocks.block_size
    num_live = positions if window is None else window - 1 + scheduler.max_batch_tokens
    return min((positions - 1) // size + 1, max((start + num_live - 1) // size + 1 for start in range(size)))


def max_blocks(scheduler, positions):
    """Return the maximum number of live blocks that a sequence has in all KV-cache groups together."""
    return sum(max_blocks_per_group(scheduler, positions, window) for window in scheduler.blocks.windows)


def check_tables(scheduler):
    """Check that, between steps, the tables list exactly the blocks that later queries can read."""
    size, windows = scheduler.blocks.block_size, scheduler.blocks.windows
    for sequence in scheduler.running:
        for table, window in zip(sequence.block_tables, windows, strict=True):
            position = sequence.num_computed  # of the next query
            hidden = 0 if window is None else max(0, position - window + 1) // size
            assert table.blocks[:hidden] == [FREED] * hidden
            assert FREED not in table.blocks[hidden:]
            assert table.capacity >= position
            assert len(table.live_blocks) <= max_blocks_per_group(scheduler, sequence.max_positions, window)
