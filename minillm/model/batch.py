"""Batch: one step's tokens, flattened.

A step advances several sequences, each by a *chunk*: many tokens of a prompt (prefill) or one new token (decode).
Their chunks are laid end to end. Nothing is padded, and the transformer need not know which is which:

    sequence      0  0  0  0  0 | 1 | 2  2  2
    token_ids     5  8  1  9  4 | 7 | 3  3  6
    positions     0  1  2  3  4 | 9 | 4  5  6
    query_starts  0               5   6       9

Where a token's key and value go, and where those before it lie, is said once for each group of layers (`blocks.py`): of
most models there is one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from minillm.engine.block_allocator import GIVEN_BACK
from minillm.engine.step_plan import ScheduledChunk, StepPlan
from minillm.reprs import few, few_blocks


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that a step computes: its next tokens, where they start, and its block table."""

    token_ids: SequenceOf[int]
    start: int  # position of the first of them
    block_table: SequenceOf[
        int
    ]  # covers positions up to start + len(token_ids) - 1; see `minillm.engine.block_allocator`


@dataclass(frozen=True)
class Batch:
    """What `Transformer.forward` reads: flat integer arrays, one entry a token, and the block tables of each sequence.

    Attributes
    ----------
    token_ids, positions : int32 [T]
    slots : int64 [groups, T], where each token's key and value go: block * B + offset
    query_starts : int32 [S + 1], sequence `s` owns tokens `query_starts[s]` to `query_starts[s + 1]`
    block_tables : int32 [groups, S, most blocks a sequence], unused and given-back entries are -1
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    block_tables: np.ndarray

    @classmethod
    def from_chunks(cls, chunks: SequenceOf[Chunk | ScheduledChunk], block_size: int, num_groups: int = 1) -> Batch:
        """Lay the chunks end to end.

        Raises
        ------
        ValueError
            No chunk, an empty chunk, or a block table that is too short for its chunk or has given its blocks back.
        """
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        lengths = [len(chunk.token_ids) for chunk in chunks]
        widest = max(len(chunk.block_table) for chunk in chunks)
        tables = np.full((len(chunks), widest), GIVEN_BACK, np.int32)
        for number, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
            capacity = len(chunk.block_table) // num_groups * block_size
            if len(chunk.block_table) % num_groups:
                raise ValueError(
                    f"chunk {number} has a table of {len(chunk.block_table)} blocks; of {num_groups} groups of layers "
                    "there must be equally many of each"
                )
            if length == 0 or chunk.start < 0 or chunk.start + length > capacity:
                groups = f" for {num_groups} groups of layers" if num_groups > 1 else ""
                raise ValueError(
                    f"chunk {number} holds {length} tokens from position {chunk.start} on; it needs at least one "
                    f"token, and its {len(chunk.block_table)} blocks of {block_size}{groups} end at {capacity}"
                )
            tables[number, : len(chunk.block_table)] = chunk.block_table
        tables = tables.reshape(len(chunks), -1, num_groups)
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + length) for chunk, length in zip(chunks, lengths, strict=True)]
        )
        owners = np.repeat(np.arange(len(chunks)), lengths)
        blocks = tables[owners, positions // block_size]
        if blocks.min() == GIVEN_BACK:
            token = blocks.min(axis=1).argmin()
            raise ValueError(
                f"chunk {owners[token]} would write to position {positions[token]}, but its block table has given back "
                f"the block of that: {few_blocks(chunks[owners[token]].block_table)}"
            )
        return cls(
            token_ids=np.concatenate([np.asarray(chunk.token_ids, np.int32) for chunk in chunks]),
            positions=positions.astype(np.int32),
            slots=blocks.T.astype(np.int64, order="C") * block_size + positions % block_size,
            query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            block_tables=np.ascontiguousarray(tables.transpose(2, 0, 1)),
        )

    @classmethod
    def from_plan(cls, plan: StepPlan, block_size: int, num_groups: int = 1) -> Batch:
        """Lay the chunks of a scheduler's plan end to end. Raises as `from_chunks` does."""
        return cls.from_chunks(plan.chunks, block_size, num_groups)

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """`S`."""
        return len(self.query_starts) - 1

    def __repr__(self):
        spans = (
            f"{self.positions[start]}..{self.positions[stop - 1]}" if stop - start > 1 else f"{self.positions[start]}"
            for start, stop in zip(self.query_starts[:-1], self.query_starts[1:], strict=True)
        )
        return f"Batch({self.num_tokens} tokens of {self.num_sequences} sequences, positions {few(spans, ', ')})"
