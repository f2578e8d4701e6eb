"""Sequence: the state of one completion of a request, in integers only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minillm.engine.block_allocator import num_held
from minillm.engine.prefix_index import Node


@dataclass(eq=False)
class Sequence:
    """The tokens of one completion, how far they have been computed, and where their keys and values lie.

    Attributes
    ----------
    token_ids : prompt, then answer.
    num_prompt_tokens : how many of them are the prompt.
    request_id, completion : whose it is; a request's completions are numbered from 0.
    max_tokens : the answer has at most so many.
    num_forks : completions that this sequence stands for. A request of n completions computes its prompt once, as one
        sequence of n forks, which then parts into n sequences of one.
    priority : smaller goes first, where the admission order looks at it.
    num_computed : how many tokens have their key and value in the cache.
    prefill_end : tokens known when it was last admitted: up to there it is in prefill, from there on it decodes.
    num_published : how many rows of its table, from the first on, have been offered to the prefix index.
    published : the node of the last of them in the prefix index; None where nobody can find it.
    block_table : the cache blocks its tokens lie in, in order (of each group of layers, side by side); GIVEN_BACK for
        those that no query reaches any more.
    rank : (order of first admission, completion), or None before that: who goes first when not all can go.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    request_id: str = ""
    completion: int = 0
    max_tokens: int = 1
    num_forks: int = 1
    priority: int = 0
    num_computed: int = 0
    prefill_end: int = 0
    num_published: int = 0
    published: Node | None = None
    block_table: list[int] = field(default_factory=list)
    rank: tuple[int, int] | None = None

    @classmethod
    def of(cls, request_id: str, prompt: SequenceOf[int], max_tokens: int, **more: int) -> Sequence:
        """A new request's: nothing generated, nothing computed."""
        return cls(list(prompt), len(prompt), request_id, max_tokens=max_tokens, **more)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completions(self) -> range:
        """The numbers of the completions it stands for."""
        return range(self.completion, self.completion + self.num_forks)

    @property
    def in_prefill(self) -> bool:
        """Whether tokens that stood there when it was admitted are still to be computed."""
        return self.num_computed < self.prefill_end

    @property
    def most_positions(self) -> int:
        """Positions it can come to fill: all tokens but the very last, which nothing follows."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def name(self) -> str:
        """Its request's id, and the completion's number unless it is the first."""
        return f"{self.request_id}.{self.completion}" if self.completion else self.request_id

    def __repr__(self):
        return (
            f"Sequence({self.name}: {self.num_prompt_tokens} prompt + {self.num_generated} generated tokens, "
            f"{self.num_computed} computed, {num_held(self.block_table)} blocks)"
        )
