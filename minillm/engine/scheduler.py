"""Scheduler: which sequences advance in the next step, and by how many tokens. Integers only: no clock, no model.

`Scheduler.schedule` implements three policies, each in a line or two:

    static      run a batch to its end, then take the next one: what production systems once did
    continuous  sequences join and leave at every step (Yu et al. 2022, Orca); new prompts go first, and decodes wait
                while they are computed
    chunked     like continuous, but prompts are split into chunks that fill the budget left by the decodes; a decode
                never waits for a long prompt (Agrawal et al. 2024, Sarathi-Serve)

A sequence is admitted when there are blocks for all of its tokens, and takes another block each time its last one is
full. If no block is available, the sequence admitted last is *preempted*: it loses its blocks, keeps its tokens, and is
re-admitted before any new one. It then recomputes what the prefix cache no longer holds (Kwon et al. 2023, section
4.5).

In KV-cache groups with a sliding window, a sequence frees blocks after each step, so it holds only as many as the
window and one step's tokens cover. To benefit from that, a long prompt takes its blocks chunk by chunk, and an
admission leaves enough blocks for the running sequences to finish their prompts.

No admitted sequence starves. The order of first admission never changes, only later sequences are preempted, and a
preempted sequence is re-admitted before any new one. In the worst case the oldest sequence gets the whole pool to
itself, and `check` has made sure that this is enough. So the oldest sequence always finishes, and then the next one is
the oldest.

With windows, a prompt's next chunk can also fail to get blocks, when the blocks behind it are shared and so did not
become free. Then, too, the sequence admitted last is preempted, and its chunk is withdrawn from the plan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import count

from minillm.checks import check_integer, check_number
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.block_demand import blocks_needed, check_demand, frees_behind_windows, max_live_blocks
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import SequenceState, StepPlan
from minillm.engine.waiting_queue import WaitingQueue
from minillm.errors import RequestError
from minillm.trace.events import Admission, BlockCopy, Finish, Preemption, SampledToken, ScheduledChunk

POLICIES = ("static", "continuous", "chunked")


class Scheduler:
    """The waiting queue, the running sequences, and the policy that fills a step from them.

    Usage: `add` sequences. Then repeat: call `schedule`, compute what the plan lists, and `commit` the sampled tokens.

    Parameters
    ----------
    blocks : BlockAllocator of the KV cache.
    policy : one of POLICIES.
    max_batch_tokens : maximum number of tokens computed in one step.
    max_sequences : maximum number of completions that hold blocks.
    admission : the order in which new requests are admitted, one of `waiting_queue.ADMISSIONS`.
    watermark : share of the pool, at least 0 and below 1, that an admission leaves available while others run, so that
        these can grow.
    prefix_caching : whether computed blocks are published and looked up for admitted sequences.

    Attributes
    ----------
    running : the sequences that hold blocks, in the order of first admission.
    waiting : WaitingQueue of the sequences that do not.
    plan : the last plan, which `abandon` undoes. A caller for whom the step is final replaces it by an empty one.

    Raises
    ------
    RequestError
        A number is out of its range.
    ValueError
        `policy` or `admission` is unknown.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        policy: str = "chunked",
        max_batch_tokens: int = 512,
        max_sequences: int = 16,
        admission: str = "fcfs",
        watermark: float = 0.01,
        prefix_caching: bool = True,
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it can be {', '.join(POLICIES)}")
        self.blocks = blocks
        self.policy = policy
        self.max_batch_tokens = check_integer("max_batch_tokens", max_batch_tokens, 1)
        self.max_sequences = check_integer("max_sequences", max_sequences, 1)
        self.watermark = check_number("watermark", watermark, "at least 0 and less than 1", 0, 1, excluded=1)
        self.prefix_caching = prefix_caching
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(admission)
        self._requests: dict[str, dict[int, Sequence]] = {}  # unfinished sequences by request id and completion
        self.plan = StepPlan()
        self._is_changing = False  # whether queues, tables and allocator may disagree
        self._ranks = count()

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step. Each call is followed by `commit` or `abandon` before the next one."""
        plan = self.plan = StepPlan()
        with self._changing():
            if self.policy == "chunked":
                self._decode(plan)
                self._prefill(plan)
                self._admit(plan)
            else:  # the other two policies never compute a prompt and a decode in the same step
                may_admit = self.policy == "continuous" or not self.running
                self._prefill(plan)
                if may_admit:
                    self._admit(plan)
                if not plan.chunks:
                    self._decode(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: SequenceOf[SequenceOf[SampledToken | None]]) -> None:
        """Apply the results of a step: publish full blocks, free unreadable ones, fork, append tokens, and finish.

        Parameters
        ----------
        plan : the plan that `schedule` returned. `commit` fills in its `finished`.
        sampled : for each chunk, `num_samples` tokens, one per completion; None for a token that could not be sampled.
        """
        plan.before = [
            SequenceState(sequence, len(sequence.token_ids), sequence.num_completions)
            for request_id in {chunk.request_id for chunk in plan.chunks}
            for sequence in self._requests[request_id].values()
        ]
        with self._changing():
            for chunk, tokens in zip(plan.chunks, sampled, strict=True):
                sequence = self.sequence(chunk)
                sequence.num_computed = chunk.stop
                self._publish(sequence)
                self.blocks.free_before(sequence.block_tables, sequence.num_computed)
                completions = self._fork(sequence) if chunk.num_samples else []
                for completion, token in zip(completions, tokens, strict=True):
                    if token is not None:
                        completion.token_ids.append(token.token_id)
                        if token.finish_reason is not None:
                            plan.finished += self._finish(completion, token.finish_reason)

    def abandon(self) -> None:
        """Undo the last step, which failed, whether before, in or after `commit`. It can be repeated.

        What the step wrote to the cache is unknown, so its sequences lose their blocks and are computed again. If a
        change of the scheduler itself was interrupted, or has to be undone, all sequences lose their blocks, and the
        prefix cache is emptied.
        """
        if not self._is_changing and not self.plan.before:
            planned = [self._requests.get(c.request_id, {}).get(c.completion) for c in self.plan.chunks]
            with self._changing():
                for sequence in planned:
                    if sequence in self.running:
                        self._preempt(sequence)
            return
        self._is_changing = True
        unfinished: dict[str, dict[int, Sequence]] = {}
        for state in self.plan.before:
            state.restore()
            unfinished.setdefault(state.sequence.request_id, {})[state.sequence.completion] = state.sequence
        self._requests = {id: members for id, members in (self._requests | unfinished).items() if members}
        self.running.clear()
        self.waiting.clear()
        self.blocks.reset()
        for members in self._requests.values():
            for sequence in members.values():
                sequence.forget_blocks()
                self.waiting.push(sequence)
        self._is_changing = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the `with` block as one change. An exception leaves the mark, and `abandon` then resets everything."""
        self._is_changing = True
        yield
        self._is_changing = False

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Put a new request into the waiting queue.

        Raises
        ------
        RequestError
            An unfinished request has the same id, or the request could not be served even alone.
        """
        self.check_id(sequence.request_id)
        self.check(sequence)
        with self._changing():
            self._requests[sequence.request_id] = {sequence.completion: sequence}
            self.waiting.push(sequence)

    def check_id(self, request_id: str) -> None:
        """Raise RequestError if an unfinished request has this id."""
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} is still unfinished; choose another id")

    def check(self, sequence: Sequence) -> None:
        """Check that a new request could be served if it were alone.

        Raises
        ------
        RequestError
            The request asks for more completions than may run at once, or needs more blocks than the pool has.
        """
        if sequence.num_completions > self.max_sequences:
            raise RequestError(
                f"a request for {sequence.num_completions} completions needs them to run at once, but "
                f"max_sequences is {self.max_sequences}"
            )
        check_demand(sequence, self.max_batch_tokens, self.blocks)

    def max_live_blocks(self, num_positions: int) -> int:
        """Return the maximum number of blocks that a sequence holds while it grows to `num_positions`."""
        return max_live_blocks(num_positions, self.max_batch_tokens, self.blocks.block_size, self.blocks.windows)

    def end(self, request_id: str, reason: str) -> list[Finish]:
        """End the unfinished sequences of a request, waiting or running. Their blocks are available immediately.

        Raises
        ------
        RequestError
            There is no unfinished request with this id.
        """
        sequences = self.sequences(request_id)
        with self._changing():
            return [finish for sequence in sequences for finish in self._finish(sequence, reason)]

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request.

        Raises
        ------
        RequestError
            There is no unfinished request with this id.
        """
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise RequestError(f"there is no unfinished request {request_id!r}: it has finished, or was never added")
        return list(self._requests[request_id].values())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that new requests compute all of their prompts."""
        with self._changing():
            self.blocks.reset_prefix_cache()

    def sequence(self, chunk: ScheduledChunk) -> Sequence:
        """Return the unfinished sequence that a chunk advances."""
        return self._requests[chunk.request_id][chunk.completion]

    @property
    def request_ids(self) -> list[str]:
        """The unfinished requests, in the order of arrival."""
        return list(self._requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether this request is waiting or running."""
        return request_id in self._requests

    # --- filling a step -----------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan) -> None:
        """Advance each decoding sequence by one token, as far as the budget and the pool allow."""
        index = 0  # a preempted sequence is at `index` or after it, so none is skipped
        while index < len(self.running) and plan.num_tokens < self.max_batch_tokens:
            sequence = self.running[index]
            if not sequence.in_prefill and self._ensure_blocks(sequence, 1, plan):
                plan.add_chunk(sequence, 1)
            index += 1

    def _prefill(self, plan: StepPlan) -> None:
        """Advance the running sequences that are still in prefill, as far as the budget allows."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.in_prefill:
                self._schedule_chunk(sequence, plan)
            index += 1

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting sequences while `max_sequences`, the pool and the budget allow; schedule their first chunks.

        A static batch is closed after this step, so it also admits sequences whose first chunk exceeds the budget.
        """
        if plan.preempted:  # the preempted sequence would be re-admitted immediately
            return
        num_open = self.max_sequences - sum(sequence.num_completions for sequence in self.running)
        while self.waiting and (plan.num_tokens < self.max_batch_tokens or self.policy == "static"):
            sequence = self.waiting.peek()
            if sequence.num_completions > num_open or not self._try_admit(sequence, plan):
                return
            num_open -= sequence.num_completions
            self._schedule_chunk(sequence, plan)

    def _try_admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Move `sequence` from waiting to running if the pool has blocks for all of its tokens; return whether it has.

        The sequence takes all of these blocks now or, if its windows will free some of them on the way, only the blocks
        of its first step.
        """
        blocks, num_tokens = self.blocks, len(sequence.token_ids)
        # The last token is always computed, because its logits choose the next one.
        found, node = (
            blocks.match_prefix(sequence.token_ids[:-1]) if self.prefix_caching else (blocks.new_tables(), None)
        )
        # Not available: cached blocks that this sequence would reuse, and blocks that running prompts still need.
        reused = sum(not blocks.references[block] for table in found for block in table.live_blocks)
        promised = sum(self._blocks_needed(other.block_tables, other.prefill_end) for other in self.running)
        num_left = blocks.num_available - reused - promised - self._blocks_needed(found, num_tokens)
        if num_left < (int(self.watermark * blocks.num_blocks) if self.running else 0):
            return False
        self.waiting.pop()
        num_cached = found[0].capacity
        plan.admitted.append(
            Admission(
                sequence.request_id,
                sequence.completion,
                num_tokens,
                num_cached,
                after_preemption=sequence.rank is not None,
            )
        )
        sequence.block_tables = blocks.add_reference(found)
        end = num_tokens
        if frees_behind_windows(num_tokens, self.max_batch_tokens, blocks):
            end = min(num_tokens, num_cached + self.max_batch_tokens)
        plan.evicted += blocks.allocate(sequence.block_tables, end)
        sequence.num_computed, sequence.prefill_end = num_cached, num_tokens
        sequence.num_published, sequence.published_node = len(found[0].blocks), node
        if sequence.rank is None:
            sequence.rank = (next(self._ranks), sequence.completion)
        insort(self.running, sequence, key=_rank)
        return True

    def _blocks_needed(self, tables: list, num_tokens: int) -> int:
        """Return how many more blocks a sequence needs, at most, until its tables cover `num_tokens` positions."""
        return blocks_needed(tables, num_tokens, self.max_batch_tokens, self.blocks)

    def _schedule_chunk(self, sequence: Sequence, plan: StepPlan) -> None:
        """Schedule as many of the sequence's prefill tokens as the budget allows."""
        num_tokens = min(sequence.prefill_end - sequence.num_computed, self.max_batch_tokens - plan.num_tokens)
        if num_tokens and self._ensure_blocks(sequence, num_tokens, plan):
            plan.add_chunk(sequence, num_tokens)

    def _ensure_blocks(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Give `sequence` blocks of its own for its next `num_tokens` positions, preempting later sequences if needed.

        Returns False if `sequence` itself had to be preempted.
        """
        blocks, tables = self.blocks, sequence.block_tables
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        while True:
            missing = blocks.num_missing(tables, stop)
            index = start // blocks.block_size  # a fork shares a partly filled last block; all later ones are new
            shared = [] if missing else [table for table in tables if blocks.is_shared(table.blocks[index])]
            if not missing and not shared:
                return True
            if blocks.num_available < max(missing, 1):  # a copy of a shared block takes one
                victim = self.running[-1]
                plan.preempted.append(Preemption(victim.request_id, victim.completion, victim.num_computed))
                plan.withdraw(victim)
                self._preempt(victim)
                if victim is sequence:
                    return False
            elif missing:
                plan.evicted += blocks.allocate(tables, stop)
            else:
                source, evicted = blocks.copy_on_write(shared[0], index)
                plan.copies.append(BlockCopy(source, shared[0].blocks[index]))
                plan.evicted += evicted

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.waiting.push(sequence)

    # --- after a step -------------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Publish the blocks that are now full of computed tokens in the prefix index."""
        if not self.prefix_caching:
            return
        size = self.blocks.block_size
        for index in range(sequence.num_published, sequence.num_computed // size):
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            sequence.published_node = self.blocks.publish(
                sequence.block_tables, index, token_ids, sequence.published_node
            )
        sequence.num_published = sequence.num_computed // size

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """At the end of the prompt, return one sequence per requested completion; they share all blocks so far."""
        sequences = [sequence]
        for completion in range(1, sequence.num_completions):
            fork = sequence.fork(completion, self.blocks.add_reference(sequence.block_tables))
            self._requests[sequence.request_id][completion] = fork
            insort(self.running, fork, key=_rank)
            sequences.append(fork)
        sequence.num_completions = 1
        return sequences

    def _finish(self, sequence: Sequence, reason: str) -> list[Finish]:
        """End a sequence; return one event per completion that it represents."""
        self._release(sequence)
        unfinished = self._requests[sequence.request_id]
        del unfinished[sequence.completion]
        if not unfinished:
            del self._requests[sequence.request_id]
        return sequence.finish(reason)

    def _release(self, sequence: Sequence) -> None:
        """Remove `sequence` from the waiting or running ones and free its blocks."""
        self.waiting.discard(sequence)
        if sequence.block_tables:
            self.running.remove(sequence)
            self.blocks.free(sequence.block_tables)
        sequence.forget_blocks()

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.policy}, {len(self.running)} running, {len(self.waiting)} waiting, at most "
            f"{self.max_batch_tokens} tokens of {self.max_sequences} sequences per step, {self.blocks!r})"
        )


def _rank(sequence: Sequence) -> tuple[int, int]:
    assert sequence.rank is not None, "a running sequence has a rank"
    return sequence.rank
