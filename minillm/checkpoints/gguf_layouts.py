"""What each architecture is like in a GGUF file: a table, an entry an architecture.

The names are llama.cpp's (`gguf-py/gguf/constants.py` in ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import name_in_file
from minillm.checkpoints.fields import Fields

NAMES = {  # this project's name of a module -> llama.cpp's
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

KEYS_USED = {
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
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
KEYS_WITHOUT_EFFECT = {
    "expert_used_count",  # of no experts
    "rope.scaling.finetuned",
    "tensor_data_layout",  # names the row order that every file has
}


@dataclass(frozen=True)
class Layout:
    """How GGUF files hold one architecture.

    Attributes
    ----------
    differences : what it sets in ModelConfig beyond what all set, from the fields
    names : this project's name of a module -> the file's. Several may have one: they lie there end to end
    keys : metadata that it has beyond what all have
    aliases : what its metadata calls fields that others name alike
    rope_factors : the tensor that holds a factor for each rotary frequency, if the file has it
    unused : tensors that may be left over, for nothing is computed from them here
    interleaved : whether the rows of Q and K are in llama.cpp's order, see `split_halves`
    """

    differences: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    keys: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_factors: str = "rope_freqs.weight"
    unused: tuple[str, ...] = ("blk.{}.attn_rot_embd.weight",)
    interleaved: bool = False

    def file_name(self, name: str) -> str:
        """`layers.3.attention.q.weight` -> `blk.3.attn_q.weight`."""
        return name_in_file(name, self.names, "blk.")


def shortest(value: float) -> float:
    """The shortest decimal that a float32 stands for: a file's 9.99999974738e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))


def _llama(fields: Fields) -> dict[str, Any]:
    """Mixtral among them, which is a Llama with experts to llama.cpp."""
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
    cap = fields.number("attn_logit_softcapping", 50.0)
    settings = {"attention_soft_cap": shortest(cap), "logit_soft_cap": shortest(fields.number(FINAL_CAP, 30.0))}
    return _gemma(fields, pattern=2, layers_of_27b=46) | settings


def _gemma3(fields: Fields) -> dict[str, Any]:
    cap = fields.number(FINAL_CAP, None)
    return _gemma(fields, pattern=fields.integer("attention.sliding_window_pattern", 6), layers_of_27b=62) | {
        "qk_norm": True,
        "logit_soft_cap": shortest(cap) if cap else None,
        "rope_theta": shortest(fields.number("rope.freq_base", 1e6)),
        "window_rope_theta": shortest(fields.number("rope.freq_base_swa", 1e4)),
    }


def _gemma(fields: Fields, pattern: int, layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; every `pattern`-th layer sees everything, those between have a window.

    No key has the scale of the queries: it is a head's, but for the largest model of each, which is told by its layers.
    """
    layers, heads, hidden_size = (
        fields.integer(name) for name in ("block_count", "attention.head_count", "embedding_length")
    )
    size = hidden_size / heads if layers == layers_of_27b else fields.integer("attention.key_length")
    with_window = tuple(index for index in range(layers) if (index + 1) % pattern)
    return {
        "post_norms": True,
        "activation": "gelu",
        "embedding_scale": math.sqrt(hidden_size),
        "query_scale": 1 / math.sqrt(size),
        "sliding_window": fields.integer("attention.sliding_window") if with_window else None,
        "window_layers": with_window,
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    """Texts beyond the context that the short factors are for are not computed, see `hf_rope.read_partial_rope`."""
    head_dim = fields.integer("embedding_length") // fields.integer("attention.head_count")
    turned = fields.integer("rope.dimension_count", head_dim)
    window, layers = fields.integer("attention.sliding_window", None), fields.integer("block_count")
    context_length = fields.integer("context_length")
    return {
        "rotary_dim": turned if turned != fields.integer("attention.key_length", head_dim) else None,
        "sliding_window": window,
        "window_layers": tuple(range(layers)) if window else (),
        "context_length": min(context_length, fields.integer("rope.scaling.original_context_length", context_length)),
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    return {"norm": "layer", "activation": "gelu", "gated": False, "learned_positions": True}


FINAL_CAP = "final_logit_softcapping"
EXPERTS = {
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.{}.gate": "ffn_gate_exps",
    "mlp.experts.{}.up": "ffn_up_exps",
    "mlp.experts.{}.down": "ffn_down_exps",
}
NORMS_OF_HEADS = {"attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm"}
POST_NORMS = {"post_attention_norm": "post_attention_norm", "post_mlp_norm": "post_ffw_norm"}
ONE_QKV = dict.fromkeys(("attention.q", "attention.k", "attention.v"), "attn_qkv")

LAYOUTS = {
    "llama": Layout(
        _llama, names=NAMES | EXPERTS, keys=frozenset({"expert_count", "expert_used_count"}), interleaved=True
    ),
    "qwen2": Layout(),
    "qwen3": Layout(_qwen3, names=NAMES | NORMS_OF_HEADS),
    "qwen3moe": Layout(
        _qwen3_moe,
        names=NAMES | NORMS_OF_HEADS | EXPERTS,
        keys=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
    ),
    "gemma2": Layout(
        _gemma2,
        names=NAMES | POST_NORMS,
        keys=frozenset({"attention.sliding_window", "attn_logit_softcapping", FINAL_CAP}),
    ),
    "gemma3": Layout(
        _gemma3,
        names=NAMES | NORMS_OF_HEADS | POST_NORMS,
        keys=frozenset(
            {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", FINAL_CAP}
        ),
    ),
    "phi3": Layout(
        _phi3,
        names=NAMES | ONE_QKV | dict.fromkeys(("mlp.gate", "mlp.up"), "ffn_up"),
        keys=frozenset({"attention.sliding_window"}),
        rope_factors="rope_factors_short.weight",
        unused=("rope_factors_long.weight",),
    ),
    "gpt2": Layout(
        _gpt2,
        names=NAMES | ONE_QKV | {"positions": "position_embd"},
        aliases={"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"},
        keys=frozenset({"attention.layer_norm_epsilon"}),
    ),
}
