"""minillm through its usual interface: `LLM` to load, `Transformer.forward` to compute."""

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from minillm import LLM, Engine, EngineConfig, __version__
from minillm.llm import PREFILL_CHUNK
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache
from minillm.ops import backend
from minillm.trace import run_metrics

backend("numba")  # compiled code is imported before `load` is timed


class Minillm:
    """See `minillm.bench.engines`."""

    def load(self, path: str, threads: int) -> dict[str, Any]:
        """Load the model; also return the bytes of weights per decode step, and of keys and values per token."""
        self.llm = LLM(path, threads=threads)
        return {
            "version": __version__,
            "weight_bytes": self.llm.transformer.weight_bytes,
            "kv_bytes_per_token": self.llm.kv_cache.bytes_per_token,
        }

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        """Time the prompt, computed in chunks as in `LLM`."""
        self._make_cache(1, len(tokens))
        return [self._timed(self._compute, tokens, self.tables[0]) for _ in range(repeats)]

    def fill(self, prompts: list[list[int]]) -> None:
        """Compute every prompt, each with its own block tables, which have room for one more token."""
        self.length = len(prompts[0])
        self._make_cache(len(prompts), self.length + 1)
        for tokens, tables in zip(prompts, self.tables, strict=True):
            self._compute(tokens, tables)

    def decode(self, tokens: list[int], repeats: int) -> list[float]:
        """Time steps of all sequences in one batch."""
        return [self._timed(self._step, tokens) for _ in range(repeats)]

    def logits(self, tokens: list[int], path: str) -> None:
        """Save the logits from `LLM.logits` to `path`."""
        np.save(path, self.llm.logits(tokens))

    def serve(
        self, prompts: list[list[int]], answer_lengths: list[int], clients: int, **options: Any
    ) -> dict[str, Any]:
        """Serve requests from `clients` clients, each of which waits for its answers; return `RunMetrics` as a dict."""
        # Imported here, because it imports the whole benchmark, and the start of this process is timed.
        from minillm.bench.serving import serve_clients

        longest = max(len(prompt) + length for prompt, length in zip(prompts, answer_lengths, strict=True))
        blocks_each = KVCache.num_blocks_for(self.llm.config, longest, EngineConfig.block_size)
        num_blocks = clients * blocks_each
        config = EngineConfig(num_blocks=num_blocks, **options)
        cache = KVCache(self.llm.config, num_blocks, config.block_size)
        engine = Engine(self.llm.transformer, cache, config.scheduler(cache), threads=self.llm.threads)
        requests = zip(prompts, answer_lengths, strict=True)
        return asdict(run_metrics(serve_clients(engine, requests, clients)))

    def _make_cache(self, num_sequences: int, length: int) -> None:
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


ENGINE = Minillm
