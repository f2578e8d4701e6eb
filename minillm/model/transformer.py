"""The forward pass: token ids in, scores for the next token out. Start reading here.

A Llama-style transformer is an embedding, a stack of layers, and a head. Every layer adds two things to the vector of
each token: what attention gathers from the tokens before it, and what a gated feed-forward layer computes from the
token itself. Prefill and decode are this same pass, over many tokens of a sequence or over one.

**Which code runs.** Embedding, last norm and head always run here. The layers run here, one by one, if a debugger is
attached, a probe is set, or the model was created with `LLM(fused=False)`. Otherwise the default backend runs all
layers as one compiled call (`ops/jit/layers.py`), if it has one for this model; it has none for GPT-2 and mixtures of
experts. The call is faster. It makes the same calls to the same kernels, and so computes the same bits. A `print` or
`breakpoint()` that you add to a layer here then does nothing: start the program under a debugger, or set `fused=False`.

The numbers are computed by `ops`, a backend (see `minillm/ops/__init__.py`); this file only composes its operations.
The weights that a layer holds are listed in `weights.py`. Models differ from Llama in a few named places, as branches
of the smaller steps; skip those branches on a first reading. `docs/models.md` lists the differences of each model.

Shapes, here and everywhere: `T` tokens in the step, `S` sequences, `V` vocabulary, `D` hidden size, `F` feed-forward
size, `H` query heads, `G` key/value heads, `K` head_dim, `R` rotated components of a head (usually all `K`), `M` length
of the longest sequence, `E` experts. In a KV cache, `N` blocks of `B` positions, and `L` layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.debugger import debugger_attached
from minillm.model.kv_cache import CacheShape, KVCache
from minillm.model.mixture import mixture
from minillm.model.probe import Probe, no_probe, with_copies
from minillm.model.rope import rope_frequencies
from minillm.model.weights import MLP, Linear, MixtureOfExperts, Norm, WeightLoader, part_bytes, parts_per_token

Array = Any  # an array of the backend's library
# Cosines and sines, [T, R/2] each, by window. Layers whose window has its own theta find it here; all others use None.
Angles = dict[int | None, tuple[Array, Array]]


class Transformer:
    """A model's weights and the pass through them.

    Parameters
    ----------
    config : ModelConfig
    load : callable
        Returns the tensor of a name in `config.tensor_shapes()`, a float32 array or a QuantizedMatrix. It is called for
        one name after another, so that a checkpoint need never be in memory twice.
    ops : module
        The backend that computes: one of `minillm.ops`.
    fused : bool
        Whether the backend may run all layers as one compiled call. The bits are the same either way.
    """

    def __init__(self, config: ModelConfig, load: Callable[[str], Any], ops: ModuleType, *, fused: bool = True):
        self.config = config
        self.ops = ops
        self.xp = ops.array_library()
        self.cache_shape = CacheShape.from_config(config)
        self._make_frequencies()
        weights = WeightLoader(config, load, ops)
        self.embedding = weights.matrix("embedding")
        self.position_embedding = weights.matrix("positions") if config.learned_positions else None
        self.layers = weights.layers()
        self.fused_layers = ops.fuse(self.layers, config) if fused else None
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
            Holds the keys and values of all earlier positions. Those of this step are written to it.
        every_token : bool
            Score the next token after each token (T rows), instead of only after each chunk's last (S rows).
        probe : callable
            Is called with each intermediate result, as `probe("layers.3.attention.q", array)`. `minillm.model.probe`
            lists all names.

        Returns
        -------
        logits, float32 [S, V] or [T, V]

        Raises
        ------
        ValueError
            A token id is not in the vocabulary; a position is beyond the learned ones; the cache was
            made for a different model; or the batch has the wrong number of block tables.
        """
        self._check(batch, kv_cache)
        probe = probe if probe is no_probe else with_copies(probe, self.ops.to_numpy)
        batch = batch.moved(self.ops.as_indices)  # to the backend: once per step, not once per layer
        x = self._embed(batch)  # [T, D]
        probe("embedding", x)
        x = self._layers(x, batch, kv_cache, probe)  # [T, D]
        if not every_token:
            x = self.xp.take(x, self.xp.asarray(batch.last_tokens), axis=0)  # [S, D]
        x = self._norm(x, self.final_norm)
        probe("final_norm", x)
        logits = self._logits(x)
        probe("logits", logits)
        return logits

    def _layers(self, x: Array, batch: Batch, kv_cache: KVCache, probe: Probe) -> Array:
        """Pass through all layers: [T, D] -> [T, D]."""
        angles = self._angles(batch)
        if self.fused_layers and probe is no_probe and not debugger_attached():
            return self.fused_layers(x, angles, batch, kv_cache)
        for index in range(self.config.num_layers):
            x = self._layer(x, angles, batch, kv_cache, index, probe)
        return x

    def _layer(self, x: Array, angles: Angles, batch: Batch, kv_cache: KVCache, index: int, probe: Probe) -> Array:
        """Pass through one layer: [T, D] -> [T, D]. Llama has neither of the two `post` norms."""
        layer, name = self.layers[index], f"layers.{index}"
        normed = self._norm(x, layer.attention_norm)
        probe(f"{name}.attention_norm", normed)
        attended = self._attention(normed, angles, batch, kv_cache, index, probe)
        x = x + self._norm(attended, layer.post_attention_norm)
        normed = self._norm(x, layer.mlp_norm)
        probe(f"{name}.mlp_norm", normed)
        output = self._feed_forward(normed, layer.mlp, f"{name}.mlp", probe)
        x = x + self._norm(output, layer.post_mlp_norm)
        probe(name, x)
        return x

    def _attention(self, x: Array, angles: Angles, batch: Batch, kv_cache: KVCache, index: int, probe: Probe) -> Array:
        """Gather from each token's earlier tokens, or the last `window` of them: [T, D] -> [T, D].

        The step's keys and values are first written to the cache, so that its tokens can read each other.
        `ops.attention` leaves out later tokens and those behind the window.
        """
        ops, config, layer, name = self.ops, self.config, self.layers[index], f"layers.{index}.attention"
        window = config.window(index)
        q = self._rotate(self._heads(x, layer.q, layer.q_norm), angles, window)  # [T, H, K]
        k = self._rotate(self._heads(x, layer.k, layer.k_norm), angles, window)  # [T, G, K]
        v = self._heads(x, layer.v)  # [T, G, K]
        probe(f"{name}.q", q)
        probe(f"{name}.k", k)
        probe(f"{name}.v", v)
        # The layer's KV-cache group (layers that share block tables), and its index within a block of that group.
        group, layer_in_block = kv_cache.layer_places[index].tolist()
        ops.write_kv(k, v, kv_cache.keys, kv_cache.values, layer_in_block, batch.slots[group])
        queries = batch.positions, batch.query_starts, batch.block_tables[group]
        scoring = {"scale": config.attention_scale, "window": window, "soft_cap": config.attention_soft_cap}
        if probe is not no_probe:  # `ops.attention` keeps neither scores nor weights
            scores = ops.attention_scores(q, kv_cache.keys, layer_in_block, *queries, **scoring)  # [T, H, M]
            probe(f"{name}.scores", scores)
            probe(f"{name}.weights", ops.softmax(scores))
        gathered = ops.attention(q, kv_cache.keys, kv_cache.values, layer_in_block, *queries, **scoring)  # [T, H, K]
        probe(f"{name}.gathered", gathered)
        output = ops.linear(self.xp.reshape(gathered, (batch.num_tokens, -1)), layer.output.weight, layer.output.bias)
        probe(f"{name}.output", output)
        return output

    def _heads(self, x: Array, projection: Linear, norm: Norm | None = None) -> Array:
        """Project to heads: [T, D] -> [T, heads, K]. Qwen 3 and Gemma 3 also normalize every query and key head."""
        K, reshape = self.config.head_dim, self.xp.reshape
        heads = self.ops.linear(x, projection.weight, projection.bias)
        if norm is not None:
            heads = self._norm(reshape(heads, (-1, K)), norm)
        return reshape(heads, (x.shape[0], -1, K))

    def _mlp(self, x: Array, mlp: MLP, name: str, probe: Probe) -> Array:
        """Apply the feed-forward layer, down(silu(gate(x)) * up(x)): [T, D] -> [T, D]."""
        up = self.ops.linear(x, mlp.up.weight, mlp.up.bias)  # [T, F]
        gated = self._activation(x, mlp, up)  # [T, F]
        probe(f"{name}.gated", gated)
        output = self.ops.linear(gated, mlp.down.weight, mlp.down.bias)
        probe(f"{name}.output", output)
        return output

    # --- the smaller steps: one line each for Llama, with branches for other models ---------------------------

    def _embed(self, batch: Batch) -> Array:
        """Look up the tokens' embeddings: [T] -> [T, D]. Gemma scales them; GPT-2 adds one per position."""
        x = self.ops.embed(batch.token_ids, self.embedding)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            x = x + self.ops.embed(batch.positions, self.position_embedding)
        return x

    def _norm(self, x: Array, norm: Norm | None) -> Array:
        """Normalize every row of [T, D]: RMS norm, or layer norm in GPT-2. Without a norm, return `x` itself."""
        if norm is None:
            return x
        if norm.bias is None:
            return self.ops.rms_norm(x, norm.weight, self.config.norm_eps)
        return self.ops.layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)

    def _angles(self, batch: Batch) -> Angles:
        """Compute the cosines and sines for rotating the step's queries and keys."""
        angles: Angles = {None: self.ops.rotary_angles(batch.positions, self.frequencies, self.attention_factor)}
        if self.window_frequencies is not None:
            own = self.ops.rotary_angles(batch.positions, self.window_frequencies, 1.0)
            angles[self.config.sliding_window] = own
        return angles

    def _rotate(self, heads: Array, angles: Angles, window: int | None) -> Array:
        """Rotate queries or keys by their positions. GPT-2 has learned position embeddings instead."""
        if self.config.learned_positions:
            return heads
        return self.ops.rotate(heads, *angles.get(window, angles[None]))

    def _activation(self, x: Array, mlp: MLP, up: Array) -> Array:
        """Compute silu(gate(x)) * up(x). Gemma uses gelu instead of silu; GPT-2 has no gate, only gelu(up(x))."""
        if mlp.gate is None:
            return self.ops.gelu(up)
        gate = self.ops.linear(x, mlp.gate.weight, mlp.gate.bias)
        return self.ops.swiglu(gate, up) if self.config.activation == "silu" else self.ops.geglu(gate, up)

    def _feed_forward(self, x: Array, mlp: MLP | MixtureOfExperts, name: str, probe: Probe) -> Array:
        """Apply the layer's MLP or, in Mixtral and Qwen 3 MoE, a few of its experts: [T, D] -> [T, D]."""
        if isinstance(mlp, MLP):
            return self._mlp(x, mlp, name, probe)
        scores = self.ops.linear(x, mlp.router.weight)  # [T, E]
        chosen, weights = self.ops.route(scores, self.config.experts_per_token, self.config.normalize_experts)
        probe(f"{name}.chosen", chosen)

        def run_expert(expert: int, rows: Array) -> Array:
            return self._mlp(rows, mlp.experts[expert], f"{name}.experts.{expert}", probe)

        return mixture(x, chosen, weights, run_expert, self.xp)

    def _logits(self, x: Array) -> np.ndarray:
        """Score every token of the vocabulary: [S, D] -> [S, V], as a NumPy array. Gemma 2 caps the scores."""
        logits = self.ops.linear(x, self.head)
        if self.config.logit_soft_cap:
            logits = self.ops.apply_soft_cap(logits, self.config.logit_soft_cap)
        return self.ops.to_numpy(logits)

    # --- creation, checks and facts ---------------------------------------------------------------------------

    def _make_frequencies(self) -> None:
        """Prepare the rotary frequencies. In Gemma 3, layers with a window have their own theta."""
        config = self.config
        rotary_dim, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
        self.frequencies = self.ops.as_vector(rope_frequencies(rotary_dim, config.rope_theta, scaling))
        # YaRN and LongRoPE multiply queries and keys by this factor; it is applied to the cosines and sines.
        self.attention_factor = scaling.attention_factor if scaling else 1.0
        self.window_frequencies = None
        if config.window_rope_theta and config.sliding_window:
            self.window_frequencies = self.ops.as_vector(rope_frequencies(rotary_dim, config.window_rope_theta))

    def _check(self, batch: Batch, kv_cache: KVCache) -> None:
        """Raise ValueError if the batch or the cache does not fit the model."""
        config = self.config
        if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < config.vocab_size:
            raise ValueError(f"{batch} has a token id outside 0 to {config.vocab_size - 1}")
        if config.learned_positions and batch.positions.max() >= config.context_length:
            raise ValueError(f"{batch} goes beyond the {config.context_length} positions that the model has learned")
        if kv_cache.shape != self.cache_shape:
            raise ValueError(f"{kv_cache!r} was made for a different model, not for {self!r}")
        if len(batch.slots) != kv_cache.num_groups:
            raise ValueError(
                f"{batch} has block tables for {len(batch.slots)} KV-cache groups, but the cache has "
                f"{kv_cache.num_groups}: create the batch with num_groups=kv_cache.num_groups"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the embedding, unless it is also the head."""
        parts = [part for layer in self.layers for part in parts_per_token(layer, self.config.experts_per_token)]
        return self.ops.num_bytes(self.head) + sum(part_bytes(part, self.ops) for part in [self.final_norm, *parts])

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Transformer({c.architecture}, {c.num_layers} layers, hidden {c.hidden_size}, {c.num_heads} query heads "
            f"on {c.num_kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}, {self.ops.__name__})"
        )
