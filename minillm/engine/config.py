"""EngineConfig: how requests are scheduled, and how much memory there is for them."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.checks import check_flag
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineConfig:
    """How requests are scheduled, and how much memory there is for them.

    Attributes
    ----------
    policy : "static", "continuous" or "chunked"; see `minillm.engine.scheduler`.
    block_size : positions a block of the KV cache holds.
    num_blocks : blocks of the KV cache; None for as many as the full context fills. Where some of a model's layers see
        only a window, a block holds a group of layers (see `minillm.engine.block_allocator`), and so is smaller.
    kv_dtype : what keys and values are stored as, "float32" or "float16": half the memory, rounded to 11 bits.
    max_batch_tokens : tokens a step computes at most. It bounds the memory for intermediate results, and how long
        a decode can be kept waiting by prompts.
    max_sequences : completions that run at once at most.
    prefix_caching : whether a prompt may take over the blocks of earlier ones that began alike.
    admission : "fcfs", "priority" or "shortest": who is admitted first.
    watermark : share of the blocks that an admission leaves available.
    """

    policy: str = "chunked"
    block_size: int = 16
    num_blocks: int | None = None
    kv_dtype: str = "float32"
    max_batch_tokens: int = 512
    max_sequences: int = 16
    prefix_caching: bool = True
    admission: str = "fcfs"
    watermark: float = 0.01

    def scheduler(self, blocks: BlockAllocator) -> Scheduler:
        """A scheduler with these options over a cache's blocks. Raises as `Scheduler` does."""
        return Scheduler(
            blocks,
            policy=self.policy,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            admission=self.admission,
            watermark=self.watermark,
            prefix_caching=check_flag("prefix_caching", self.prefix_caching),
        )
