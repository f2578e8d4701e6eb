"""ModelConfig: what a model is, in numbers. Read from `config.json` or from GGUF metadata."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched so that a model reaches past the context it was trained on.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` divides only
    the slow ones, whose wavelength exceeds what `original_context_length` positions cover, and blends in
    between (Llama 3.1, Meta 2024). `yarn` does so with other bounds, and raises the scores' spread by `attention_factor`
    (Peng et al. 2023, arXiv:2309.00071). `per_frequency` divides frequency i by `factors[i]`, which is how files
    store what was found by search (LongRoPE, Ding et al. 2024, arXiv:2402.13753), and GGUF files also llama3.

    There is no `dynamic`: that scaling sets in where a text outgrows the model's context, which no text here does.
    """

    kind: str  # "linear", "llama3", "yarn" or "per_frequency"
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as is the one below
    high_freq_factor: float = 4.0
    original_context_length: int = 8192  # llama3 and yarn
    factors: tuple[float, ...] = ()  # per_frequency only: one for each pair, fastest frequency first
    beta_fast: float = 32.0  # yarn only: pairs that turn more often over the original context are left alone,
    beta_slow: float = 1.0  # and those that turn less often are slowed by the full factor
    whole_pairs: bool = True  # yarn only: the bounds between them are rounded outwards to whole pairs
    attention_factor: float = 1.0  # what turned queries and keys are multiplied by, each


@dataclass(frozen=True)
class ModelConfig:
    """What a model is: the numbers that fix its shapes, and in what it differs from Llama, the plainest of them.

    Letters are those used in every docstring of the project.
    """

    architecture: str  # "llama", "gemma3", ...: what a checkpoint calls it; nothing is computed from it
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F; of a mixture, that of one expert
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, key/value heads; each serves H / G query heads
    head_dim: int  # K, need not be D / H
    context_length: int  # positions the model was made for
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # biases on q, k and v
    output_bias: bool = False  # a bias on the attention output
    mlp_bias: bool = False  # biases on gate, up and down
    tie_embeddings: bool = False  # the output head is the embedding matrix

    # In what models differ. The defaults are Llama's; docs/models.md has who has what.
    norm: str = "rms"  # or "layer", which also takes off the mean and adds a bias
    qk_norm: bool = False  # every query and key head passes a norm before it is turned
    post_norms: bool = False  # what attention and MLP give passes a norm before it is added
    activation: str = "silu"  # or "gelu": the curve in the MLP
    gated: bool = True  # the MLP has a gate beside its way up; without one, the curve is gelu
    embedding_scale: float = 1.0  # what embeddings are multiplied by
    query_scale: float | None = None  # what scores are multiplied by; None for 1 / sqrt(K)
    attention_soft_cap: float | None = None  # scores are squeezed between this and its negative
    logit_soft_cap: float | None = None  # and so are the logits
    learned_positions: bool = False  # a vector for each position is added to the embedding; nothing is turned
    rotary_dim: int | None = None  # R, how many of a head's numbers are turned; None for all
    sliding_window: int | None = None  # how many positions a query of a layer with a window sees, the last its own
    window_layers: tuple[int, ...] = ()  # which layers have that window
    window_rope_theta: float | None = None  # their theta, unscaled; None where they turn as all others do
    num_experts: int = 0  # E: MLPs of a layer from which each token takes a few; 0 where there is one MLP for all
    experts_per_token: int = 0
    normalize_experts: bool = True  # the weights of a token's experts are made to sum to one

    def window(self, layer: int) -> int | None:
        """How many positions a query of a layer sees, the last its own; None for all before it."""
        return self.sliding_window if layer in self.window_layers else None

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers whose keys and values share blocks of the KV cache, group by group.

        Layers of a group see equally far, so that whether a query still reaches a block is the same in all of them.
        Blocks have room for equally many layers in all groups, and where that leaves places empty, memory is lost: so
        many, then, that there are few places in all. Those of layers that see everything are held longest, and count
        eight times; a group counts as a place more, for somebody must keep its table.
        """
        windows = [self.window(layer) for layer in range(self.num_layers)]
        kinds = [[layer for layer, own in enumerate(windows) if own == window] for window in dict.fromkeys(windows)]

        def cost(size: int) -> int:
            weights = (8 if self.window(kind[0]) is None else 1 for kind in kinds)
            return sum(weight * (size + 1) * -(-len(kind) // size) for weight, kind in zip(weights, kinds, strict=True))

        size = min(range(1, self.num_layers + 1), key=cost)
        return tuple(tuple(kind[start : start + size]) for kind in kinds for start in range(0, len(kind), size))

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """How many positions a query sees in the layers of each of `layer_groups`, its own the last; None for all."""
        return tuple(self.window(group[0]) for group in self.layer_groups)

    def __repr__(self):
        """What is not as in Llama's defaults: a line that a debugger can show."""
        told = (f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default)
        return f"ModelConfig({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor a checkpoint of this model must hold (matrices: outputs first)."""
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
