"""Models as Hugging Face folders hold them: config.json's fields, transformers' tensor names, tokenizer.json.

What all architectures share is read here; what each has of its own stands in `hf_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor, check_config, check_layers, match_tensors
from minillm.checkpoints.fields import LARGEST_INTEGER, Fields, parse_json
from minillm.checkpoints.hf_layouts import LAYOUTS, Layout
from minillm.checkpoints.recommended import recommended_by_folder
from minillm.checkpoints.safetensors import DTYPES, read_folder, read_whole
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig
from minillm.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder that holds `config.json`, `*.safetensors`, and mostly `tokenizer.json`; what else is known is read
    where it is there.

    Raises
    ------
    CheckpointError when a file is absent, damaged, or contradicts another. UnsupportedError when the folder holds
    an architecture that is not implemented, or one that is with settings that are not computed here.
    """
    config_path = folder / "config.json"
    fields = Fields(parse_json(read_whole(config_path), str(config_path)), str(config_path))
    layout = find_layout(fields)
    found = _with_prefix(read_folder(folder), layout)
    config = read_config(fields, len(found))
    check_config(config, str(config_path))
    if config.tie_embeddings:
        _check_tie(found, layout, folder)
    unused = [name.format(index) for name in layout.unused for index in range(config.num_layers)]
    if config.tie_embeddings:
        unused.append(layout.file_name("head.weight"))
    if layout.transposed:
        found = {name: tensor.transposed() if layout.is_transposed(name) else tensor for name, tensor in found.items()}
    tensors = match_tensors(config, found, layout.file_name, unused, str(folder))
    if layout.norms_lack:
        norms = {name for name in tensors if name.endswith("norm.weight")}
        tensors |= {name: replace(tensors[name], added=layout.norms_lack) for name in norms}
    return Checkpoint(folder, config, tensors, lambda: _load_tokenizer(folder), recommended_by_folder(folder))


def _with_prefix(found: dict[str, StoredTensor], layout: Layout) -> dict[str, StoredTensor]:
    """Tensors under the names that a model with its head has; one that was saved without lacks the prefix."""
    prefix = layout.layers.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in found):
        return found
    head = layout.file_name("head.weight")
    return {name if name == head else prefix + name: tensor for name, tensor in found.items()}


def find_layout(fields: Fields) -> Layout:
    """How folders hold the architecture that a config.json names; UnsupportedError if it is not implemented."""
    model_type = fields.text("model_type")
    if model_type not in LAYOUTS:
        raise UnsupportedError(
            f"{fields.where}: model_type is {model_type!r:.60}; implemented are {', '.join(map(repr, LAYOUTS))}"
        )
    return LAYOUTS[model_type]


def read_config(fields: Fields, num_tensors: int = LARGEST_INTEGER) -> ModelConfig:
    """The model's numbers; a field that config.json lacks has the value that transformers gives it.

    A model that claims more layers than `num_tensors` is refused before anything is made for each.
    """
    layout = find_layout(fields)
    fields = fields.over(layout.defaults, layout.aliases)
    _refuse_others(fields, layout)
    num_layers = check_layers(fields.integer("num_hidden_layers"), num_tensors, fields.where)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.where}: {fields.key('hidden_size')} {hidden_size} is not a multiple of "
            f"{fields.key('num_attention_heads')} {num_heads}, and there is no head_dim"
        )
    different = layout.differences(fields)
    shared = {
        "architecture": fields.text("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": different.get("intermediate_size") or fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim or hidden_size // num_heads,
        "context_length": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
    }
    return ModelConfig(**shared | different)


def _refuse_others(fields: Fields, layout: Layout) -> None:
    for name, implemented in layout.only.items():
        found = fields.get(name, implemented)
        if found != implemented:
            name = fields.key(name)
            raise UnsupportedError(f"{fields.where}: {name} is {found!r:.60}; {implemented!r} is implemented")
    if fields.get("quantization_config", None) is not None:
        raise UnsupportedError(
            f"{fields.where}: quantization_config is set; folders of {', '.join(DTYPES)} are "
            "implemented, and quantized models as GGUF files"
        )


def _check_tie(found: dict[str, StoredTensor], layout: Layout, folder: Path) -> None:
    """A tied model needs no head of its own. Some files repeat the embedding there; a different head is an error."""
    head, embedding = (found.get(layout.file_name(f"{name}.weight")) for name in ("head", "embedding"))
    if head and embedding and not np.array_equal(head.data, embedding.data):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding (tie_word_embeddings), "
            f"but {head.name!r} and {embedding.name!r} differ; one of the two is wrong"
        )


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_folder(folder)
