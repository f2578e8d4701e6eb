"""Roofline: the bytes and operations of a step, and the shortest time in which a machine can carry it out.

A step that reads `num_bytes` from memory and performs `flops` operations takes at least the larger of
num_bytes / bandwidth and flops / peak (Williams, Waterman and Patterson 2009, "Roofline"). Decode reads every weight
for each token and performs two operations with it, so it is limited by memory. Prefill uses each weight for hundreds of
tokens, so it is limited by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minillm.model.config import ModelConfig


@dataclass(frozen=True)
class Work:
    """Bytes read, as minillm stores them, and floating-point operations (multiplications and additions)."""

    num_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations per byte read."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class Roofline:
    """The measured limits of a machine."""

    bandwidth: float  # bytes read per second
    peak: float  # float32 operations per second

    def memory_seconds(self, work: Work) -> float:
        """Return the shortest time in which the bytes can be read."""
        return work.num_bytes / self.bandwidth

    def arithmetic_seconds(self, work: Work) -> float:
        """Return the shortest time in which the operations can be performed."""
        return work.flops / self.peak

    def seconds(self, work: Work) -> float:
        """Return the shortest time for both, which overlap."""
        return max(self.memory_seconds(work), self.arithmetic_seconds(work))

    def bound(self, work: Work) -> str:
        """Return which of the two limits the work: "memory" or "arithmetic"."""
        return "memory" if self.memory_seconds(work) >= self.arithmetic_seconds(work) else "arithmetic"

    def attainable(self, intensity: float) -> float:
        """Return the highest operations per second at a number of operations per byte: the roof."""
        return min(self.peak, intensity * self.bandwidth)


@dataclass(frozen=True)
class ModelCosts:
    """The costs of running a model, from which `step_work` computes the work of a step.

    Attributes
    ----------
    weight_bytes : size of the stored weights that a step reads, in bytes.
    kv_bytes_per_token : bytes of one position in the KV cache.
    layer_flops, head_flops : operations per token in the layers' matrix products, and per token's logits.
    attention_flops : operations per pair of a query and a key.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    layer_flops: int
    head_flops: int
    attention_flops: int

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> ModelCosts:
        """Return the costs of the model that `config` describes."""
        return cls(weight_bytes, kv_bytes_per_token, layer_flops(config), head_flops(config), attention_flops(config))


def step_work(costs: ModelCosts, chunks: Iterable[tuple[int, int]]) -> Work:
    """Return the work of a step.

    The weights are read once for all sequences; keys and values, including those before the chunk, are read for each
    sequence. Logits are computed for the last token of each chunk. Every layer is assumed to read all positions, which
    overestimates layers with a sliding window.

    Parameters
    ----------
    chunks : the first position and the number of tokens of each chunk.
    """
    chunks = list(chunks)
    tokens = sum(n for _, n in chunks)
    pairs = sum(n * start + n * (n + 1) // 2 for start, n in chunks)  # a token attends to itself and those before
    return Work(
        num_bytes=costs.weight_bytes + sum(start + n for start, n in chunks) * costs.kv_bytes_per_token,
        flops=tokens * costs.layer_flops + len(chunks) * costs.head_flops + pairs * costs.attention_flops,
    )


def prefill_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> Work:
    """Return the work of computing a prompt of `num_tokens`, with logits for its last token.

    The weights, keys and values are read once, as if the whole prompt were one chunk.
    """
    pairs = num_tokens * (num_tokens + 1) // 2  # the i-th token attends to i tokens, including itself
    return Work(
        num_bytes=weight_bytes + num_tokens * kv_bytes_per_token,
        flops=num_tokens * layer_flops(config) + head_flops(config) + pairs * attention_flops(config),
    )


def decode_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, contexts: Sequence[int]) -> Work:
    """Return the work of decoding one token per sequence, where sequence s already has `contexts[s]` tokens.

    The weights are read once for all sequences; keys and values are read for each sequence.
    """
    pairs = sum(contexts) + len(contexts)  # a token also attends to itself
    per_token = layer_flops(config) + head_flops(config)
    return Work(
        num_bytes=weight_bytes + pairs * kv_bytes_per_token,
        flops=len(contexts) * per_token + pairs * attention_flops(config),
    )


def kv_bytes_per_token(config: ModelConfig, bytes_per_number: int) -> int:
    """Return the bytes of one position in the KV cache: a key and a value per layer and key/value head."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number


def layer_flops(config: ModelConfig) -> int:
    """Return the operations per token in the layers' matrix products: two per weight, counting only routed experts."""
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if "layers." in name and len(shape) == 2}
    experts = sum(2 * shape[0] * shape[1] for name, shape in shapes.items() if ".experts." in name)
    always = sum(2 * shape[0] * shape[1] for name, shape in shapes.items()) - experts
    return always + (experts * config.experts_per_token // config.num_experts if config.num_experts else 0)


def head_flops(config: ModelConfig) -> int:
    """Return the operations for the logits of one token."""
    return 2 * config.vocab_size * config.hidden_size


def attention_flops(config: ModelConfig) -> int:
    """Return the operations per query-key pair in all layers: the score, and adding the weighted value."""
    return 4 * config.num_layers * config.num_heads * config.head_dim
