"""How a model's makers recommend to sample from it: `generation_config.json` of a folder, or keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.checkpoints.fields import Fields, parse_json
from minillm.checkpoints.safetensors import read_whole

FILE = "generation_config.json"
# By the names of `SamplingParams`; what these mean is checked there, here only that they are numbers.
DRAWING = ("temperature", "top_p", "min_p")
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def recommended_by_folder(folder: Path) -> dict[str, float]:
    """What the folder's `generation_config.json` says; nothing where there is none.

    How to draw counts only where the file says that tokens are drawn at all (`do_sample`), as in transformers.
    CheckpointError for a field that is no number.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    fields = Fields(parse_json(read_whole(path), str(path)), str(path))
    return _numbers(fields, draws=fields.flag("do_sample", False))


def recommended_by_gguf(metadata: Mapping[str, Any], where: str) -> dict[str, float]:
    """What the keys `general.sampling.*` say; few files have any."""
    return _numbers(Fields(metadata, where, "general.sampling.", GGUF_NAMES), draws=True)


def _numbers(fields: Fields, *, draws: bool) -> dict[str, float]:
    found = {"repetition_penalty": fields.number("repetition_penalty", None)}
    if draws:
        found |= {name: _number_or_zero(fields, name) for name in DRAWING}
        found["top_k"] = 0 if fields.get("top_k", None) == 0 else fields.integer("top_k", None)
    return {name: value for name, value in found.items() if value is not None}


def _number_or_zero(fields: Fields, name: str) -> float | None:
    return 0.0 if fields.get(name, None) == 0 else fields.number(name, None)
