"""Sequence: the state of one completion of a request. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minillm.engine.block_table import BlockTable
from minillm.engine.prefix_index import Node
from minillm.reprs import sequence_name
from minillm.trace.events import Finish


@dataclass(eq=False)
class Sequence:
    """The tokens of one completion, how many have been computed, and the blocks of their keys and values.

    Attributes
    ----------
    token_ids : the prompt, followed by the answer.
    num_prompt_tokens : length of the prompt.
    request_id, completion : the request, and the number of this completion in it, from 0.
    max_tokens : maximum length of the answer.
    num_completions : completions that this sequence represents. A request for n completions computes its prompt once,
        as one sequence; at the end of the prompt it is forked into n sequences, and represents one of them.
    priority : smaller is admitted first, under the "priority" admission order.
    num_computed : tokens whose key and value are in the cache.
    prefill_end : tokens known at the last admission. The sequence is in prefill up to there, and decodes afterwards.
    num_published : full blocks, counted from the first, that have been offered to the prefix index.
    published_node : the last of them in the prefix index; None if the index no longer contains it.
    block_tables : one BlockTable per KV-cache group while the sequence runs; empty while it waits.
    rank : (order of first admission, completion), or None before the first admission. Smaller ranks are served first.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    request_id: str = ""
    completion: int = 0
    max_tokens: int = 1
    num_completions: int = 1
    priority: int = 0
    num_computed: int = 0
    prefill_end: int = 0
    num_published: int = 0
    published_node: Node | None = None
    block_tables: list[BlockTable] = field(default_factory=list)
    rank: tuple[int, int] | None = None

    @classmethod
    def from_prompt(
        cls, request_id: str, prompt: SequenceOf[int], max_tokens: int, *, num_completions: int = 1, priority: int = 0
    ) -> Sequence:
        """Return the sequence of a new request: nothing generated, nothing computed."""
        return cls(
            list(prompt),
            len(prompt),
            request_id,
            max_tokens=max_tokens,
            num_completions=num_completions,
            priority=priority,
        )

    def fork(self, completion: int, block_tables: list[BlockTable]) -> Sequence:
        """Return another completion of the same request that continues from here, with its own block tables."""
        assert self.rank is not None, "only a running sequence is forked"
        return Sequence(
            list(self.token_ids),
            self.num_prompt_tokens,
            self.request_id,
            completion,
            max_tokens=self.max_tokens,
            priority=self.priority,
            num_computed=self.num_computed,
            prefill_end=self.num_computed,
            num_published=self.num_published,
            published_node=self.published_node,
            block_tables=block_tables,
            rank=(self.rank[0], completion),
        )

    def forget_blocks(self) -> None:
        """Start over with nothing computed and no blocks. The caller has freed them."""
        self.block_tables = []
        self.num_computed = self.prefill_end = self.num_published = 0
        self.published_node = None

    def finish(self, reason: str) -> list[Finish]:
        """Return the events of its end: one per completion that it represents."""
        return [Finish(self.request_id, completion, reason) for completion in self.completions]

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completions(self) -> range:
        """The numbers of the completions that this sequence represents."""
        return range(self.completion, self.completion + self.num_completions)

    @property
    def in_prefill(self) -> bool:
        """Whether tokens that were known at the last admission remain to be computed."""
        return self.num_computed < self.prefill_end

    @property
    def max_positions(self) -> int:
        """Maximum number of positions that it fills. Its last token fills none, because it is never computed."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def name(self) -> str:
        """The request's id, and the completion's number unless that is 0."""
        return sequence_name(self.request_id, self.completion)

    def __repr__(self) -> str:
        num_blocks = sum(len(table.live_blocks) for table in self.block_tables)
        return (
            f"Sequence({self.name}: {self.num_prompt_tokens} prompt + {self.num_generated} generated tokens, "
            f"{self.num_computed} computed, {num_blocks} blocks)"
        )
