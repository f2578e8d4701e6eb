"""Models as GGUF files hold them: llama.cpp's keys and tensor names, and the order it keeps the rows of Q and K in.

What all architectures share is read here; what each has of its own stands in `gguf_layouts.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor, check_config, check_layers, match_tensors
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.gguf import GGUFFile, read_gguf
from minillm.checkpoints.gguf_layouts import KEYS_USED, KEYS_WITHOUT_EFFECT, LAYOUTS, Layout, shortest
from minillm.checkpoints.recommended import recommended_by_gguf
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.rope import yarn_attention_factor
from minillm.tokenizer import Tokenizer

BLOCK_BIAS = re.compile(r"blk\.\d+\.(\w+)\.bias")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises
    ------
    CheckpointError when the file is damaged, incomplete or contradicts itself. UnsupportedError when it holds
    an architecture that is not implemented, or one that is with additions that are not computed here.
    """
    file = read_gguf(path)
    layout = find_layout(file)
    config = read_config(file)
    check_config(config, str(path))
    unused = [name.format(index) for name in layout.unused for index in range(config.num_layers)]
    unused.append(layout.rope_factors)
    tensors = match_tensors(config, file.tensors, layout.file_name, unused, str(path))
    if layout.interleaved:
        tensors = _interleaved(tensors, config)
    recommended = recommended_by_gguf(file.metadata, str(path))
    return Checkpoint(path, config, tensors, lambda: _load_tokenizer(file), recommended)


def find_layout(file: GGUFFile) -> Layout:
    """How GGUF files hold the architecture that this one names; UnsupportedError if it is none that is implemented."""
    architecture = Fields(file.metadata, str(file.path)).text("general.architecture")
    if architecture not in LAYOUTS:
        raise UnsupportedError(
            f"{file.path}: the architecture is {architecture!r:.60}; implemented are {', '.join(map(repr, LAYOUTS))}"
        )
    return LAYOUTS[architecture]


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's numbers, from the metadata and from which tensors are there."""
    layout = find_layout(file)
    architecture = file.metadata["general.architecture"]
    fields = Fields(file.metadata, str(file.path), f"{architecture}.", layout.aliases)
    _refuse_additions(fields, layout)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    num_layers = check_layers(fields.integer("block_count"), len(file.tensors), str(file.path))
    different = layout.differences(fields)
    shared = {
        "architecture": architecture,
        "vocab_size": fields.integer("vocab_size", None) or _embedding_rows(file, layout),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": fields.integer("context_length"),
        "norm_eps": shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(fields.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, file.tensors.get(layout.rope_factors)),
        "tie_embeddings": layout.file_name("head.weight") not in file.tensors,
    }
    turned = fields.integer("rope.dimension_count", head_dim)
    if turned not in (head_dim, different.get("rotary_dim")) and not different.get("learned_positions"):
        raise UnsupportedError(
            f"{fields.where}: field {fields.key('rope.dimension_count')!r} is {turned}; "
            f"only one equal to the key length, {head_dim}, is implemented"
        )
    return ModelConfig(**shared | _biases(file) | different)


def _refuse_additions(fields: Fields, layout: Layout) -> None:
    """A key that is not known here may change what the model computes, unless it says "none of that"."""
    used = KEYS_USED | layout.keys
    for key, value in fields.values.items():
        name = key.removeprefix(fields.prefix)
        if name == key or name in KEYS_WITHOUT_EFFECT:
            continue
        if name not in used and value not in (0, False, "none"):
            raise UnsupportedError(f"{fields.where}: metadata {key!r} is {value!r:.60}: not implemented")
        if name in used and isinstance(value, list):
            raise UnsupportedError(f"{fields.where}: metadata {key!r} differs from layer to layer: not implemented")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{fields.where}: embedding_length {hidden_size} is not a multiple of head_count {num_heads}, "
                f"and there is no {fields.key('attention.key_length')!r}"
            )
        head_dim = hidden_size // num_heads
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            f"{fields.where}: field {fields.key('attention.value_length')!r} is "
            f"{fields.integer('attention.value_length')}; only one equal to the key length, {head_dim}, is implemented"
        )
    return head_dim


def _biases(file: GGUFFile) -> dict[str, bool]:
    """Which projections have biases, as far as any layer's have."""
    biased = {match[1] for match in map(BLOCK_BIAS.fullmatch, file.tensors) if match}
    return {
        "attention_bias": bool({"attn_q", "attn_k", "attn_v", "attn_qkv"} & biased),
        "output_bias": "attn_output" in biased,
        "mlp_bias": bool({"ffn_gate", "ffn_up", "ffn_down"} & biased),
    }


def _embedding_rows(file: GGUFFile, layout: Layout) -> int:
    name = layout.file_name("embedding.weight")
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


def _rope_scaling(fields: Fields, factors: StoredTensor | None) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", None) or fields.number("rope.scale_linear", None)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{fields.where}: field {fields.key('rope.scaling.type')!r} is {kind!r:.60}; "
            "'none', 'linear' and 'yarn' are implemented"
        )
    attention_factor = shortest(fields.number("rope.scaling.attn_factor", 1.0))
    scaling = None
    if kind == "yarn":
        scaling = _yarn(fields, shortest(factor or 1.0), attention_factor)
    elif kind == "linear" and factor:
        scaling = RopeScaling("linear", shortest(factor), attention_factor=attention_factor)
    if factors is not None:
        if scaling:
            raise UnsupportedError(
                f"{fields.where}: {kind} rope scaling together with {factors.name!r}: not implemented"
            )
        scaling = RopeScaling(
            "per_frequency", 1.0, factors=_rope_factors(factors, fields.where), attention_factor=attention_factor
        )
    if scaling is None and attention_factor != 1:
        scaling = RopeScaling("linear", 1.0, attention_factor=attention_factor)
    return scaling


def _yarn(fields: Fields, factor: float, attention_factor: float) -> RopeScaling:
    return RopeScaling(
        "yarn",
        factor,
        original_context_length=fields.integer("rope.scaling.original_context_length"),
        beta_fast=shortest(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_attention_factor(factor) * attention_factor,
    )


def _rope_factors(tensor: StoredTensor, where: str) -> tuple[float, ...]:
    if len(tensor.shape) != 1 or tensor.storage.name != "F32":
        raise CheckpointError(
            f"{where}: tensor {tensor.name!r} is {tensor.storage.name} of shape {list(tensor.shape)}, "
            "wanted F32, a factor for each frequency"
        )
    factors = tensor.read()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{where}: tensor {tensor.name!r} holds a number that is not positive and finite")
    return tuple(factors.tolist())


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
