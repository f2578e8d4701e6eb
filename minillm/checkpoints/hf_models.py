"""Models in Hugging Face folders: read `config.json`, and match transformers' tensor names to minillm's.

This module reads what all architectures share; `hf_architectures.py` holds what is specific to each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor
from minillm.checkpoints.fields import MAX_INTEGER, Fields, parse_json
from minillm.checkpoints.hf_architectures import ARCHITECTURES, HFArchitecture
from minillm.checkpoints.hf_unused_fields import warn_about_unused
from minillm.checkpoints.matching import check_config, check_layers, match_tensors
from minillm.checkpoints.recommended_sampling import sampling_from_folder
from minillm.checkpoints.safetensors import DTYPES, read_file, read_folder
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig
from minillm.tokenizer import Tokenizer

REQUIRED_VALUES = {"is_causal": True}  # of every architecture; with false, transformers also attends to later tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder with `config.json`, `*.safetensors` and optionally the files of a tokenizer.

    Raises
    ------
    CheckpointError
        A file is missing or damaged, or two files contradict each other.
    UnsupportedError
        minillm does not implement the folder's architecture, or one of its settings.
    """
    config_path = folder / "config.json"
    fields = Fields(parse_json(read_file(config_path), str(config_path)), str(config_path))
    architecture = find_architecture(fields)
    found = _add_prefix(read_folder(folder), architecture)
    config = read_config(fields, len(found))
    check_config(config, str(config_path))
    if config.tie_embeddings:
        _check_tied_head(found, architecture, folder)
    ignored = [name.format(index) for name in architecture.ignored for index in range(config.num_layers)]
    if config.tie_embeddings:
        ignored.append(architecture.file_name("head.weight"))
    if architecture.transposed_modules:
        found = {
            name: tensor.transposed() if architecture.is_transposed(name) else tensor for name, tensor in found.items()
        }
    tensors = match_tensors(config, found, architecture.file_name, ignored, str(folder))
    if architecture.norm_offset:
        norms = {name for name in tensors if name.endswith("norm.weight")}
        tensors |= {name: replace(tensors[name], offset=architecture.norm_offset) for name in norms}
    return Checkpoint(folder, config, tensors, lambda: _load_tokenizer(folder), sampling_from_folder(folder))


def _add_prefix(found: dict[str, StoredTensor], architecture: HFArchitecture) -> dict[str, StoredTensor]:
    """Add the prefix that tensors lack if the model was saved without its head."""
    prefix = architecture.layer_prefix.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in found):
        return found
    head = architecture.file_name("head.weight")
    return {name if name == head else prefix + name: tensor for name, tensor in found.items()}


def find_architecture(fields: Fields) -> HFArchitecture:
    """Return the architecture that `config.json` names; raise UnsupportedError if minillm does not implement it."""
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"{fields.source}: model_type is {model_type!r:.60}; implemented: {', '.join(map(repr, ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def read_config(fields: Fields, num_tensors: int = MAX_INTEGER) -> ModelConfig:
    """Return the model's config. A field missing from `config.json` has its default value in transformers.

    A config with more layers than `num_tensors` is rejected first, so that it cannot cause large allocations.
    """
    architecture = find_architecture(fields)
    fields = fields.with_defaults(architecture.defaults, architecture.aliases)
    _check_required_values(fields, architecture)
    num_layers = check_layers(fields.integer("num_hidden_layers"), num_tensors, fields.source)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.source}: {fields.key('hidden_size')} {hidden_size} is not a multiple of "
            f"{fields.key('num_attention_heads')} {num_heads}, and there is no head_dim"
        )
    specific = architecture.specific_config(fields)
    common: dict[str, Any] = {
        "architecture": fields.text("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": specific.get("intermediate_size") or fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim or hidden_size // num_heads,
        "context_length": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
    }
    fields.used |= {fields.key(name) for name in architecture.defaults}  # some are read only if others have a value
    warn_about_unused(fields)
    return ModelConfig(**common | specific)


def _check_required_values(fields: Fields, architecture: HFArchitecture) -> None:
    for name, implemented in {**REQUIRED_VALUES, **architecture.required_values}.items():
        found = fields.get(name, implemented)
        if found != implemented:
            name = fields.key(name)
            raise UnsupportedError(f"{fields.source}: {name} is {found!r:.60}; only {implemented!r} is implemented")
    if fields.get("quantization_config", None) is not None:
        raise UnsupportedError(
            f"{fields.source}: quantization_config is set, but only {', '.join(DTYPES)} folders are implemented; use a "
            "GGUF file for a quantized model"
        )


def _check_tied_head(found: dict[str, StoredTensor], architecture: HFArchitecture, folder: Path) -> None:
    """Raise CheckpointError if the head of a tied model differs from the embedding. Some files store it twice."""
    head, embedding = (found.get(architecture.file_name(f"{name}.weight")) for name in ("head", "embedding"))
    if head and embedding and not np.array_equal(head.data, embedding.data):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding (tie_word_embeddings), "
            f"but {head.name!r} and {embedding.name!r} differ; one of the two is wrong"
        )


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_folder(folder)
