"""What each architecture's config.json and tensors are like: a table, an entry an architecture.

`defaults` are transformers' own, of each configuration class: what a config.json means that lacks the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_rope import read_rope

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
    """

    differences: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    layers: str = "model.layers."
    unused: tuple[str, ...] = OLD_BUFFERS

    def file_name(self, name: str) -> str:
        """`layers.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        if not layer:
            return f"{self.names[module]}.{kind}"
        return f"{self.layers}{layer[1]}.{self.names[layer[2]]}.{kind}"


def _llama(fields: Fields) -> dict[str, Any]:
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    return read_rope(fields) | {"attention_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}


LAYOUTS = {
    "llama": Layout(
        _llama,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
}
