"""What each architecture is like in a GGUF file: a table, an entry an architecture.

The names are llama.cpp's (`gguf-py/gguf/constants.py` in ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    interleaved : whether the rows of Q and K are in llama.cpp's order, see `split_halves`
    """

    differences: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    keys: frozenset[str] = frozenset()
    interleaved: bool = False

    def file_name(self, name: str) -> str:
        """`layers.3.attention.q.weight` -> `blk.3.attn_q.weight`."""
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        if not layer:
            return f"{self.names[module]}.{kind}"
        return f"blk.{layer[1]}.{self.names[layer[2]]}.{kind}"


def shortest(value: float) -> float:
    """The shortest decimal that a float32 stands for: a file's 9.99999974738e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))


LAYOUTS = {
    "llama": Layout(interleaved=True),
}
