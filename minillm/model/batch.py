"""Batch: one step's tokens, flattened.

A step advances several sequences, each by a *chunk*: many tokens of a prompt (prefill) or one new token (decode). The
chunks are laid end to end, without padding, and the transformer does not need to know which kind each one is:

    sequence      0  0  0  0  0 | 1 | 2  2  2
    token_ids     5  8  1  9  4 | 7 | 3  3  6
    positions     0  1  2  3  4 | 9 | 4  5  6
    query_starts  0               5   6       9

`slots` gives the place in the KV cache where each token's key and value are written, and `block_tables` the places of
the earlier ones. Both have one row per KV-cache group; most models have a single group.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minillm.reprs import abbreviated, format_block_tables

# In a padded block table: a block that was freed because it is behind the group's sliding window (FREED in the engine),
# or padding after a shorter table.
NO_BLOCK = -1


class ChunkLike(Protocol):
    """The part of one sequence that a step computes. A scheduler's chunk has these fields, as does `Chunk`."""

    @property
    def token_ids(self) -> SequenceOf[int]:
        """The tokens to compute."""

    @property
    def start(self) -> int:
        """Position of the first token."""

    @property
    def block_tables(self) -> SequenceOf[SequenceOf[int]]:
        """The sequence's blocks, one table per KV-cache group."""


class PlanLike(Protocol):
    """A scheduler's plan for a step."""

    @property
    def chunks(self) -> SequenceOf[ChunkLike]:
        """The chunks in the order of the batch."""


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that a step computes.

    Attributes
    ----------
    token_ids : the tokens to compute.
    start : position of the first one.
    block_tables : for each KV-cache group, the blocks that hold positions 0 to `start + len(token_ids) - 1`.
    """

    token_ids: SequenceOf[int]
    start: int
    block_tables: SequenceOf[SequenceOf[int]]


@dataclass(frozen=True)
class Batch:
    """What `Transformer.forward` reads: flat integer arrays with one entry per token, and the block tables.

    Attributes
    ----------
    token_ids, positions : int32 [T]
    slots : int64 [groups, T], where each token's key and value are written: block * B + offset
    query_starts : int32 [S + 1]; sequence `s` owns tokens `query_starts[s]` to `query_starts[s + 1]`
    block_tables : int32 [groups, S, maximum blocks per sequence]; freed and unused entries are -1
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    block_tables: np.ndarray

    @classmethod
    def from_chunks(cls, chunks: SequenceOf[ChunkLike], block_size: int, num_groups: int = 1) -> Batch:
        """Lay the chunks end to end.

        Raises
        ------
        ValueError
            There is no chunk, a chunk is empty, it has too few block tables, or a table does not cover it.
        """
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        for number, chunk in enumerate(chunks):
            _check_chunk(number, chunk, block_size, num_groups)
        lengths = [len(chunk.token_ids) for chunk in chunks]
        tables = _padded([chunk.block_tables for chunk in chunks], num_groups)
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + length) for chunk, length in zip(chunks, lengths, strict=True)]
        )
        sequences = np.repeat(np.arange(len(chunks)), lengths)
        blocks = tables[:, sequences, positions // block_size]  # [groups, T]
        if blocks.min() == NO_BLOCK:
            token = blocks.min(axis=0).argmin()
            chunk = chunks[sequences[token]]
            raise ValueError(
                f"chunk {sequences[token]} would write to position {positions[token]}, whose block has been freed: its "
                f"block tables are {format_block_tables(chunk.block_tables)}"
            )
        return cls(
            token_ids=np.concatenate([np.asarray(chunk.token_ids, np.int32) for chunk in chunks]),
            positions=positions.astype(np.int32),
            slots=blocks.astype(np.int64) * block_size + positions % block_size,
            query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            block_tables=tables,
        )

    @classmethod
    def from_plan(cls, plan: PlanLike, block_size: int, num_groups: int = 1) -> Batch:
        """Lay the chunks of a scheduler's plan end to end. Raises the errors of `from_chunks`."""
        return cls.from_chunks(plan.chunks, block_size, num_groups)

    def moved(self, move: Callable[[np.ndarray], Any]) -> Batch:
        """Return the batch with `move` applied to each array: a backend's `as_indices`, which moves it to the GPU."""
        return Batch(**{name: move(array) for name, array in vars(self).items()})

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """`S`."""
        return len(self.query_starts) - 1

    @property
    def last_tokens(self) -> np.ndarray:
        """Index of each sequence's last token, [S]."""
        return self.query_starts[1:] - 1

    def __repr__(self) -> str:
        spans = (
            f"{self.positions[start]}..{self.positions[stop - 1]}" if stop - start > 1 else f"{self.positions[start]}"
            for start, stop in zip(self.query_starts[:-1], self.query_starts[1:], strict=True)
        )
        return (
            f"Batch({self.num_tokens} tokens of {self.num_sequences} sequences, positions {abbreviated(spans, ', ')})"
        )


def _check_chunk(number: int, chunk: ChunkLike, block_size: int, num_groups: int) -> None:
    num_tables, lengths = len(chunk.block_tables), {len(table) for table in chunk.block_tables}
    if num_tables != num_groups or len(lengths) != 1:
        raise ValueError(
            f"chunk {number} has {num_tables} block tables of {sorted(lengths)} blocks; expected {num_groups}, one per "
            "KV-cache group, all of the same length"
        )
    length, capacity = len(chunk.token_ids), lengths.pop() * block_size
    if length == 0 or chunk.start < 0 or chunk.start + length > capacity:
        raise ValueError(
            f"chunk {number} has {length} tokens starting at position {chunk.start}; it needs at least one token, and "
            f"its block tables cover positions 0 to {capacity - 1}"
        )


def _padded(block_tables: SequenceOf[SequenceOf[SequenceOf[int]]], num_groups: int) -> np.ndarray:
    """The block tables of S sequences as one array, int32 [groups, S, maximum blocks]."""
    longest = max(len(tables[0]) for tables in block_tables)
    padded = np.full((num_groups, len(block_tables), longest), NO_BLOCK, np.int32)
    for sequence, tables in enumerate(block_tables):
        for group, table in enumerate(tables):
            padded[group, sequence, : len(table)] = table
    return padded
