"""Match the tensors of a file to the tensors of a model, and check that the model's config is consistent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from minillm.checkpoints.checkpoint import StoredTensor
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig

MAX_EXPERTS = 4096  # more than any real model has


def name_in_file(name: str, module_names: Mapping[str, str], layer_prefix: str) -> str:
    """Return a file's name for one of minillm's tensors.

    Parameters
    ----------
    name : minillm's name, such as `layers.3.attention.q.weight`
    module_names : minillm's module name -> the file's; `{}` is the number of an expert
    layer_prefix : the part of the file's names before the layer number
    """
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if not layer:
        return f"{module_names[module]}.{kind}"
    expert = re.search(r"(?<=experts\.)\d+", layer[2])
    part = layer[2].replace(expert[0], "{}") if expert else layer[2]
    return f"{layer_prefix}{layer[1]}.{module_names[part].format(expert and expert[0])}.{kind}"


def check_layers(num_layers: int, num_tensors: int, source: str) -> int:
    """Return `num_layers`, or raise CheckpointError if there are more layers than tensors in the file."""
    if num_layers > num_tensors:
        raise CheckpointError(f"{source}: claims {num_layers:,} layers but holds only {num_tensors:,} tensors")
    return num_layers


def check_config(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError if the fields of the config contradict each other."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} query heads cannot be divided evenly among {config.num_kv_heads} "
            "key/value heads"
        )
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if not config.learned_positions and (rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim):
        name = "head_dim" if config.rotary_dim is None else "the rotary dimension"
        raise CheckpointError(
            f"{source}: {name} is {rotary_dim}, expected an even number of at most {config.head_dim}, "
            "because rotary embeddings rotate pairs"
        )
    factors = config.rope_scaling.factors if config.rope_scaling else ()
    if factors and len(factors) != rotary_dim // 2:
        raise CheckpointError(
            f"{source}: {len(factors)} factors for rotary frequencies, expected {rotary_dim // 2}, one per pair"
        )
    if not config.experts_per_token <= config.num_experts <= MAX_EXPERTS:
        raise CheckpointError(
            f"{source}: a token uses {config.experts_per_token:,} of {config.num_experts:,} experts; expected no more "
            f"experts than there are, and at most {MAX_EXPERTS:,} in total"
        )


def match_tensors(
    config: ModelConfig,
    found: dict[str, StoredTensor],
    file_name: Callable[[str], str],
    ignored: Iterable[str],
    source: str,
) -> dict[str, StoredTensor]:
    """Return the tensors of a file under minillm's names. The model must use every tensor.

    Parameters
    ----------
    config : determines the names and shapes of the model's tensors
    found : the file's tensors under the file's names
    file_name : converts minillm's name for a tensor to the file's
    ignored : the file's names of tensors that the model may leave unused
    source : the file or folder, as error messages name it

    Raises
    ------
    CheckpointError
        A tensor is missing or has the wrong shape.
    UnsupportedError
        The file has tensors that the model does not use.
    """
    shapes = config.tensor_shapes()
    names_in: dict[str, list[str]] = {}  # name in the file -> the model's tensors that are concatenated in it
    for name in shapes:
        names_in.setdefault(file_name(name), []).append(name)
    matched = {}
    for stored_name, names in names_in.items():
        outputs = [shapes[name][0] for name in names]
        shape = (sum(outputs), *shapes[names[0]][1:])
        tensor = found.get(stored_name)
        if tensor is None:
            raise CheckpointError(f"{source}: tensor {stored_name!r} is missing, expected shape {list(shape)}")
        if tensor.shape == (len(names), *shapes[names[0]]):  # stacked matrices have the same bytes as concatenated ones
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{source}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"expected {list(shape)} according to the config (outputs first)"
            )
        if len(shape) == 1 and tensor.storage.is_quantized:
            raise UnsupportedError(
                f"{source}: tensor {tensor.name!r} is a vector stored as {tensor.storage.name}, expected floats"
            )
        for name, stop in zip(names, accumulate(outputs), strict=True):
            matched[name] = tensor.outputs(stop - shapes[name][0], stop)
    unused = sorted(found.keys() - names_in.keys() - set(ignored))
    if unused:
        raise UnsupportedError(
            f"{source}: unknown tensor {unused[0]!r} ({len(unused)} unknown in total); the config describes a model "
            "without it, so ignoring it would change the results"
        )
    return {name: matched[name] for name in shapes}
