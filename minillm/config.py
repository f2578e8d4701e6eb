"""ModelConfig: what a model is, in numbers. Read from `config.json` or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched so that a model reaches past the context it was trained on.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` divides only
    the slow ones, whose wavelength exceeds what `original_context_length` positions cover, and blends in
    between (Llama 3.1, Meta 2024). `yarn` does so with other bounds, and raises the scores' spread by `magnitude`
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
    magnitude: float = 1.0  # what turned queries and keys are multiplied by, each


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a model's shapes. Letters are those used in every docstring of the project."""

    architecture: str  # "llama"
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor a checkpoint of this model must hold (matrices: outputs first)."""
        D, F, V = self.hidden_size, self.intermediate_size, self.vocab_size
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = {
            "attention.q": ((query, D), self.attention_bias),
            "attention.k": ((key_value, D), self.attention_bias),
            "attention.v": ((key_value, D), self.attention_bias),
            "attention.output": ((D, query), self.output_bias),
            "mlp.gate": ((F, D), self.mlp_bias),
            "mlp.up": ((F, D), self.mlp_bias),
            "mlp.down": ((D, F), self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, D)}
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            shapes[f"{layer}.attention_norm.weight"] = (D,)
            shapes[f"{layer}.mlp_norm.weight"] = (D,)
            for name, (shape, has_bias) in projections.items():
                shapes[f"{layer}.{name}.weight"] = shape
                if has_bias:
                    shapes[f"{layer}.{name}.bias"] = shape[:1]
        shapes["final_norm.weight"] = (D,)
        if not self.tie_embeddings:
            shapes["head.weight"] = (V, D)
        return shapes
