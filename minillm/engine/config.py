"""EngineConfig: how requests are scheduled, and how much memory they get."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.checks import check_flag
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.model.kv_cache import KVCache


@dataclass(frozen=True)
class EngineConfig:
    """How requests are scheduled, and how much memory they get.

    Attributes
    ----------
    policy : "static", "continuous" or "chunked"; see `minillm.engine.scheduler`.
    block_size : positions per block of the KV cache.
    num_blocks : blocks of the KV cache; None for as many as the full context fills. In models where only some layers
        have a sliding window, a block holds one KV-cache group and is therefore smaller.
    kv_dtype : type that keys and values are stored in, "float32" or "float16". The latter takes half the memory and
        rounds to 11 significant bits.
    max_batch_tokens : maximum number of tokens computed in one step. It limits the memory for intermediate results, and
        how long a decode can be delayed by prompts.
    max_sequences : maximum number of completions that run at once.
    prefix_caching : whether a prompt can reuse the blocks of earlier prompts with the same prefix.
    admission : which request is admitted first: "fcfs", "priority" or "shortest".
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

    def scheduler(self, kv_cache: KVCache) -> Scheduler:
        """Return a scheduler with these options over a cache's blocks. Raises the errors of `Scheduler`."""
        return Scheduler(
            BlockAllocator(kv_cache.num_blocks, kv_cache.block_size, kv_cache.windows),
            policy=self.policy,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            admission=self.admission,
            watermark=self.watermark,
            prefix_caching=check_flag("prefix_caching", self.prefix_caching),
        )
