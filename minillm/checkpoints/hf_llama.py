"""Llama as a Hugging Face folder holds it: config.json's fields, transformers' tensor names, tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor, check_config, match_tensors
from minillm.checkpoints.fields import Fields, parse_json
from minillm.checkpoints.safetensors import DTYPES, read_folder, read_whole
from minillm.config import ModelConfig, RopeScaling
from minillm.errors import CheckpointError, UnsupportedError
from minillm.tokenizer import Tokenizer

NAMES = {  # this project's name of a module -> transformers'
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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder that holds `config.json`, `*.safetensors`, and mostly `tokenizer.json`.

    Raises
    ------
    CheckpointError when a file is absent, damaged, or contradicts another. UnsupportedError when the folder holds
    another architecture, or a Llama with settings that are not computed here.
    """
    config_path = folder / "config.json"
    config = read_config(Fields(parse_json(read_whole(config_path), str(config_path)), str(config_path)))
    found = read_folder(folder)
    check_config(config, len(found), str(config_path))
    if config.tie_embeddings:
        _check_tie(found, folder)
    unused = [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)]
    unused.append("model.rotary_emb.inv_freq")  # these follow from the config
    if config.tie_embeddings:
        unused.append(file_name("head.weight"))
    tensors = match_tensors(config, found, file_name, unused, str(folder))
    return Checkpoint(folder, config, tensors, lambda: _load_tokenizer(folder))


def file_name(name: str) -> str:
    """`layers.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def read_config(fields: Fields) -> ModelConfig:
    """The model's numbers; a field that config.json lacks has the value transformers' LlamaConfig gives it."""
    _refuse_others(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim"
        )
    context_length = fields.integer("max_position_embeddings", 2048)
    rope_theta, rope_scaling = _read_rope(fields, context_length)
    return ModelConfig(
        architecture="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim or hidden_size // num_heads,
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _refuse_others(fields: Fields) -> None:
    for name, implemented in (("model_type", "llama"), ("hidden_act", "silu")):
        found = fields.text(name, "silu") if name == "hidden_act" else fields.text(name)
        if found != implemented:
            raise UnsupportedError(f"{fields.where}: {name} is {found!r:.60}; {implemented!r} is implemented")
    if fields.get("quantization_config", None) is not None:
        raise UnsupportedError(
            f"{fields.where}: quantization_config is set; folders of {', '.join(DTYPES)} are "
            "implemented, and quantized models as GGUF files"
        )


def _read_rope(fields: Fields, context_length: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: one section `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = fields.section("rope_scaling")
    if not rope.values:
        rope = fields.section("rope_parameters")
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"{section.where}: partial_rotary_factor is {section.number('partial_rotary_factor')}; "
                "only rotating whole heads is implemented"
            )
    kind = rope.text("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise UnsupportedError(
            f"{rope.where}: rope_type is {kind!r:.60}; 'default', 'linear' and 'llama3' are implemented"
        )
    scaling = RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.integer("original_max_position_embeddings", context_length),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise CheckpointError(
            f"{rope.where}: low_freq_factor is {scaling.low_freq_factor}, "
            f"wanted less than high_freq_factor, {scaling.high_freq_factor}"
        )
    return theta, scaling


def _check_tie(found: dict[str, StoredTensor], folder: Path) -> None:
    """A tied model needs no head of its own. Some files repeat the embedding there; a different head is an error."""
    head, embedding = found.get(file_name("head.weight")), found.get(file_name("embedding.weight"))
    if head and embedding and not np.array_equal(head.data, embedding.data):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding (tie_word_embeddings), "
            f"but {head.name!r} and {embedding.name!r} differ; one of the two is wrong"
        )


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_folder(folder)
