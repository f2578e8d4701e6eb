"""The architectures in GGUF files: one table entry per architecture, with llama.cpp's metadata keys and tensor names.

Source of the names: `gguf-py/gguf/constants.py` in ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm.checkpoints.fields import Fields
from minillm.checkpoints.matching import name_in_file

NAMES = {  # minillm's module name -> llama.cpp's
    "embedding": "token_embd",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.output": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}

COMMON_KEYS = {  # metadata that every architecture may have, without the architecture's prefix
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
KEYS_WITHOUT_EFFECT = {
    "expert_used_count",  # in a model without experts
    "rope.scaling.finetuned",
    "tensor_data_layout",  # names a row order that is the same in every file
}


# Metadata with only one implemented value.
REQUIRED_VALUES = {
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """One architecture in GGUF files.

    Attributes
    ----------
    specific_config : reads the fields of ModelConfig that only some architectures set
    names : minillm's module name -> the file's. Modules with the same name in the file are concatenated there
    specific_keys : metadata that this architecture uses besides `COMMON_KEYS`
    aliases : the architecture's names of metadata that others name differently
    rope_factors : the name of the optional tensor with one factor per rotary frequency
    ignored : names of tensors that may be left unused; `{}` is the number of the layer
    interleaved_qk : True if the rows of Q and K are interleaved, see `deinterleave_heads`
    """

    specific_config: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    specific_keys: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_factors: str = "rope_freqs.weight"
    ignored: tuple[str, ...] = ("blk.{}.attn_rot_embd.weight",)
    interleaved_qk: bool = False

    def file_name(self, name: str) -> str:
        """Return the file's name for a tensor: `layers.3.attention.q.weight` -> `blk.3.attn_q.weight`."""
        return name_in_file(name, self.names, "blk.")


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32: 9.99999974738e-06 in a file means 1e-05."""
    return float(str(np.float32(value)))


def _llama(fields: Fields) -> dict[str, Any]:
    """Also reads Mixtral: llama.cpp treats it as a Llama with experts."""
    return _experts(fields) if fields.get("expert_count", 0) else {}


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {"qk_norm": True}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    return _experts(fields) | {"qk_norm": True, "intermediate_size": fields.integer("expert_feed_forward_length")}


def _experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.integer("expert_count"),
        "experts_per_token": fields.integer("expert_used_count"),
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _gemma(fields, pattern=2, layers_of_27b=46) | {
        "attention_soft_cap": shortest_decimal(fields.number("attn_logit_softcapping", 50.0)),
        "logit_soft_cap": shortest_decimal(fields.number(LOGIT_SOFT_CAP, 30.0)),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    soft_cap = fields.number(LOGIT_SOFT_CAP, None)
    return _gemma(fields, pattern=fields.integer("attention.sliding_window_pattern", 6), layers_of_27b=62) | {
        "qk_norm": True,
        "logit_soft_cap": shortest_decimal(soft_cap) if soft_cap else None,
        "rope_theta": shortest_decimal(fields.number("rope.freq_base", 1e6)),
        "window_rope_theta": shortest_decimal(fields.number("rope.freq_base_swa", 1e4)),
    }


def _gemma(fields: Fields, pattern: int, layers_of_27b: int) -> dict[str, Any]:
    """Read the settings that Gemma 2 and 3 share. Every `pattern`-th layer has full attention, the others a window.

    The metadata has no key for the scale of the queries. It follows from head_dim, except in the 27B models, which are
    recognized by their number of layers.
    """
    layers, heads, hidden_size = (
        fields.integer(name) for name in ("block_count", "attention.head_count", "embedding_length")
    )
    query_dim = hidden_size / heads if layers == layers_of_27b else fields.integer("attention.key_length")
    window_layers = tuple(index for index in range(layers) if (index + 1) % pattern)
    return {
        "post_norms": True,
        "activation": "gelu",
        "embedding_scale": math.sqrt(hidden_size),
        "attention_scale": 1 / math.sqrt(query_dim),
        "sliding_window": fields.integer("attention.sliding_window") if window_layers else None,
        "window_layers": window_layers,
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    """Limit the context to the range of the short factors, see `hf_rope.read_partial_rope`."""
    head_dim = fields.integer("embedding_length") // fields.integer("attention.head_count")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    layers, window = fields.integer("block_count"), None
    if fields.get("attention.sliding_window", 0) != 0:  # 0 means none, as in Phi-4
        window = fields.integer("attention.sliding_window")
    context_length = fields.integer("context_length")
    return {
        "rotary_dim": rotary_dim if rotary_dim != fields.integer("attention.key_length", head_dim) else None,
        "sliding_window": window,
        "window_layers": tuple(range(layers)) if window else (),
        "context_length": min(context_length, fields.integer("rope.scaling.original_context_length", context_length)),
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    return {"norm": "layer", "activation": "gelu", "gated": False, "learned_positions": True}


LOGIT_SOFT_CAP = "final_logit_softcapping"
EXPERTS = {
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.{}.gate": "ffn_gate_exps",
    "mlp.experts.{}.up": "ffn_up_exps",
    "mlp.experts.{}.down": "ffn_down_exps",
}
QK_NORMS = {"attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm"}
POST_NORMS = {"post_attention_norm": "post_attention_norm", "post_mlp_norm": "post_ffw_norm"}
FUSED_QKV = dict.fromkeys(("attention.q", "attention.k", "attention.v"), "attn_qkv")

ARCHITECTURES = {
    "llama": GGUFArchitecture(
        _llama,
        names=NAMES | EXPERTS,
        specific_keys=frozenset({"expert_count", "expert_used_count"}),
        interleaved_qk=True,
    ),
    "qwen2": GGUFArchitecture(),
    "qwen3": GGUFArchitecture(_qwen3, names=NAMES | QK_NORMS),
    "qwen3moe": GGUFArchitecture(
        _qwen3_moe,
        names=NAMES | QK_NORMS | EXPERTS,
        specific_keys=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
    ),
    "gemma2": GGUFArchitecture(
        _gemma2,
        names=NAMES | POST_NORMS,
        specific_keys=frozenset({"attention.sliding_window", "attn_logit_softcapping", LOGIT_SOFT_CAP}),
    ),
    "gemma3": GGUFArchitecture(
        _gemma3,
        names=NAMES | QK_NORMS | POST_NORMS,
        specific_keys=frozenset(
            {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", LOGIT_SOFT_CAP}
        ),
    ),
    "phi3": GGUFArchitecture(
        _phi3,
        names=NAMES | FUSED_QKV | dict.fromkeys(("mlp.gate", "mlp.up"), "ffn_up"),
        specific_keys=frozenset({"attention.sliding_window"}),
        rope_factors="rope_factors_short.weight",
        ignored=("rope_factors_long.weight",),
    ),
    "gpt2": GGUFArchitecture(
        _gpt2,
        names=NAMES | FUSED_QKV | {"positions": "position_embd"},
        aliases={"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"},
        specific_keys=frozenset({"attention.layer_norm_epsilon"}),
    ),
}
