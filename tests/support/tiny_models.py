"""A config and random weights for a tiny model of each architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from minillm.model.batch import Chunk
from minillm.model.config import ModelConfig, RopeScaling

TINY = {
    "vocab_size": 70,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "context_length": 64,
}
GEMMA = {"post_norms": True, "activation": "gelu", "embedding_scale": math.sqrt(24), "attention_scale": 0.3}
WINDOW = {"sliding_window": 5, "window_layers": (0,)}
EXPERTS = {"num_experts": 5, "experts_per_token": 2}
YARN = RopeScaling("yarn", 4.0, original_context_length=16, attention_factor=1.2)
PER_PAIR = RopeScaling("per_frequency", 1.0, factors=(1.0, 2.5), attention_factor=1.1)
SPECIAL_FIELDS = {
    "llama": {"rope_scaling": YARN},
    "mistral": WINDOW,
    "qwen2": {"attention_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True},
    "gemma2": GEMMA | WINDOW | {"attention_soft_cap": 2.0, "logit_soft_cap": 5.0},
    "gemma3": GEMMA | WINDOW | {"qk_norm": True, "window_rope_theta": 100.0, "tie_embeddings": True},
    "phi3": {"rotary_dim": 4, "rope_scaling": PER_PAIR},
    "gpt2": {
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "learned_positions": True,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "num_kv_heads": 4,
        "tie_embeddings": True,
    },
    "qwen3_moe": EXPERTS | {"qk_norm": True, "normalize_experts": False},
    "mixtral": EXPERTS | WINDOW,
}
CONFIGS = {name: ModelConfig(architecture=name, **(TINY | fields)) for name, fields in SPECIAL_FIELDS.items()}


def in_groups(chunks: Sequence[Chunk], num_groups: int) -> list[Chunk]:
    """Return chunks with one block table per KV-cache group, derived from the single table of each chunk."""
    return [
        Chunk(
            chunk.token_ids,
            chunk.start,
            [[num_groups * block + group for block in chunk.block_tables[0]] for group in range(num_groups)],
        )
        for chunk in chunks
    ]


def random_weights(config: ModelConfig, seed: int = 0) -> Callable[[str], np.ndarray]:
    """Return a function from the name of a tensor to random weights, as `Transformer` requires."""
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[-1]) if len(shape) > 1 else 5)
        for name, shape in config.tensor_shapes().items()
    }
    return lambda name: 1 + weights[name] if name.endswith("norm.weight") else weights[name]
