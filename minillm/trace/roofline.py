"""Roofline: what a piece of work must move and compute, and so how fast a machine could do it at best.

A step that reads `bytes` from memory and does `flops` takes at least the longer of bytes / bandwidth and
flops / peak (Williams, Waterman and Patterson 2009, "Roofline"). Decode reads every weight for each token and does
two operations with it: memory is its limit. Prefill uses each weight for hundreds of tokens: arithmetic is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minillm.model.config import ModelConfig


@dataclass(frozen=True)
class Work:
    """What must be done, by any engine: multiplications and additions, and bytes read as minillm stores them."""

    num_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations for every byte read."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class Roofline:
    """What a machine was measured to do."""

    bandwidth: float  # bytes a second it reads
    peak: float  # float32 operations a second

    def memory_seconds(self, work: Work) -> float:
        """The least time it takes to read what `work` reads."""
        return work.num_bytes / self.bandwidth

    def arithmetic_seconds(self, work: Work) -> float:
        """The least time it takes to compute what `work` computes."""
        return work.flops / self.peak

    def seconds(self, work: Work) -> float:
        """The least time for both, one behind the other's back."""
        return max(self.memory_seconds(work), self.arithmetic_seconds(work))

    def bound(self, work: Work) -> str:
        """Which of the two it waits for: "memory" or "arithmetic"."""
        return "memory" if self.memory_seconds(work) >= self.arithmetic_seconds(work) else "arithmetic"

    def attainable(self, intensity: float) -> float:
        """Operations a second at so many for every byte: the roof itself."""
        return min(self.peak, intensity * self.bandwidth)


@dataclass(frozen=True)
class ModelCosts:
    """What running a model costs: all that `step_work` needs to know of it.

    Attributes
    ----------
    weight_bytes : that a step reads, as the weights are stored.
    kv_bytes_per_token : that a position takes in the KV cache.
    layer_flops, head_flops : operations for one token in the layers' products, and for one token's scores.
    attention_flops : operations for one token looking at one token.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    layer_flops: int
    head_flops: int
    attention_flops: int

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> ModelCosts:
        """Those of the model that `config` describes."""
        return cls(weight_bytes, kv_bytes_per_token, layer_flops(config), head_flops(config), attention_flops(config))


def step_work(costs: ModelCosts, chunks: Iterable[tuple[int, int]]) -> Work:
    """One step that advances several sequences: a chunk of n tokens from position `start` on is `(start, n)`.

    All share one reading of the weights; keys and values, those before the chunk too, are each sequence's own. Each
    chunk is scored at its last token. Every layer is taken to see all positions: where some have a window, this is more
    than they must read and compute.
    """
    chunks = list(chunks)
    tokens = sum(n for _, n in chunks)
    pairs = sum(n * start + n * (n + 1) // 2 for start, n in chunks)  # a token looks at those before it, and itself
    return Work(
        num_bytes=costs.weight_bytes + sum(start + n for start, n in chunks) * costs.kv_bytes_per_token,
        flops=tokens * costs.layer_flops + len(chunks) * costs.head_flops + pairs * costs.attention_flops,
    )


def prefill_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> Work:
    """One prompt of `num_tokens`, scored at its last token.

    The weights are read once, as if all tokens passed in one go; so are the keys and values.
    """
    pairs = num_tokens * (num_tokens + 1) // 2  # the i-th token looks at i tokens, itself among them
    return Work(
        num_bytes=weight_bytes + num_tokens * kv_bytes_per_token,
        flops=num_tokens * layer_flops(config) + head_flops(config) + pairs * attention_flops(config),
    )


def decode_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, contexts: Sequence[int]) -> Work:
    """One new token for each sequence, which has `contexts[s]` tokens before it.

    All share one reading of the weights; keys and values are each sequence's own.
    """
    pairs = sum(contexts) + len(contexts)  # a token looks at itself, too
    per_token = layer_flops(config) + head_flops(config)
    return Work(
        num_bytes=weight_bytes + pairs * kv_bytes_per_token,
        flops=len(contexts) * per_token + pairs * attention_flops(config),
    )


def kv_bytes_per_token(config: ModelConfig, bytes_per_number: int) -> int:
    """Bytes that a position takes in the KV cache: a key and a value for every layer and key/value head."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number


def layer_flops(config: ModelConfig) -> int:
    """Operations that one token costs in the matrix products of all layers: two a weight, of the experts it takes."""
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if "layers." in name and len(shape) == 2}
    experts = sum(2 * shape[0] * shape[1] for name, shape in shapes.items() if ".experts." in name)
    always = sum(2 * shape[0] * shape[1] for name, shape in shapes.items()) - experts
    return always + (experts * config.experts_per_token // config.num_experts if config.num_experts else 0)


def head_flops(config: ModelConfig) -> int:
    """Operations for one token's scores."""
    return 2 * config.vocab_size * config.hidden_size


def attention_flops(config: ModelConfig) -> int:
    """Operations for one token looking at one token, in all layers: a product with its key, and its value added."""
    return 4 * config.num_layers * config.num_heads * config.head_dim
