"""The rotary settings of a config.json, in the many ways they have been written.

One section `rope_parameters` since transformers 5; `rope_theta` beside a section `rope_scaling` before, in which the
kind was first called `type` and then `rope_type`.
"""

from __future__ import annotations

from typing import Any

from minillm.checkpoints.fields import Fields
from minillm.config import RopeScaling
from minillm.errors import CheckpointError, UnsupportedError
from minillm.rope import yarn_magnitude


def read_rope(fields: Fields, default_theta: float = 10000.0) -> dict[str, Any]:
    """ModelConfig's `rope_theta` and `rope_scaling`."""
    rope = rope_section(fields)
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"{section.where}: partial_rotary_factor is {section.number('partial_rotary_factor')}; "
                "of this architecture only rotating whole heads is implemented"
            )
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", default_theta)
    return {"rope_theta": theta, "rope_scaling": read_scaling(rope, fields.integer("max_position_embeddings"))}


def rope_section(fields: Fields) -> Fields:
    """The section that says how frequencies are scaled, or one without fields."""
    section = fields.section("rope_scaling")
    return section if section.values else fields.section("rope_parameters")


def read_scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    """The scaling that a section describes, of a model made for `context_length` positions."""
    kind = rope.text("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        raise UnsupportedError(
            f"{rope.where}: rope_type is {kind!r:.60}; implemented are {', '.join(map(repr, SCALINGS))}"
        )
    return SCALINGS[kind](rope, context_length)


def _default(rope: Fields, context_length: int) -> None:
    return None


def _dynamic(rope: Fields, context_length: int) -> None:
    """Sets in beyond the model's context, and no text here goes there: see `RopeScaling`."""
    rope.number("factor")


def _linear(rope: Fields, context_length: int) -> RopeScaling:
    return RopeScaling("linear", rope.number("factor"))


def _llama3(rope: Fields, context_length: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.integer("original_max_position_embeddings", context_length),
    )
    _check_order(rope, "low_freq_factor", scaling.low_freq_factor, "high_freq_factor", scaling.high_freq_factor)
    return scaling


def _yarn(rope: Fields, context_length: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", context_length)
    factor = rope.number("factor", None) or context_length / original
    weight, weight_of_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    magnitude = yarn_magnitude(factor)
    if weight and weight_of_all:
        magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_of_all)
    scaling = RopeScaling(
        "yarn",
        factor,
        original_context_length=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        whole_pairs=rope.flag("truncate", True),
        magnitude=rope.number("attention_factor", None) or magnitude,
    )
    _check_order(rope, "beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast)
    return scaling


def _check_order(rope: Fields, low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise CheckpointError(f"{rope.where}: {low_name} is {low}, wanted less than {high_name}, {high}")


SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
