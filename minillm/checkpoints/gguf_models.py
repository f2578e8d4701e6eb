"""Models in GGUF files: read the config from llama.cpp's metadata, and match its tensor names to minillm's.

This module reads what all architectures share; `gguf_architectures.py` holds what is specific to each.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.gguf import GGUFFile, read_gguf
from minillm.checkpoints.gguf_architectures import (
    ARCHITECTURES,
    COMMON_KEYS,
    KEYS_WITHOUT_EFFECT,
    REQUIRED_VALUES,
    GGUFArchitecture,
    shortest_decimal,
)
from minillm.checkpoints.matching import check_config, check_layers, match_tensors
from minillm.checkpoints.recommended_sampling import sampling_from_gguf
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.rope import yarn_attention_factor
from minillm.tokenizer import Tokenizer

BLOCK_BIAS = re.compile(r"blk\.\d+\.(\w+)\.bias")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises
    ------
    CheckpointError
        The file is damaged or incomplete, or it contradicts itself.
    UnsupportedError
        minillm does not implement the file's architecture, or one of its settings.
    """
    file = read_gguf(path)
    architecture = find_architecture(file)
    config = read_config(file)
    check_config(config, str(path))
    ignored = [name.format(index) for name in architecture.ignored for index in range(config.num_layers)]
    ignored.append(architecture.rope_factors)
    tensors = match_tensors(config, file.tensors, architecture.file_name, ignored, str(path))
    if architecture.interleaved_qk:
        tensors = _mark_interleaved(tensors, config)
    recommended_sampling = sampling_from_gguf(file.metadata, str(path))
    return Checkpoint(path, config, tensors, lambda: _load_tokenizer(file), recommended_sampling)


def find_architecture(file: GGUFFile) -> GGUFArchitecture:
    """Return the file's architecture; raise UnsupportedError if minillm does not implement it."""
    name = Fields(file.metadata, str(file.path)).text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: the architecture is {name!r:.60}; implemented: {', '.join(map(repr, ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def read_config(file: GGUFFile) -> ModelConfig:
    """Return the model's config, read from the metadata and from the names of the tensors."""
    architecture = find_architecture(file)
    name = file.metadata["general.architecture"]
    metadata = {key: _common_value(key, value, f"{name}.") for key, value in file.metadata.items()}
    fields = Fields(metadata, str(file.path), f"{name}.", architecture.aliases)
    _check_keys(fields, architecture)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    num_layers = check_layers(fields.integer("block_count"), len(file.tensors), str(file.path))
    specific = architecture.specific_config(fields)
    common: dict[str, Any] = {
        "architecture": name,
        "vocab_size": fields.integer("vocab_size", None) or _embedding_rows(file, architecture),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": fields.integer("context_length"),
        "norm_eps": shortest_decimal(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_decimal(fields.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, file.tensors.get(architecture.rope_factors)),
        "tie_embeddings": architecture.file_name("head.weight") not in file.tensors,
    }
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim not in (head_dim, specific.get("rotary_dim")) and not specific.get("learned_positions"):
        raise UnsupportedError(
            f"{fields.source}: field {fields.key('rope.dimension_count')!r} is {rotary_dim}; "
            f"only the key length, {head_dim}, is implemented"
        )
    return ModelConfig(**common | _biases(file) | specific)


def _common_value(key: str, value: Any, prefix: str) -> Any:
    """Return the value that a list holds for every layer, if all its values are equal; else the value unchanged."""
    if key.startswith(prefix) and isinstance(value, list) and value and all(other == value[0] for other in value):
        return value[0]
    return value


def _check_keys(fields: Fields, architecture: GGUFArchitecture) -> None:
    """Raise UnsupportedError for an unknown key: it may change the computation, unless its value means "none"."""
    used = COMMON_KEYS | architecture.specific_keys
    for key, value in fields.values.items():
        name = key.removeprefix(fields.prefix)
        if name == key or name in KEYS_WITHOUT_EFFECT:
            continue
        if name in REQUIRED_VALUES:
            if value != REQUIRED_VALUES[name]:
                raise UnsupportedError(
                    f"{fields.source}: metadata {key!r} is {value!r:.60}; only {REQUIRED_VALUES[name]!r} is implemented"
                )
            continue
        if name not in used and value not in (0, False, "none"):
            raise UnsupportedError(f"{fields.source}: metadata {key!r} is {value!r:.60}, which is not implemented")
        if name in used and isinstance(value, list):
            raise UnsupportedError(f"{fields.source}: metadata {key!r} varies by layer, which is not implemented")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim: int | None = fields.integer("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{fields.source}: embedding_length {hidden_size} is not a multiple of head_count {num_heads}, "
                f"and there is no {fields.key('attention.key_length')!r}"
            )
        head_dim = hidden_size // num_heads
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            f"{fields.source}: field {fields.key('attention.value_length')!r} is "
            f"{fields.integer('attention.value_length')}; only the key length, {head_dim}, is implemented"
        )
    return head_dim


def _biases(file: GGUFFile) -> dict[str, bool]:
    """Return which projections have biases. A projection has biases if it has one in any layer."""
    biased = {match[1] for match in map(BLOCK_BIAS.fullmatch, file.tensors) if match}
    return {
        "attention_bias": bool({"attn_q", "attn_k", "attn_v", "attn_qkv"} & biased),
        "output_bias": "attn_output" in biased,
        "mlp_bias": bool({"ffn_gate", "ffn_up", "ffn_down"} & biased),
    }


def _embedding_rows(file: GGUFFile, architecture: GGUFArchitecture) -> int:
    name = architecture.file_name("embedding.weight")
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


def _rope_scaling(fields: Fields, factors: StoredTensor | None) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", None) or fields.number("rope.scale_linear", None)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{fields.source}: field {fields.key('rope.scaling.type')!r} is {kind!r:.60}; "
            "'none', 'linear' and 'yarn' are implemented"
        )
    attention_factor = 1.0
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):  # llama.cpp multiplies the two
        attention_factor *= shortest_decimal(fields.number(name, 1.0))
    scaling = None
    if kind == "yarn":
        scaling = _yarn(fields, shortest_decimal(factor or 1.0), attention_factor)
    elif kind == "linear" and factor:
        scaling = RopeScaling("linear", shortest_decimal(factor), attention_factor=attention_factor)
    if factors is not None:
        if scaling:
            raise UnsupportedError(
                f"{fields.source}: {kind} rope scaling combined with tensor {factors.name!r} is not implemented"
            )
        scaling = RopeScaling(
            "per_frequency", 1.0, factors=_rope_factors(factors, fields.source), attention_factor=attention_factor
        )
    if scaling is None and attention_factor != 1:
        scaling = RopeScaling("linear", 1.0, attention_factor=attention_factor)
    return scaling


def _yarn(fields: Fields, factor: float, attention_factor: float) -> RopeScaling:
    return RopeScaling(
        "yarn",
        factor,
        original_context_length=fields.integer("rope.scaling.original_context_length"),
        beta_fast=shortest_decimal(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest_decimal(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_attention_factor(factor) * attention_factor,
    )


def _rope_factors(tensor: StoredTensor, source: str) -> tuple[float, ...]:
    if len(tensor.shape) != 1 or tensor.storage.name != "F32":
        raise CheckpointError(
            f"{source}: tensor {tensor.name!r} is {tensor.storage.name} of shape {list(tensor.shape)}, "
            "expected an F32 vector with one factor per frequency"
        )
    factors = tensor.read()
    assert isinstance(factors, np.ndarray)  # F32 is not quantized
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{source}: tensor {tensor.name!r} holds a value that is not positive and finite")
    return tuple(factors.tolist())


def _mark_interleaved(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Mark Q and K, so that `StoredTensor.read` converts llama.cpp's order of rows to minillm's."""
    heads = {"attention.q": config.num_heads, "attention.k": config.num_kv_heads}
    return {
        name: replace(tensor, interleaved_heads=heads.get(".".join(name.split(".")[2:4]), 0))
        for name, tensor in tensors.items()
    }


def _load_tokenizer(file: GGUFFile) -> Tokenizer | None:
    if file.metadata.get("tokenizer.ggml.model", "none") == "none":
        return None
    return Tokenizer.from_gguf(file.metadata, str(file.path))
