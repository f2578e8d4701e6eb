"""Read the sampling settings that a model's authors recommend, from `generation_config.json` or GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.checkpoints.fields import Fields, parse_json
from minillm.checkpoints.safetensors import read_file

FILE = "generation_config.json"
# The names come from `SamplingParams`, which also checks the ranges. This module only checks that values are numbers.
RANDOM_SAMPLING = ("temperature", "top_p", "min_p")
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def sampling_from_folder(folder: Path) -> dict[str, Any]:
    """Return the settings in the folder's `generation_config.json`, or none if there is no such file.

    As in transformers, the settings of random sampling apply only if `do_sample` is true.

    Raises
    ------
    CheckpointError
        A field is not a number.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    fields = Fields(parse_json(read_file(path), str(path)), str(path))
    return _sampling(fields, do_sample=fields.flag("do_sample", False))


def sampling_from_gguf(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings in the keys `general.sampling.*`, which few files have."""
    return _sampling(Fields(metadata, source, "general.sampling.", GGUF_NAMES), do_sample=True)


def _sampling(fields: Fields, *, do_sample: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"repetition_penalty": fields.number("repetition_penalty", None)}
    if do_sample:
        found |= {name: _number_or_zero(fields, name) for name in RANDOM_SAMPLING}
        found["top_k"] = 0 if fields.get("top_k", None) == 0 else fields.integer("top_k", None)
    return {name: value for name, value in found.items() if value is not None}


def _number_or_zero(fields: Fields, name: str) -> float | None:
    return 0.0 if fields.get(name, None) == 0 else fields.number(name, None)
