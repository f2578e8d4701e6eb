"""The forward pass: token ids in, scores for the next token out. Start reading here.

A Llama-style transformer is an embedding, a stack of layers, and a head. Every layer adds two things to the running
vector of each token: what attention gathers from the tokens before it, and what a gated feed-forward layer makes
of the token itself. Prefill and decode are this same pass, over many tokens of a sequence or over one.

Other models differ from Llama in a few named places, each a line or two here and a field in `ModelConfig`; a part that
a model lacks is None. On a first reading, skip them: `docs/models.md` has who differs in what.

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
Angles = dict[int | None, tuple[Array, Array]]  # window of a layer -> cosines and sines [T, R/2]; None: all others
Probe = Callable[[str, Array], None]


def no_probe(name: str, value: Array) -> None:
    """What is shown every intermediate result when nobody wants to look."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix (outputs x inputs, in the backend's own layout), and its bias [outputs] if it has one."""

    weight: Any
    bias: Array | None


@dataclass(frozen=True)
class Norm:
    """A norm's weight [D], or [K] for one of heads; a layer norm has a bias as well."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class MLP:
    """The weights of one expert of a mixture; a layer without experts has these three itself."""

    gate: Linear | None  # D -> F
    up: Linear  # D -> F
    down: Linear  # F -> D


@dataclass(frozen=True)
class Layer:
    """One layer's weights. What Llama does not have is None in it, and in most others."""

    attention_norm: Norm
    q: Linear  # D -> H * K
    k: Linear  # D -> G * K
    v: Linear  # D -> G * K
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear  # H * K -> D
    post_attention_norm: Norm | None
    mlp_norm: Norm
    gate: Linear | None  # D -> F
    up: Linear | None  # D -> F
    down: Linear | None  # F -> D
    router: Linear | None  # D -> E, of a mixture of experts
    experts: tuple[MLP, ...]
    post_mlp_norm: Norm | None


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
        self.xp = ops.array_library()
        rotary_dim = config.rotary_dim or config.head_dim
        self.frequencies = ops.as_vector(rope_frequencies(rotary_dim, config.rope_theta, config.rope_scaling))
        self.magnitude = config.rope_scaling.magnitude if config.rope_scaling else 1.0
        self.window_frequencies = self.frequencies
        if config.window_rope_theta and config.sliding_window:
            self.window_frequencies = ops.as_vector(rope_frequencies(rotary_dim, config.window_rope_theta))
        self.embedding = ops.as_matrix(load("embedding.weight"))
        self.positions = ops.as_matrix(load("positions.weight")) if config.learned_positions else None
        self.layers = self._load_layers(load)
        self.fused_layers = ops.fuse(self.layers, config)
        self.final_norm = self._load_norm(load, "final_norm")
        self.head = self.embedding if config.tie_embeddings else ops.as_matrix(load("head.weight"))

    def _load_norm(self, load: Callable[[str], Any], name: str) -> Norm:
        bias = self.ops.as_vector(load(f"{name}.bias")) if self.config.norm == "layer" else None
        return Norm(self.ops.as_vector(load(f"{name}.weight")), bias)

    def _load_layers(self, load: Callable[[str], Any]) -> list[Layer]:
        """All layers' weights. A projection is loaded for every layer before the next, so that a backend may lay them
        end to end: those that are multiplied with the same vectors, and those of one layer after another."""
        ops, config, count = self.ops, self.config, self.config.num_layers

        def norms(name: str, there: bool = True) -> list[Norm | None]:
            return [self._load_norm(load, f"layers.{index}.{name}") if there else None for index in range(count)]

        def linears(*names: str, has_bias: bool = False) -> list[list[Linear]]:
            stems = [f"layers.{index}.{name}" for index in range(count) for name in names]
            matrices = ops.as_matrices(load(f"{stem}.weight") for stem in stems)
            biases = [ops.as_vector(load(f"{stem}.bias")) if has_bias else None for stem in stems]
            pairs = [Linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
            return [pairs[first :: len(names)] for first in range(len(names))]

        def mlps(name: str) -> dict[str, list[Any]]:
            up = ["gate", "up"] if config.gated else ["up"]
            found = linears(*(f"{name}.{part}" for part in up), has_bias=config.mlp_bias)
            (down,) = linears(f"{name}.down", has_bias=config.mlp_bias)
            return {"gate": nothing} | dict(zip(up, found, strict=True)) | {"down": down}

        nothing = [None] * count
        parts: dict[str, list[Any]] = {"attention_norm": norms("attention_norm"), "mlp_norm": norms("mlp_norm")}
        parts["q_norm"], parts["k_norm"] = (norms(f"attention.{name}_norm", config.qk_norm) for name in "qk")
        for name in ("post_attention_norm", "post_mlp_norm"):
            parts[name] = norms(name, config.post_norms)
        attention = ("attention.q", "attention.k", "attention.v")
        parts["q"], parts["k"], parts["v"] = linears(*attention, has_bias=config.attention_bias)
        (parts["output"],) = linears("attention.output", has_bias=config.output_bias)
        if config.num_experts:
            (parts["router"],) = linears("mlp.router")
            experts = [mlps(f"mlp.experts.{expert}") for expert in range(config.num_experts)]
            parts |= {"gate": nothing, "up": nothing, "down": nothing}
        else:
            parts |= mlps("mlp") | {"router": nothing}
            experts = []

        def layer(index: int) -> Layer:
            own = tuple(MLP(**{name: part[index] for name, part in expert.items()}) for expert in experts)
            return Layer(**{name: part[index] for name, part in parts.items()}, experts=own)

        return [layer(index) for index in range(count)]

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
        ops, config, xp = self.ops, self.config, self.xp
        batch = Batch(*map(ops.as_indices, vars(batch).values()))  # once a step, not once a layer
        x = ops.embed(batch.token_ids, self.embedding)  # [T, D], and so it stays through all layers
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        if config.learned_positions:
            x = x + ops.embed(batch.positions, self.positions)
        probe("embedding", x)
        angles = self._angles(batch)
        if self.fused_layers and probe is no_probe:
            x = self.fused_layers(x, angles, batch, kv_cache)
        else:
            for index in range(config.num_layers):
                x = self._layer(x, angles, batch, kv_cache, index, probe)
        if not every_token:
            x = xp.take(x, xp.asarray(batch.query_starts[1:] - 1), axis=0)  # the last token of each chunk
        x = self._norm(x, self.final_norm)
        probe("final_norm", x)
        logits = ops.linear(x, self.head)
        if config.logit_soft_cap:
            logits = ops.squeeze(logits, config.logit_soft_cap)
        logits = ops.to_numpy(logits)
        probe("logits", logits)
        return logits

    def _angles(self, batch: Batch) -> Angles:
        """How far the step's queries and keys are turned; layers with a window may turn at a pace of their own."""
        angles = {None: self.ops.rotary_angles(batch.positions, self.frequencies, self.magnitude)}
        if self.window_frequencies is not self.frequencies:
            own = self.ops.rotary_angles(batch.positions, self.window_frequencies, 1.0)
            angles[self.config.sliding_window] = own
        return angles

    def _norm(self, x: Array, norm: Norm | None) -> Array:
        """Every row of [T, D] brought to the same size; as it is, where the model has no such norm."""
        if norm is None:
            return x
        if norm.bias is None:
            return self.ops.rms_norm(x, norm.weight, self.config.norm_eps)
        return self.ops.layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)

    def _layer(self, x: Array, angles: Angles, batch: Batch, kv_cache: KVCache, index: int, probe: Probe) -> Array:
        """One layer: [T, D] -> [T, D]. A backend may bring them all, to the bit, in one compiled piece (`ops.fuse`)."""
        layer, name = self.layers[index], f"layers.{index}"
        normed = self._norm(x, layer.attention_norm)
        probe(f"{name}.attention_norm", normed)
        attended = self._attention(normed, angles, batch, kv_cache, index, probe)
        x = x + self._norm(attended, layer.post_attention_norm)
        normed = self._norm(x, layer.mlp_norm)
        probe(f"{name}.mlp_norm", normed)
        if layer.experts:
            output = self._mixture(normed, layer, f"{name}.mlp", probe)
        else:
            output = self._mlp(normed, layer, f"{name}.mlp", probe)
        x = x + self._norm(output, layer.post_mlp_norm)
        probe(name, x)
        return x

    def _attention(self, x: Array, angles: Angles, batch: Batch, kv_cache: KVCache, index: int, probe: Probe) -> Array:
        """What each token gathers from those before it: [T, D] -> [T, D]. Writes the step's keys and values."""
        ops, config, layer, name = self.ops, self.config, self.layers[index], f"layers.{index}.attention"
        T, K, window, reshape = batch.num_tokens, config.head_dim, config.window(index), self.xp.reshape
        q = reshape(ops.linear(x, layer.q.weight, layer.q.bias), (T, -1, K))
        k = reshape(ops.linear(x, layer.k.weight, layer.k.bias), (T, -1, K))
        v = reshape(ops.linear(x, layer.v.weight, layer.v.bias), (T, -1, K))
        if config.qk_norm:
            q = reshape(self._norm(reshape(q, (-1, K)), layer.q_norm), (T, -1, K))
            k = reshape(self._norm(reshape(k, (-1, K)), layer.k_norm), (T, -1, K))
        if not config.learned_positions:
            turn = angles.get(window, angles[None])
            q, k = ops.rotate(q, *turn), ops.rotate(k, *turn)
        probe(f"{name}.q", q)
        probe(f"{name}.k", k)
        probe(f"{name}.v", v)
        ops.write_kv(k, v, kv_cache.keys, kv_cache.values, index, batch.slots)
        where = kv_cache.keys, kv_cache.values, index, batch.positions, batch.query_starts, batch.block_tables
        gathered = ops.attention(q, *where, config.query_scale, window, config.attention_soft_cap)
        probe(f"{name}.gathered", gathered)
        output = ops.linear(reshape(gathered, (T, -1)), layer.output.weight, layer.output.bias)
        probe(f"{name}.output", output)
        return output

    def _mlp(self, x: Array, weights: Layer | MLP, name: str, probe: Probe) -> Array:
        """The gated feed-forward layer, down(silu(gate(x)) * up(x)): [T, D] -> [T, D]."""
        ops = self.ops
        up = ops.linear(x, weights.up.weight, weights.up.bias)
        if weights.gate:
            gate = ops.linear(x, weights.gate.weight, weights.gate.bias)
            gated = ops.swiglu(gate, up) if self.config.activation == "silu" else ops.geglu(gate, up)
        else:
            gated = ops.gelu(up)
        probe(f"{name}.gated", gated)
        output = ops.linear(gated, weights.down.weight, weights.down.bias)
        probe(f"{name}.output", output)
        return output

    def _mixture(self, x: Array, layer: Layer, name: str, probe: Probe) -> Array:
        """Each token through the few MLPs that a router picks for it: [T, D] -> [T, D] (Shazeer et al. 2017).

        A token's sum begins with its likeliest expert, whatever the others have picked.
        """
        xp, given = self.xp, []
        scores = self.ops.linear(x, layer.router.weight)
        chosen, shares = self.ops.choose(scores, self.config.experts_per_token, self.config.normalize_experts)
        probe(f"{name}.chosen", chosen)
        for expert in np.unique(chosen):
            tokens, _ = np.nonzero(chosen == expert)
            inputs = xp.take(x, xp.asarray(tokens), axis=0)
            given.append(self._mlp(inputs, layer.experts[expert], f"{name}.experts.{expert}", probe))
        given = xp.concat(given)  # sorted by expert, then by token: in which row is what a token's choice has given?
        rows = np.argsort(np.argsort(chosen, axis=None, stable=True)).reshape(chosen.shape)
        output = xp.zeros_like(x)
        for rank in range(chosen.shape[1]):
            output = output + shares[:, rank, None] * xp.take(given, xp.asarray(rows[:, rank]), axis=0)
        return output

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the embedding, unless it is also the head."""
        parts = [self.final_norm] + [part for layer in self.layers for part in vars(layer).values()]
        return self.ops.num_bytes(self.head) + sum(map(self._num_bytes, parts))

    def _num_bytes(self, part: Any) -> int:
        if part is None:
            return 0
        if isinstance(part, tuple):  # experts, of which a token takes a few
            return sum(
                self._num_bytes(each) for mlp in part[: self.config.experts_per_token] for each in vars(mlp).values()
            )
        matrix = self.ops.num_bytes(part.weight) if isinstance(part, Linear) else part.weight.nbytes
        return matrix + (0 if part.bias is None else part.bias.nbytes)

    def __repr__(self):
        c = self.config
        return (
            f"Transformer({c.architecture}, {c.num_layers} layers, hidden {c.hidden_size}, {c.num_heads} query heads "
            f"on {c.num_kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}, {self.ops.__name__})"
        )
