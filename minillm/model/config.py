"""ModelConfig: the numbers that define a model, read from `config.json` or from GGUF metadata."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled so that a model reaches beyond the context length that it was trained on.

    linear         divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595)
    llama3         divides only low frequencies, whose wavelength exceeds the original context, and blends the ones in
                   between (Llama 3.1, Meta 2024)
    yarn           does the same with different bounds, and multiplies queries and keys by `attention_factor` (Peng et
                   al. 2023, arXiv:2309.00071)
    per_frequency  divides frequency i by `factors[i]`. Files store LongRoPE's searched factors this way (Ding et al.
                   2024, arXiv:2402.13753), and GGUF files store llama3's as well.

    The `dynamic` kind is not here, because it takes effect only on texts longer than the model's context, which minillm
    rejects.
    """

    kind: str  # "linear", "llama3", "yarn" or "per_frequency"
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as is the one below
    high_freq_factor: float = 4.0
    original_context_length: int = 8192  # llama3 and yarn
    factors: tuple[float, ...] = ()  # per_frequency only: one per pair, highest frequency first
    beta_fast: float = 32.0  # yarn only: pairs that turn more often than this over the original context are kept,
    beta_slow: float = 1.0  # pairs that turn less often than this are divided by the full factor
    whole_pairs: bool = True  # yarn only: the bounds between the two are rounded outwards to whole pairs
    attention_factor: float = 1.0  # rotated queries and keys are each multiplied by this


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a model: its shapes, and its differences from Llama, the plainest architecture.

    The capital letters are the ones that every docstring of the project uses.
    """

    architecture: str  # the name in the checkpoint, such as "llama" or "gemma3"; nothing depends on it
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F; in a mixture of experts, the size of one expert
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, key/value heads; each serves H / G query heads
    head_dim: int  # K; not always D / H
    context_length: int  # maximum positions of the model
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # biases on q, k and v
    output_bias: bool = False  # a bias on the attention output
    mlp_bias: bool = False  # biases on gate, up and down
    tie_embeddings: bool = False  # the output head is the embedding matrix

    # Where models differ. The defaults are Llama's; docs/models.md lists the differences of each model.
    norm: str = "rms"  # or "layer", which also subtracts the mean and adds a bias
    qk_norm: bool = False  # every query and key head is normalized before it is rotated
    post_norms: bool = False  # the outputs of attention and MLP are normalized before they are added
    activation: str = "silu"  # or "gelu": the nonlinearity of the MLP
    gated: bool = True  # the MLP has a gate; without one, its activation is gelu
    embedding_scale: float = 1.0  # embeddings are multiplied by this
    attention_scale: float | None = None  # attention scores are multiplied by this; None for 1 / sqrt(K)
    attention_soft_cap: float | None = None  # attention scores are soft-capped to this magnitude
    logit_soft_cap: float | None = None  # logits are soft-capped to this magnitude
    learned_positions: bool = False  # a vector per position is added to the embedding, and nothing is rotated
    rotary_dim: int | None = None  # R, the part of a head that is rotated; None for all of it
    sliding_window: int | None = None  # positions that a query reads in layers with a window, counting its own
    window_layers: tuple[int, ...] = ()  # indices of the layers with that window
    window_rope_theta: float | None = None  # their theta, unscaled; None if all layers have the same
    num_experts: int = 0  # E, MLPs per layer of which each token uses a few; 0 for a single MLP
    experts_per_token: int = 0
    normalize_experts: bool = True  # the routing weights of a token's experts are scaled to sum to one

    def window(self, layer: int) -> int | None:
        """Return how many positions a query of this layer reads, counting its own; None for all earlier ones."""
        return self.sliding_window if layer in self.window_layers else None

    def __repr__(self) -> str:
        """Show only the fields that differ from their defaults."""
        shown = (f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default)
        return f"ModelConfig({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor in a checkpoint of this model (matrices: outputs first)."""
        D, V, K = self.hidden_size, self.vocab_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}

        def norm(name: str, size: int = D) -> None:
            shapes[f"{name}.weight"] = (size,)
            if self.norm == "layer":
                shapes[f"{name}.bias"] = (size,)

        def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> None:
            shapes[f"{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{name}.bias"] = (outputs,)

        def mlp(name: str) -> None:
            if self.gated:
                linear(f"{name}.gate", self.intermediate_size, D, self.mlp_bias)
            linear(f"{name}.up", self.intermediate_size, D, self.mlp_bias)
            linear(f"{name}.down", D, self.intermediate_size, self.mlp_bias)

        linear("embedding", V, D, False)
        if self.learned_positions:
            linear("positions", self.context_length, D, False)
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            norm(f"{layer}.attention_norm")
            linear(f"{layer}.attention.q", self.num_heads * K, D, self.attention_bias)
            linear(f"{layer}.attention.k", self.num_kv_heads * K, D, self.attention_bias)
            linear(f"{layer}.attention.v", self.num_kv_heads * K, D, self.attention_bias)
            if self.qk_norm:
                norm(f"{layer}.attention.q_norm", K)
                norm(f"{layer}.attention.k_norm", K)
            linear(f"{layer}.attention.output", D, self.num_heads * K, self.output_bias)
            norm(f"{layer}.mlp_norm")
            if self.num_experts:
                linear(f"{layer}.mlp.router", self.num_experts, D, False)
            for expert in range(self.num_experts):
                mlp(f"{layer}.mlp.experts.{expert}")
            if not self.num_experts:
                mlp(f"{layer}.mlp")
            if self.post_norms:
                norm(f"{layer}.post_attention_norm")
                norm(f"{layer}.post_mlp_norm")
        norm("final_norm")
        if not self.tie_embeddings:
            linear("head", V, D, False)
        return shapes
