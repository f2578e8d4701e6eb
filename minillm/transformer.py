"""The forward pass: token ids in, scores for the next token out. Start reading here.

A Llama-style transformer is an embedding, a stack of layers, and a head. Every layer adds two things to the running
vector of each token: what attention gathers from the tokens before it, and what a gated feed-forward layer makes
of the token itself. Prefill and decode are this same pass, over many tokens of a sequence or over one.

The numbers are worked out by `ops`, a backend (see `minillm/ops/__init__.py`); this file says what is computed.

Shapes, here and everywhere: `T` tokens in the step, `S` sequences, `V` vocabulary, `D` hidden size (the numbers that
describe a token on its way), `F` feed-forward size, `H` query heads, `G` key/value heads, `K` numbers in a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minillm.batch import Batch
from minillm.config import ModelConfig
from minillm.kv_cache import KVCache
from minillm.rope import rope_frequencies

Array = Any  # an array of the backend's library
Probe = Callable[[str, Array], None]


def no_probe(name: str, value: Array) -> None:
    """What is shown every intermediate result when nobody wants to look."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix (outputs x inputs, in the backend's own layout), and its bias [outputs] if it has one."""

    weight: Any
    bias: Array | None


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    attention_norm: Array  # [D]
    q: Linear  # D -> H * K
    k: Linear  # D -> G * K
    v: Linear  # D -> G * K
    output: Linear  # H * K -> D
    mlp_norm: Array  # [D]
    gate: Linear  # D -> F
    up: Linear  # D -> F
    down: Linear  # F -> D


class Transformer:
    """A model's weights and the pass through them.

    Parameters
    ----------
    config : ModelConfig
    load : callable
        Gives the tensor of a name in `config.tensor_shapes()`, a float32 array or a QuantizedMatrix. It is asked for
        one after another, so that a checkpoint need never be in memory twice.
    ops : module
        The backend that computes: one of `minillm.ops`.
    """

    def __init__(self, config: ModelConfig, load: Callable[[str], Any], ops: ModuleType):
        self.config = config
        self.ops = ops
        self.frequencies = ops.as_vector(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
        self.magnitude = config.rope_scaling.magnitude if config.rope_scaling else 1.0
        self.embedding = ops.as_matrix(load("embedding.weight"))
        self.layers = self._load_layers(load)
        self.fused_layers = ops.fuse(self.layers, config.norm_eps)
        self.final_norm = ops.as_vector(load("final_norm.weight"))
        self.head = self.embedding if config.tie_embeddings else ops.as_matrix(load("head.weight"))

    def _load_layers(self, load: Callable[[str], Any]) -> list[Layer]:
        """All layers' weights. A projection is loaded for every layer before the next, so that a backend may lay them
        end to end: those that are multiplied with the same vectors, and those of one layer after another."""
        ops, count = self.ops, self.config.num_layers

        def vectors(name: str) -> list[Array]:
            return [ops.as_vector(load(f"layers.{index}.{name}.weight")) for index in range(count)]

        def linears(*names: str, has_bias: bool) -> list[list[Linear]]:
            stems = [f"layers.{index}.{name}" for index in range(count) for name in names]
            matrices = ops.as_matrices(load(f"{stem}.weight") for stem in stems)
            biases = [ops.as_vector(load(f"{stem}.bias")) if has_bias else None for stem in stems]
            pairs = [Linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
            return [pairs[first :: len(names)] for first in range(len(names))]

        config = self.config
        parts = {"attention_norm": vectors("attention_norm"), "mlp_norm": vectors("mlp_norm")}
        parts["q"], parts["k"], parts["v"] = linears(
            "attention.q", "attention.k", "attention.v", has_bias=config.attention_bias
        )
        (parts["output"],) = linears("attention.output", has_bias=config.output_bias)
        parts["gate"], parts["up"] = linears("mlp.gate", "mlp.up", has_bias=config.mlp_bias)
        (parts["down"],) = linears("mlp.down", has_bias=config.mlp_bias)
        return [Layer(**{name: part[index] for name, part in parts.items()}) for index in range(count)]

    def forward(
        self, batch: Batch, kv_cache: KVCache, *, every_token: bool = False, probe: Probe = no_probe
    ) -> np.ndarray:
        """Advance every sequence of the batch by its chunk.

        Parameters
        ----------
        batch : Batch
            T tokens of S sequences.
        kv_cache : KVCache
            Holds the keys and values of all earlier positions; gains those of this step.
        every_token : bool
            Score the next token after each token (T rows), not only after each chunk's last (S rows).
        probe : callable
            Is shown each intermediate as `probe("layers.3.attention.q", array)`; what it sees is what is computed.

        Returns
        -------
        logits, float32 [S, V] or [T, V]

        Raises
        ------
        ValueError
            A token id is not in the vocabulary.
        """
        if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.config.vocab_size:
            raise ValueError(f"{batch} holds a token id outside 0 to {self.config.vocab_size - 1}")
        ops = self.ops
        angles = ops.rotary_angles(batch.positions, self.frequencies, self.magnitude)
        x = ops.embed(batch.token_ids, self.embedding)  # [T, D], and so it stays through all layers
        probe("embedding", x)
        if self.fused_layers and probe is no_probe:
            x = self.fused_layers(x, angles, batch, kv_cache)
        else:
            for index in range(self.config.num_layers):
                x = self._layer(x, angles, batch, kv_cache, index, probe)
        if not every_token:
            x = x[batch.query_starts[1:] - 1, :]  # the last token of each chunk
        x = ops.rms_norm(x, self.final_norm, self.config.norm_eps)
        probe("final_norm", x)
        logits = ops.to_numpy(ops.linear(x, self.head))
        probe("logits", logits)
        return logits

    def _layer(
        self, x: Array, angles: tuple[Array, Array], batch: Batch, kv_cache: KVCache, index: int, probe: Probe
    ) -> Array:
        """One layer: [T, D] -> [T, D]. A backend may bring them all, to the bit, in one compiled piece (`ops.fuse`)."""
        layer, eps, name = self.layers[index], self.config.norm_eps, f"layers.{index}"
        normed = self.ops.rms_norm(x, layer.attention_norm, eps)
        probe(f"{name}.attention_norm", normed)
        x = x + self._attention(normed, angles, batch, kv_cache, index, probe)
        normed = self.ops.rms_norm(x, layer.mlp_norm, eps)
        probe(f"{name}.mlp_norm", normed)
        x = x + self._mlp(normed, index, probe)
        probe(name, x)
        return x

    def _attention(
        self, x: Array, angles: tuple[Array, Array], batch: Batch, kv_cache: KVCache, index: int, probe: Probe
    ) -> Array:
        """What each token gathers from those before it: [T, D] -> [T, D]. Writes the step's keys and values."""
        ops, layer, name = self.ops, self.layers[index], f"layers.{index}.attention"
        T, K = batch.num_tokens, self.config.head_dim
        q = ops.linear(x, layer.q.weight, layer.q.bias).reshape(T, -1, K)
        k = ops.linear(x, layer.k.weight, layer.k.bias).reshape(T, -1, K)
        v = ops.linear(x, layer.v.weight, layer.v.bias).reshape(T, -1, K)
        q, k = ops.rotate(q, *angles), ops.rotate(k, *angles)
        probe(f"{name}.q", q)
        probe(f"{name}.k", k)
        probe(f"{name}.v", v)
        ops.write_kv(k, v, kv_cache.keys, kv_cache.values, index, batch.slots)
        gathered = ops.attention(
            q, kv_cache.keys, kv_cache.values, index, batch.positions, batch.query_starts, batch.block_tables
        )
        probe(f"{name}.gathered", gathered)
        output = ops.linear(gathered.reshape(T, -1), layer.output.weight, layer.output.bias)
        probe(f"{name}.output", output)
        return output

    def _mlp(self, x: Array, index: int, probe: Probe) -> Array:
        """The gated feed-forward layer, down(silu(gate(x)) * up(x)): [T, D] -> [T, D]."""
        ops, layer, name = self.ops, self.layers[index], f"layers.{index}.mlp"
        gate = ops.linear(x, layer.gate.weight, layer.gate.bias)
        up = ops.linear(x, layer.up.weight, layer.up.bias)
        gated = ops.swiglu(gate, up)
        probe(f"{name}.gated", gated)
        output = ops.linear(gated, layer.down.weight, layer.down.bias)
        probe(f"{name}.output", output)
        return output

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the embedding, unless it is also the head."""
        linears = [linear for layer in self.layers for linear in vars(layer).values() if isinstance(linear, Linear)]
        vectors = [self.final_norm] + [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        vectors += [linear.bias for linear in linears if linear.bias is not None]
        matrices = [self.head] + [linear.weight for linear in linears]
        return sum(vector.nbytes for vector in vectors) + sum(map(self.ops.num_bytes, matrices))

    def __repr__(self):
        c = self.config
        return (
            f"Transformer({c.architecture}, {c.num_layers} layers, hidden {c.hidden_size}, {c.num_heads} query heads "
            f"on {c.num_kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}, {self.ops.__name__})"
        )
