"""Scheduler: which sequence advances by how many tokens in the next step. Integers only, no clock, no model.

Three policies, each a line or two in `schedule`:

    static      take a batch, run it to the end, take the next; what production systems once did
    continuous  join and leave at every step (Yu et al. 2022, Orca). New prompts go first, and while they are computed
                nobody decodes
    chunked     as continuous, but prompts are cut into chunks that fill what the decodes leave of a step's budget, so
                that nobody's next token waits for somebody else's prompt (Agrawal et al. 2024, Sarathi-Serve)

A sequence is admitted once there are blocks for all its tokens, and takes a further block whenever it has filled one.
If there is none, whoever was admitted last is *preempted*: it loses its blocks, keeps its tokens, and comes back before
anybody new, to compute again what the prefix index no longer finds (recompute, Kwon et al. 2023, section 4.5).

Where layers of a model see only a *window*, a sequence gives back, after each step, those of their blocks that no query
of it reaches any more. So of them it never holds more than the window and a step's tokens take, however long it is. To
profit from that, a prompt then takes its blocks chunk by chunk, and an admission leaves to those under way what they
will come to need.

Nobody starves. Order of first admission never changes, only later ones make way, and nobody overtakes in the queue
whoever was admitted before: so the first of all always goes on to its end, and then the next is the first. With a
window a prompt's next chunk may find no blocks either, if those behind it are shared and did not come free. Then, too,
the last admitted makes way, and gives up what this step had for it. The first finds room at the latest when it is
alone, for all the pool is then its own, and `check` has seen to it that this suffices.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as SequenceOf
from itertools import count
from math import inf

from minillm.checks import check_integer, check_number
from minillm.engine.block_allocator import BlockAllocator, held, num_held
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import Admitted, Finished, Preempted, Sampled, ScheduledChunk, StepPlan
from minillm.engine.waiting_queue import ADMISSIONS, WaitingQueue
from minillm.errors import RequestError

__all__ = ["ADMISSIONS", "POLICIES", "Sampled", "ScheduledChunk", "Scheduler", "StepPlan"]

POLICIES = ("static", "continuous", "chunked")


class Scheduler:
    """Queues, budgets, and the policy that fills a step from them.

    Use: `add` sequences; then by turns `schedule`, compute what the plan says, and `commit` what came of it.

    Parameters
    ----------
    blocks : BlockAllocator of the KV cache; it knows the windows of the model's layers.
    policy : one of POLICIES.
    max_batch_tokens : a step computes at most so many tokens.
    max_sequences : at most so many completions hold blocks.
    admission : one of ADMISSIONS, the order in which new requests are admitted; see `WaitingQueue`.
    watermark : share of the pool, from 0 up to but not 1, that an admission must leave available while others run, so
        that these find blocks to grow into.
    prefix_caching : whether computed blocks are published, and looked up for who is admitted.

    Attributes
    ----------
    running : the sequences that were admitted and hold their blocks, first admitted first.
    waiting : WaitingQueue.

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
        self.watermark = check_number("watermark", watermark, "from 0 up to but not 1", 0, 1, excluded=1)
        self.prefix_caching = prefix_caching
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(admission)
        self._requests: dict[str, list[Sequence]] = {}  # the unfinished ones' unfinished sequences
        self._ranks = count()

    # --- requests come and go -----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a new request wait its turn.

        Raises
        ------
        RequestError
            Its id is taken by an unfinished one, or it could not be served even if it were alone.
        """
        if sequence.request_id in self._requests:
            raise RequestError(f"a request {sequence.request_id!r} is under way; give this one another id")
        self.check(sequence)
        self._requests[sequence.request_id] = [sequence]
        self.waiting.push(sequence)

    def check(self, sequence: Sequence) -> None:
        """Make sure that a new request could be served if it were alone.

        Raises
        ------
        RequestError
            It asks for more completions than may run at once, or for more blocks than there are.
        """
        if sequence.num_forks > self.max_sequences:
            raise RequestError(
                f"a request for {sequence.num_forks} completions needs them to run at once, but "
                f"max_sequences is {self.max_sequences}"
            )
        needed = self.most_blocks(sequence.most_positions)
        if needed > self.blocks.num_blocks:
            at_once, remedy = "", "shorten one"
            if needed < self.blocks.blocks_for(sequence.most_positions):
                window = max(filter(None, self.blocks.windows))
                at_once = f" at once, with a window of {window} and max_batch_tokens of {self.max_batch_tokens}"
                if None not in self.blocks.windows:  # however long a text, it would then fit
                    remedy = "lower max_batch_tokens"
            raise RequestError(
                f"a prompt of {sequence.num_prompt_tokens} tokens and max_tokens of {sequence.max_tokens} can come to "
                f"fill {sequence.most_positions} positions, which takes {needed} blocks of "
                f"{self.blocks.block_size}{at_once}, but the pool has {self.blocks.num_blocks}: {remedy}, or give the "
                "engine more num_blocks"
            )

    def most_blocks(self, num_positions: int) -> int:
        """How many blocks a sequence that comes to fill `num_positions` holds at most, at any one time."""
        rows = self.blocks.rows_for(num_positions)
        return sum(min(rows, self._most_rows(window)) for window in self.blocks.windows)

    def _most_rows(self, window: int | None) -> float:
        """How many rows of its table a sequence of any length has not given back at most, in layers of this window."""
        if window is None:
            return inf
        at_once = window - 1 + self.max_batch_tokens  # what a step's first query sees behind it, and the step
        return self.blocks.rows_for(at_once - 1) + 1  # wherever in a block they begin

    def end(self, request_id: str, reason: str) -> list[Finished]:
        """End a request's unfinished sequences now, wherever they are; their blocks are available at once.

        Raises
        ------
        RequestError
            No request of this id is unfinished.
        """
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise RequestError(f"no request {request_id!r} is under way: it has finished, or there never was one")
        return [self._finish(sequence, reason) for sequence in list(self._requests[request_id])]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request waits or runs."""
        return request_id in self._requests

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step. Each call must be followed by `commit` or `abandon` before the next."""
        plan = StepPlan()
        if self.policy == "chunked":
            self._decode(plan)
            self._prefill(plan)
            self._admit(plan)
            return plan
        # The other two compute prompts apart from decodes.
        joins = self.policy == "continuous" or not self.running
        self._prefill(plan)
        if joins:
            self._admit(plan)
        if not plan.chunks:
            self._decode(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Take over what came of a step: sequences grow, part, finish, and their full blocks can be found.

        Parameters
        ----------
        plan : what `schedule` gave; gains who `finished`.
        sampled : for each chunk the `num_samples` tokens chosen after it, one for each completion in order.
        """
        for chunk, choices in zip(plan.chunks, sampled, strict=True):
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            self._publish(sequence)
            self.blocks.give_back_behind(sequence.block_table, sequence.num_computed)
            members = self._part(sequence) if chunk.num_samples else []
            for member, choice in zip(members, choices, strict=True):
                if choice.token_id is not None:
                    member.token_ids.append(choice.token_id)
                if choice.finish_reason is not None:
                    plan.finished.append(self._finish(member, choice.finish_reason))

    def abandon(self, plan: StepPlan) -> None:
        """A step could not be carried out: nobody can tell what it has written, so all it touched start over."""
        for chunk in plan.chunks:
            if chunk.sequence in self.running:
                self._preempt(chunk.sequence)

    # --- filling a step -----------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan) -> None:
        """Each sequence that decodes advances by the token chosen last, if budget and blocks allow."""
        position = 0
        while position < len(self.running) and plan.num_tokens < self.max_batch_tokens:
            sequence = self.running[position]
            if not sequence.in_prefill and self._make_room(sequence, 1, plan):
                plan.advance(sequence, 1, is_prefill=False)
            position += 1

    def _prefill(self, plan: StepPlan) -> None:
        """Those admitted before, but not at the end of their prompt, advance as far as the budget goes."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if sequence.in_prefill:
                self._advance(sequence, plan)
            position += 1

    def _admit(self, plan: StepPlan) -> None:
        """As many as there are seats, blocks and budget for leave the queue, and advance by their first chunk.

        A static batch is closed after this step, so it takes in also those whose first chunk the budget puts off.
        """
        if plan.preempted:  # whoever had to go would come straight back
            return
        seats = self.max_sequences - sum(sequence.num_forks for sequence in self.running)
        while self.waiting and (plan.num_tokens < self.max_batch_tokens or self.policy == "static"):
            sequence = self.waiting.peek()
            if sequence.num_forks > seats or not self._enter(sequence, plan):
                return
            seats -= sequence.num_forks
            self._advance(sequence, plan)

    def _enter(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Let `sequence` run, with the blocks that are found; False if there are too few for all it will come to hold.

        It takes them at once or, where some come back on the way, those of its first step.
        """
        blocks, num_tokens = self.blocks, len(sequence.token_ids)
        # Not all of them: the last token is always computed, for its scores choose the next.
        found, node = blocks.find(sequence.token_ids[:-1]) if self.prefix_caching else ([], None)
        num_cached = len(found) // blocks.num_groups * blocks.block_size
        revived = sum(not blocks.references[block] for block in held(found))  # available, but not to be handed out
        promised = sum(self._to_come(other.prefill_end, other.block_table) for other in self.running)
        left = blocks.num_available - revived - promised - self._to_come(num_tokens, found)
        if left < (int(self.watermark * blocks.num_blocks) if self.running else 0):
            return False
        self.waiting.pop()
        plan.admitted.append(Admitted(sequence, num_cached, after_preemption=sequence.rank is not None))
        sequence.block_table = blocks.share(found)
        end = num_tokens
        if self.most_blocks(num_tokens) < blocks.blocks_for(num_tokens):
            end = min(num_tokens, num_cached + self.max_batch_tokens)
        plan.evicted += blocks.extend(sequence.block_table, end)
        sequence.num_computed, sequence.prefill_end = num_cached, num_tokens
        sequence.num_published, sequence.published = len(found) // blocks.num_groups, node
        if sequence.rank is None:
            sequence.rank = (next(self._ranks), sequence.completion)
        insort(self.running, sequence, key=_rank)
        return True

    def _to_come(self, num_tokens: int, block_table: SequenceOf[int]) -> int:
        """How many blocks more than now a table holds at most until it has all for so many tokens."""
        to_take = self.blocks.blocks_for(num_tokens) - len(block_table)
        if to_take <= 0:  # as of all who decode: their tables need not be counted
            return 0
        return max(0, min(to_take, self.most_blocks(num_tokens) - num_held(block_table)))

    def _advance(self, sequence: Sequence, plan: StepPlan) -> None:
        """Prefill as much of `sequence` as the budget allows."""
        num_tokens = min(sequence.prefill_end - sequence.num_computed, self.max_batch_tokens - plan.num_tokens)
        if num_tokens and self._make_room(sequence, num_tokens, plan):
            plan.advance(sequence, num_tokens, is_prefill=True)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks of its own for the positions `sequence` fills next, whoever was admitted last making way.

        False if that is `sequence` itself.
        """
        blocks, table, start = self.blocks, sequence.block_table, sequence.num_computed
        while True:
            missing = blocks.blocks_for(start + num_tokens) - len(table)
            shared = [] if missing > 0 else [place for place in blocks.row(start) if blocks.is_shared(table[place])]
            if missing <= 0 and not shared:
                return True
            if blocks.num_available < max(missing, 1):
                victim = self.running[-1]
                plan.preempted.append(Preempted(victim, victim.num_computed))
                plan.withdraw(victim)
                self._preempt(victim)
                if victim is sequence:
                    return False
            elif missing > 0:
                plan.evicted += blocks.extend(table, start + num_tokens)
            else:
                source, evicted = blocks.own(table, shared[0])
                plan.copies.append((source, table[shared[0]]))
                plan.evicted += evicted

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.waiting.push(sequence)

    # --- after a step -------------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Offer the rows that have become full of computed tokens to the prefix index."""
        if not self.prefix_caching:
            return
        size = self.blocks.block_size
        for row in range(sequence.num_published, sequence.num_computed // size):
            token_ids = sequence.token_ids[row * size : (row + 1) * size]
            sequence.published = self.blocks.publish(sequence.block_table, row, token_ids, sequence.published)
        sequence.num_published = sequence.num_computed // size

    def _part(self, sequence: Sequence) -> list[Sequence]:
        """At the end of the prompt: as many sequences as completions were asked for, sharing all blocks so far."""
        members = [sequence]
        for completion in range(1, sequence.num_forks):
            fork = Sequence.of(sequence.request_id, sequence.token_ids, sequence.max_tokens, priority=sequence.priority)
            fork.completion, fork.rank = completion, (sequence.rank[0], completion)
            fork.num_computed = fork.prefill_end = sequence.num_computed
            fork.num_published, fork.published = sequence.num_published, sequence.published
            fork.block_table = self.blocks.share(sequence.block_table)
            self._requests[sequence.request_id].append(fork)
            insort(self.running, fork, key=_rank)
            members.append(fork)
        sequence.num_forks = 1
        return members

    def _finish(self, sequence: Sequence, reason: str) -> Finished:
        self._leave(sequence)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
        return Finished(sequence, reason)

    def _leave(self, sequence: Sequence) -> None:
        """Take `sequence` off the queue or out of the running ones, and its blocks with it."""
        self.waiting.discard(sequence)
        if sequence.block_table:
            self.running.remove(sequence)
            self.blocks.shrink(sequence.block_table)
        sequence.num_computed = 0

    def __repr__(self):
        return (
            f"Scheduler({self.policy}, {len(self.running)} running, {len(self.waiting)} waiting, at most "
            f"{self.max_batch_tokens} tokens of {self.max_sequences} sequences a step, {self.blocks!r})"
        )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
