"""The architectures in Hugging Face folders: one table entry per architecture, with its fields and tensor names.

`defaults` holds the default values of the architecture's configuration class in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_rope import read_partial_rope, read_rope, read_two_ropes
from minillm.checkpoints.matching import name_in_file
from minillm.errors import CheckpointError

NAMES = {  # minillm's module name -> the name in most models of transformers
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
# Rotary frequencies that older versions of transformers saved. They follow from the config.
ROTARY_BUFFERS = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")


@dataclass(frozen=True)
class HFArchitecture:
    """One architecture in Hugging Face folders.

    Attributes
    ----------
    specific_config : reads the fields of ModelConfig that only some architectures set
    defaults : the values of fields that config.json may omit
    required_values : the only value that minillm implements for a field; config.json may omit the field
    names : minillm's module name -> the folder's. Modules with the same name in the folder are concatenated there
    layer_prefix : the part of a tensor's name before the layer number
    ignored : names of tensors that may be left unused; `{}` is the number of the layer
    aliases : the architecture's names of fields that others name differently
    transposed_modules : modules whose matrices the folder stores as (inputs, outputs)
    norm_offset : a number that must be added to the weights of the norms
    """

    specific_config: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any]
    required_values: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    layer_prefix: str = "model.layers."
    ignored: tuple[str, ...] = ROTARY_BUFFERS
    aliases: Mapping[str, str] = field(default_factory=dict)
    transposed_modules: frozenset[str] = frozenset()
    norm_offset: float = 0.0

    def file_name(self, name: str) -> str:
        """Return the folder's name for a tensor, such as `model.layers.3.self_attn.q_proj.weight`."""
        return name_in_file(name, self.names, self.layer_prefix)

    def is_transposed(self, file_name: str) -> bool:
        """Return whether the folder stores this matrix as (inputs, outputs)."""
        module, _, kind = file_name.rpartition(".")
        return kind == "weight" and ".".join(module.split(".")[-2:]) in self.transposed_modules


QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
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
    soft_cap = fields.number("attn_logit_softcapping", None)
    return read_rope(fields) | _gemma(fields, pattern=2) | {"attention_soft_cap": soft_cap}


def _gemma3(fields: Fields) -> dict[str, Any]:
    pattern = fields.integer("sliding_window_pattern")
    return read_two_ropes(fields) | _gemma(fields, pattern) | {"qk_norm": True}


def _gemma(fields: Fields, pattern: int) -> dict[str, Any]:
    """Read the settings that Gemma 2 and 3 share. Every `pattern`-th layer has full attention, the others a window."""
    bias, layers = fields.flag("attention_bias"), fields.integer("num_hidden_layers")
    window_layers = [index for index in range(layers) if (index + 1) % pattern]
    return {
        "post_norms": True,
        "activation": "gelu",
        "embedding_scale": math.sqrt(fields.integer("hidden_size")),
        "attention_scale": 1 / math.sqrt(fields.number("query_pre_attn_scalar")),
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
        "attention_bias": bias,
        "output_bias": bias,
        **_windows_by_layer(fields, window_layers),
    }


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


# ---- sliding windows


def _window_everywhere(fields: Fields) -> dict[str, Any]:
    """Give every layer a window, unless the window is null."""
    window = fields.integer("sliding_window", None)
    layers = fields.integer("num_hidden_layers")
    return {"sliding_window": window, "window_layers": tuple(range(layers)) if window else ()}


def _window_if_used(fields: Fields) -> dict[str, Any]:
    """Give Qwen's layers a window from layer `max_window_layers` on, if `use_sliding_window` is true."""
    used, layers = fields.flag("use_sliding_window"), fields.integer("num_hidden_layers")
    first = 0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers")
    return _windows_by_layer(fields, range(first, layers) if used else [], used)


def _windows_by_layer(fields: Fields, default: Iterable[int], used: bool = True) -> dict[str, Any]:
    """Give a window to the layers in `layer_types`, or to the default layers if there is no `layer_types`.

    `used` is False if the config turns windows off; `layer_types` must then have none.
    """
    layer_types = _layer_types(fields)
    window_layers = tuple(default)
    if layer_types is not None:
        window_layers = tuple(index for index, kind in enumerate(layer_types) if kind == "sliding_attention")
    window = fields.integer("sliding_window", None) if used else None
    if window_layers and not window:
        reason = "is null" if used else "is turned off by use_sliding_window"
        raise CheckpointError(
            f"{fields.source}: layer {window_layers[0]} has sliding-window attention, but sliding_window {reason}"
        )
    return {"sliding_window": window if window_layers else None, "window_layers": window_layers}


def _layer_types(fields: Fields) -> list[str] | None:
    layer_types, layers = fields.get("layer_types", None), fields.integer("num_hidden_layers")
    if layer_types is None:
        return None
    if (
        isinstance(layer_types, list)
        and len(layer_types) == layers
        and all(kind in LAYER_TYPES for kind in layer_types)
    ):
        return layer_types
    names = " or ".join(map(repr, LAYER_TYPES))
    raise fields.invalid("layer_types", layer_types, f"a list of {layers} layer types, each {names}")


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
GEMMA_REQUIRED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}

ARCHITECTURES = {
    "llama": HFArchitecture(
        _llama,
        defaults=COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": HFArchitecture(
        _mistral,
        defaults=COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        required_values={"hidden_act": "silu", "layer_types": None},
    ),
    "qwen2": HFArchitecture(_qwen2, defaults=QWEN | {"num_key_value_heads": 32, "max_window_layers": 28}),
    "qwen3": HFArchitecture(
        _qwen3,
        defaults=QWEN | {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128, "attention_bias": False},
        names=NAMES | QK_NORMS,
    ),
    "qwen3_moe": HFArchitecture(
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
        required_values={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=NAMES
        | QK_NORMS
        | {
            "mlp.router": "mlp.gate",
            "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
            "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
            "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
        },
    ),
    "mixtral": HFArchitecture(
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
    "gemma2": HFArchitecture(
        _gemma2,
        defaults=GEMMA
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        required_values=GEMMA_REQUIRED,
        names=NAMES | GEMMA_NORMS,
        norm_offset=1.0,
    ),
    "gemma3_text": HFArchitecture(
        _gemma3,
        defaults=GEMMA | {"max_position_embeddings": 131072, "sliding_window_pattern": 6},
        required_values=GEMMA_REQUIRED | {"attn_logit_softcapping": None},
        names=NAMES | QK_NORMS | GEMMA_NORMS,
        norm_offset=1.0,
    ),
    "phi3": HFArchitecture(
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
    "gpt2": HFArchitecture(
        _gpt2,
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        required_values={
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
        layer_prefix="transformer.h.",
        ignored=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),  # masks, not weights
        aliases={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        transposed_modules=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ),
}
