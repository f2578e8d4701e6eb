"""The forward pass: token ids in, scores for the next token out. Start reading here.

A Llama-style transformer is an embedding, a stack of layers, and a head. Every layer adds two things to the running
vector of each token: what attention gathers from the tokens before it, and what a gated feed-forward layer makes
of the token itself. Prefill and decode are this same pass, over many tokens of a sequence or over one.

Other models differ from Llama in a few named places, each a line or two here and a field in `ModelConfig`; a part that
a model lacks is None. On a first reading, skip them: `docs/models.md` has who differs in what. What a layer holds, `q`
and `k` and all the rest, is listed in `weights.py`.

The numbers are worked out by `ops`, a backend (see `minillm/ops/__init__.py`); this file says what is computed.

Shapes, here and everywhere: `T` tokens in the step, `S` sequences, `V` vocabulary, `D` hidden size (the numbers that
describe a token on its way), `F` feed-forward size, `H` query heads, `G` key/value heads, `K` numbers in a head.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import KVCache, layout
from minillm.model.probe import Probe, no_probe, with_copies
from minillm.model.rope import rope_frequencies
from minillm.model.weights import MLP, Layer, Loader, Norm, num_bytes

Array = Any  # an array of the backend's library
Angles = dict[int | None, tuple[Array, Array]]  # window of a layer -> cosines and sines [T, R/2]; None: all others


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
        self.kv_layout = layout(config)
        rotary_dim = config.rotary_dim or config.head_dim
        self.frequencies = ops.as_vector(rope_frequencies(rotary_dim, config.rope_theta, config.rope_scaling))
        self.attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        self.window_frequencies = self.frequencies
        if config.window_rope_theta and config.sliding_window:
            self.window_frequencies = ops.as_vector(rope_frequencies(rotary_dim, config.window_rope_theta))
        weights = Loader(config, load, ops)
        self.embedding = weights.matrix("embedding")
        self.positions = weights.matrix("positions") if config.learned_positions else None
        self.layers = weights.layers()
        self.fused_layers = ops.fuse(self.layers, config)
        self.final_norm = weights.norm("final_norm")
        self.head = self.embedding if config.tie_embeddings else weights.matrix("head")

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
            Is shown each intermediate as `probe("layers.3.attention.q", array)`, and changes none: `minillm.model.probe` has
            all names.

        Returns
        -------
        logits, float32 [S, V] or [T, V]

        Raises
        ------
        ValueError
            A token id is not in the vocabulary, or a position not among those that the model has learned; or the cache
            is another model's, or the batch has tables of other groups of layers.
        """
        if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.config.vocab_size:
            raise ValueError(f"{batch} holds a token id outside 0 to {self.config.vocab_size - 1}")
        ops, config, xp = self.ops, self.config, self.xp
        if config.learned_positions and batch.positions.max() >= config.context_length:
            raise ValueError(f"{batch} goes beyond the {config.context_length} positions that the model has learned")
        if kv_cache.layout != self.kv_layout:
            raise ValueError(f"{kv_cache!r} was made for another model than {self!r}")
        if len(batch.slots) != kv_cache.num_groups:
            raise ValueError(
                f"{batch} has block tables of {len(batch.slots)} groups of layers, but the cache has "
                f"{kv_cache.num_groups}: make it with num_groups=kv_cache.num_groups"
            )
        if probe is not no_probe:
            probe = with_copies(probe, ops.to_numpy)
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
            logits = ops.apply_soft_cap(logits, config.logit_soft_cap)
        logits = ops.to_numpy(logits)
        probe("logits", logits)
        return logits

    def _angles(self, batch: Batch) -> Angles:
        """How far the step's queries and keys are turned; layers with a window may turn at a pace of their own."""
        angles = {None: self.ops.rotary_angles(batch.positions, self.frequencies, self.attention_factor)}
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
        group, place = kv_cache.places[index].tolist()
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
        ops.write_kv(k, v, kv_cache.keys, kv_cache.values, place, batch.slots[group])
        where = place, batch.positions, batch.query_starts, batch.block_tables[group]
        how = config.query_scale, window, config.attention_soft_cap
        if probe is not no_probe:  # `attention` keeps neither
            scores = ops.attention_scores(q, kv_cache.keys, *where, *how)
            probe(f"{name}.scores", scores)
            probe(f"{name}.weights", ops.softmax(scores))
        gathered = ops.attention(q, kv_cache.keys, kv_cache.values, *where, *how)
        probe(f"{name}.gathered", gathered)
        output = ops.linear(reshape(gathered, (T, -1)), layer.output.weight, layer.output.bias)
        probe(f"{name}.output", output)
        return output

    def _mlp(self, x: Array, weights: Layer | MLP, name: str, probe: Probe) -> Array:
        """The feed-forward layer, down(silu(gate(x)) * up(x)), or with gelu, or without a gate: [T, D] -> [T, D]."""
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
        chosen, routing_weights = self.ops.route(scores, self.config.experts_per_token, self.config.normalize_experts)
        probe(f"{name}.chosen", chosen)
        for expert in np.unique(chosen):
            tokens, _ = np.nonzero(chosen == expert)
            inputs = xp.take(x, xp.asarray(tokens), axis=0)
            given.append(self._mlp(inputs, layer.experts[expert], f"{name}.experts.{expert}", probe))
        given = xp.concat(given)  # sorted by expert, then by token: in which row is what a token's choice has given?
        rows = np.argsort(np.argsort(chosen, axis=None, stable=True)).reshape(chosen.shape)
        output = xp.zeros_like(x)
        for rank in range(chosen.shape[1]):
            output = output + routing_weights[:, rank, None] * xp.take(given, xp.asarray(rows[:, rank]), axis=0)
        return output

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the embedding, unless it is also the head."""
        parts = [part for layer in self.layers for part in layer.used_by_a_token(self.config.experts_per_token)]
        return self.ops.num_bytes(self.head) + sum(num_bytes(part, self.ops) for part in [self.final_norm, *parts])

    def __repr__(self):
        c = self.config
        return (
            f"Transformer({c.architecture}, {c.num_layers} layers, hidden {c.hidden_size}, {c.num_heads} query heads "
            f"on {c.num_kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}, {self.ops.__name__})"
        )
