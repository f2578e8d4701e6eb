"""Sequence: the state of one request, in integers only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field


@dataclass
class Sequence:
    """The tokens of one request and how far they have been computed.

    Attributes
    ----------
    token_ids : prompt, then answer.
    num_prompt_tokens : how many of them are the prompt.
    num_computed : how many of them have their key and value in the cache.
    block_table : the cache blocks they lie in, in order.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self):
        return (
            f"Sequence({self.num_prompt_tokens} prompt + {self.num_generated} generated tokens, "
            f"{self.num_computed} computed, {len(self.block_table)} blocks)"
        )


def common_prefix(left: SequenceOf[int], right: SequenceOf[int]) -> int:
    """How many tokens two texts have in common from their start: what the second can reuse of the first's cache."""
    different = (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(different, min(len(left), len(right)))
