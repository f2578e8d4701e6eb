"""Llama as GGUF files hold it: llama.cpp's keys and tensor names, and the order it keeps the rows of Q and K in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor, check_config, match_tensors
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.gguf import GGUFFile, read_gguf
from minillm.config import ModelConfig, RopeScaling
from minillm.errors import CheckpointError, UnsupportedError
from minillm.tokenizer import Tokenizer

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
ROPE_FACTORS = "rope_freqs.weight"
BLOCK_BIAS = re.compile(r"blk\.\d+\.(\w+)\.bias")

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
}
KEYS_WITHOUT_EFFECT = {
    "expert_used_count",  # of no experts
    "rope.scaling.original_context_length",  # matters to yarn, and to the makers of rope_freqs.weight
    "rope.scaling.finetuned",
    "tensor_data_layout",  # names the row order that every file has
}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file that holds a Llama.

    Raises
    ------
    CheckpointError when the file is damaged, incomplete or contradicts itself. UnsupportedError when it holds
    another architecture, or a Llama with additions that are not computed here.
    """
    file = read_gguf(path)
    config = read_config(file)
    check_config(config, len(file.tensors), str(path))
    unused = [ROPE_FACTORS, *(f"blk.{index}.attn_rot_embd.weight" for index in range(config.num_layers))]
    tensors = match_tensors(config, file.tensors, file_name, unused, str(path))
    return Checkpoint(path, config, _interleaved(tensors, config), lambda: _load_tokenizer(file))


def file_name(name: str) -> str:
    """`layers.3.attention.q.weight` -> `blk.3.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's numbers, from the metadata and from which tensors are there."""
    architecture = Fields(file.metadata, str(file.path)).text("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(f"{file.path}: the architecture is {architecture!r:.60}; 'llama' is implemented")
    fields = Fields(file.metadata, str(file.path), prefix="llama.")
    _refuse_additions(fields)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    attention_bias, mlp_bias = _biases(file)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", None) or _embedding_rows(file),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=fields.integer("context_length"),
        norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(fields.number("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(fields, file, head_dim),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_embeddings=file_name("head.weight") not in file.tensors,
    )


def _refuse_additions(fields: Fields) -> None:
    """A key that is not known here may change what the model computes, unless it says "none of that"."""
    for key, value in fields.values.items():
        name = key.removeprefix(fields.prefix)
        if name == key or name in KEYS_WITHOUT_EFFECT:
            continue
        if name not in KEYS_USED and value not in (0, False, "none"):
            raise UnsupportedError(f"{fields.where}: metadata {key!r} is {value!r:.60}: not implemented")
        if name in KEYS_USED and isinstance(value, list):
            raise UnsupportedError(f"{fields.where}: metadata {key!r} differs from layer to layer: not implemented")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{fields.where}: embedding_length {hidden_size} is not a multiple of head_count {num_heads}, "
                "and there is no 'llama.attention.key_length'"
            )
        head_dim = hidden_size // num_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise UnsupportedError(
                f"{fields.where}: field {fields.prefix + name!r} is {fields.integer(name)}; "
                f"only one equal to the key length, {head_dim}, is implemented"
            )
    return head_dim


def _biases(file: GGUFFile) -> tuple[bool, bool]:
    """Whether attention, and whether the MLP, has biases, as far as any layer has."""
    biased = {match[1] for match in map(BLOCK_BIAS.fullmatch, file.tensors) if match}
    attention = {"attn_q", "attn_k", "attn_v", "attn_output"} & biased
    if attention == {"attn_q", "attn_k", "attn_v"}:
        raise UnsupportedError(
            f"{file.path}: has biases on attn_q, attn_k and attn_v but not on attn_output; "
            "biases on all four, or none, are implemented"
        )
    return bool(attention), bool({"ffn_gate", "ffn_up", "ffn_down"} & biased)


def _embedding_rows(file: GGUFFile) -> int:
    name = file_name("embedding.weight")
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


def _rope_scaling(fields: Fields, file: GGUFFile, head_dim: int) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", None) or fields.number("rope.scale_linear", None)
    if kind not in ("none", "linear"):
        raise UnsupportedError(
            f"{fields.where}: field 'llama.rope.scaling.type' is {kind!r:.60}; 'none' and 'linear' are implemented"
        )
    linear = RopeScaling("linear", _shortest(factor)) if kind == "linear" and factor else None
    if ROPE_FACTORS not in file.tensors:
        return linear
    if linear:
        raise UnsupportedError(f"{fields.where}: linear rope scaling together with {ROPE_FACTORS!r}: not implemented")
    return RopeScaling("per_frequency", 1.0, factors=_rope_factors(file.tensors[ROPE_FACTORS], fields.where, head_dim))


def _rope_factors(tensor: StoredTensor, where: str, head_dim: int) -> tuple[float, ...]:
    wanted = (head_dim // 2,)
    if tensor.shape != wanted or tensor.storage.name != "F32":
        raise CheckpointError(
            f"{where}: tensor {tensor.name!r} is {tensor.storage.name} of shape {list(tensor.shape)}, "
            f"wanted F32 of shape {list(wanted)}"
        )
    factors = tensor.read()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{where}: tensor {tensor.name!r} holds a number that is not positive and finite")
    return tuple(factors.tolist())


def _shortest(value: float) -> float:
    """The shortest decimal that a float32 stands for: a file's 9.99999974738e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))


def _interleaved(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Mark Q and K, whose rows GGUF keeps in llama.cpp's order, so that reading them restores ours."""
    heads = {"attention.q": config.num_heads, "attention.k": config.num_kv_heads}
    return {
        name: replace(tensor, interleaved_heads=heads.get(".".join(name.split(".")[2:4]), 0))
        for name, tensor in tensors.items()
    }


def _load_tokenizer(file: GGUFFile) -> Tokenizer | None:
    if file.metadata.get("tokenizer.ggml.model", "none") == "none":
        return None
    return Tokenizer.from_gguf(file.metadata, str(file.path))
