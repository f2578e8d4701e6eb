"""minillm, as everybody else uses it: `LLM` to load, `Transformer.forward` to compute."""

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from minillm import LLM, EngineConfig, __version__
from minillm.engine import Engine as ServingEngine
from minillm.llm import PREFILL_CHUNK
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache
from minillm.ops import backend
from minillm.trace import run_metrics

backend("numba")  # imported now: loading is to be about the model


class Engine:
    """See `minillm.bench.engines`."""

    def load(self, path: str, threads: int) -> dict[str, Any]:
        """Also says how many bytes a decode step reads: weights, and keys and values for every token before."""
        self.llm = LLM(path, threads=threads)
        return {
            "version": __version__,
            "weight_bytes": self.llm.transformer.weight_bytes,
            "kv_bytes_per_token": self.llm.kv_cache.bytes_per_token,
        }

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        """In pieces, as LLM does it."""
        self._make_room(1, len(tokens))
        return [self._timed(self._compute, tokens, self.tables[0]) for _ in range(repeats)]

    def fill(self, prompts: list[list[int]]) -> None:
        """Every sequence gets a block table of its own, with room for one token more."""
        self.length = len(prompts[0])
        self._make_room(len(prompts), self.length + 1)
        for tokens, tables in zip(prompts, self.tables, strict=True):
            self._compute(tokens, tables)

    def decode(self, tokens: list[int], repeats: int) -> list[float]:
        """All sequences in one batch."""
        return [self._timed(self._step, tokens) for _ in range(repeats)]

    def logits(self, tokens: list[int], path: str) -> None:
        """By the front door."""
        np.save(path, self.llm.logits(tokens))

    def serve(
        self, prompts: list[list[int]], answer_lengths: list[int], clients: int, **options: Any
    ) -> dict[str, Any]:
        """Requests of so many clients, each of whom sends the next when it has its answer. Returns `RunMetrics`."""
        # Imported only now: with it comes the whole benchmark, and how long this engine takes to start is measured.
        from minillm.bench.serving import serve_clients

        longest = max(len(prompt) + length for prompt, length in zip(prompts, answer_lengths, strict=True))
        blocks_each = KVCache.num_blocks_for(self.llm.config, longest, EngineConfig.block_size)
        config = EngineConfig(num_blocks=clients * blocks_each, **options)
        cache = KVCache(self.llm.config, config.num_blocks, config.block_size)
        engine = ServingEngine(self.llm.transformer, cache, config.scheduler(cache), threads=self.llm.threads)
        requests = zip(prompts, answer_lengths, strict=True)
        return asdict(run_metrics(serve_clients(engine, requests, clients)))

    def _make_room(self, num_sequences: int, length: int) -> None:
        block_size = self.llm.kv_cache.block_size
        blocks_each = KVCache.num_blocks_for(self.llm.config, length, block_size)
        self.cache = KVCache(self.llm.config, num_sequences * blocks_each, block_size)
        num_groups, num_blocks = self.cache.num_groups, self.cache.num_blocks
        self.tables = [
            [list(range(first + group, first + blocks_each, num_groups)) for group in range(num_groups)]
            for first in range(0, num_blocks, blocks_each)
        ]

    def _compute(self, tokens: list[int], tables: list[list[int]]) -> None:
        for start in range(0, len(tokens), PREFILL_CHUNK):
            self._forward([Chunk(tokens[start : start + PREFILL_CHUNK], start, tables)])

    def _step(self, tokens: list[int]) -> None:
        self._forward([Chunk([token], self.length, tables) for token, tables in zip(tokens, self.tables, strict=True)])

    def _forward(self, chunks: list[Chunk]) -> None:
        batch = Batch.from_chunks(chunks, self.cache.block_size, self.cache.num_groups)
        self.llm.transformer.forward(batch, self.cache)

    def _timed(self, action: Callable[..., None], *arguments: Any) -> float:
        started = perf_counter()
        action(*arguments)
        return perf_counter() - started
