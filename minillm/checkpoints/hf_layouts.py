"""What each architecture's config.json and tensors are like: a table, an entry an architecture.

`defaults` are transformers' own, of each configuration class: what a config.json means that lacks the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.checkpoints.checkpoint import name_in_file
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_rope import read_partial_rope, read_rope, read_two_ropes
from minillm.errors import CheckpointError

NAMES = {  # this project's name of a module -> transformers' of most models
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
OLD_BUFFERS = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")


@dataclass(frozen=True)
class Layout:
    """How folders hold one architecture.

    Attributes
    ----------
    differences : what it sets in ModelConfig beyond what all set, from the fields
    defaults : values of fields that config.json may lack; of others, a field is required or None
    only : fields that must have this value, or be absent, for what is computed here to be the model
    names : this project's name of a module -> the folder's. Several may have one: they lie there end to end
    layers : what names of a layer's tensors begin with
    unused : tensors that may be left over, for they follow from the config
    aliases : what config.json calls fields that others name alike
    transposed : modules whose matrices the folder has inputs first
    norms_lack : what the norms' weights must have added
    """

    differences: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    layers: str = "model.layers."
    unused: tuple[str, ...] = OLD_BUFFERS
    aliases: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    norms_lack: float = 0.0

    def file_name(self, name: str) -> str:
        """`layers.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
        return name_in_file(name, self.names, self.layers)

    def is_transposed(self, file_name: str) -> bool:
        """Whether the folder has this tensor inputs first."""
        module, _, kind = file_name.rpartition(".")
        return kind == "weight" and ".".join(module.split(".")[-2:]) in self.transposed


NORMS_OF_HEADS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def _llama(fields: Fields) -> dict[str, Any]:
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    return read_rope(fields) | {"attention_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}


def _mistral(fields: Fields) -> dict[str, Any]:
    return read_rope(fields) | _window_everywhere(fields)


def _qwen2(fields: Fields) -> dict[str, Any]:
    return read_rope(fields) | _window_if_used(fields) | {"attention_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return read_rope(fields) | _window_if_used(fields) | {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _gemma2(fields: Fields) -> dict[str, Any]:
    return (
        read_rope(fields) | _gemma(fields, pattern=2) | {"attention_soft_cap": _cap(fields, "attn_logit_softcapping")}
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    pattern = fields.integer("sliding_window_pattern")
    return read_two_ropes(fields) | _gemma(fields, pattern) | {"qk_norm": True}


def _gemma(fields: Fields, pattern: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; every `pattern`-th layer sees everything, those between have a window."""
    bias, layers = fields.flag("attention_bias"), fields.integer("num_hidden_layers")
    with_window = [index for index in range(layers) if (index + 1) % pattern]
    return {
        "post_norms": True,
        "activation": "gelu",
        "embedding_scale": math.sqrt(fields.integer("hidden_size")),
        "query_scale": 1 / math.sqrt(fields.number("query_pre_attn_scalar")),
        "logit_soft_cap": _cap(fields, "final_logit_softcapping"),
        "attention_bias": bias,
        "output_bias": bias,
        **_window_of_layers(fields, with_window),
    }


def _cap(fields: Fields, name: str) -> float | None:
    return fields.number(name, None)


def _phi3(fields: Fields) -> dict[str, Any]:
    return read_partial_rope(fields) | _window_everywhere(fields)


def _gpt2(fields: Fields) -> dict[str, Any]:
    return {
        "intermediate_size": fields.integer("intermediate_size", 4 * fields.integer("hidden_size")),
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "learned_positions": True,
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {
        **read_rope(fields),
        **(_window_everywhere(fields) if fields.flag("use_sliding_window") else {}),
        "attention_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "intermediate_size": fields.integer("moe_intermediate_size"),
        "num_experts": fields.integer("num_local_experts", None) or fields.integer("num_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "normalize_experts": fields.flag("norm_topk_prob"),
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {
        **read_rope(fields, default_theta=1e6),
        **_window_everywhere(fields),
        "num_experts": fields.integer("num_experts", None) or fields.integer("num_local_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
    }


# --- which layers have a window


def _window_everywhere(fields: Fields) -> dict[str, Any]:
    """Every layer, unless the window is null."""
    window = fields.integer("sliding_window", None)
    layers = fields.integer("num_hidden_layers")
    return {"sliding_window": window, "window_layers": tuple(range(layers)) if window else ()}


def _window_if_used(fields: Fields) -> dict[str, Any]:
    """Qwen's layers from `max_window_layers` on, if the model uses windows at all."""
    used, layers = fields.flag("use_sliding_window"), fields.integer("num_hidden_layers")
    first = 0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers")
    return _window_of_layers(fields, range(first, layers) if used else [], used)


def _window_of_layers(fields: Fields, usual: Iterable[int], used: bool = True) -> dict[str, Any]:
    """The layers that `layer_types` says, or else those that are usual."""
    kinds, layers = fields.get("layer_types", None), fields.integer("num_hidden_layers")
    with_window = tuple(usual)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not {*map(repr, kinds)} <= {*map(repr, LAYER_TYPES)}:
            raise fields.wrong("layer_types", kinds, f"a list of {layers} kinds, {' or '.join(map(repr, LAYER_TYPES))}")
        with_window = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    window = fields.integer("sliding_window", None) if used else None
    if with_window and not window:
        why = "is null" if used else "is not used (use_sliding_window is false)"
        raise CheckpointError(
            f"{fields.where}: layer {with_window[0]} has a sliding window by layer_types, but sliding_window {why}"
        )
    return {"sliding_window": window if with_window else None, "window_layers": with_window}


LAYER_TYPES = ("full_attention", "sliding_attention")
COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
QWEN = COMMON | {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
GEMMA = COMMON | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_ONLY = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}

LAYOUTS = {
    "llama": Layout(
        _llama,
        defaults=COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Layout(
        _mistral,
        defaults=COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        only={"hidden_act": "silu", "layer_types": None},
    ),
    "qwen2": Layout(_qwen2, defaults=QWEN | {"num_key_value_heads": 32, "max_window_layers": 28}),
    "qwen3": Layout(
        _qwen3,
        defaults=QWEN | {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128, "attention_bias": False},
        names=NAMES | NORMS_OF_HEADS,
    ),
    "qwen3_moe": Layout(
        _qwen3_moe,
        defaults=QWEN
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        only={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=NAMES
        | NORMS_OF_HEADS
        | {
            "mlp.router": "mlp.gate",
            "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
            "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
            "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
        },
    ),
    "mixtral": Layout(
        _mixtral,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        names=NAMES
        | {
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3",
            "mlp.experts.{}.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "gemma2": Layout(
        _gemma2,
        defaults=GEMMA
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        only=GEMMA_ONLY,
        names=NAMES | FOUR_NORMS,
        norms_lack=1.0,
    ),
    "gemma3_text": Layout(
        _gemma3,
        defaults=GEMMA | {"max_position_embeddings": 131072, "sliding_window_pattern": 6},
        only=GEMMA_ONLY | {"attn_logit_softcapping": None},
        names=NAMES | NORMS_OF_HEADS | FOUR_NORMS,
        norms_lack=1.0,
    ),
    "phi3": Layout(
        _phi3,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        names=NAMES
        | dict.fromkeys(("attention.q", "attention.k", "attention.v"), "self_attn.qkv_proj")
        | dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
    ),
    "gpt2": Layout(
        _gpt2,
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        names={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "attention_norm": "ln_1",
            **dict.fromkeys(("attention.q", "attention.k", "attention.v"), "attn.c_attn"),
            "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layers="transformer.h.",
        unused=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),  # masks, not weights
        aliases={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ),
}
