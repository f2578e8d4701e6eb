"""The rotary settings of a config.json, in the many ways they have been written.

One section `rope_parameters` since transformers 5; `rope_theta` beside a section `rope_scaling` before, in which the
kind was first called `type` and then `rope_type`.
"""

from __future__ import annotations

from typing import Any

from minillm.checkpoints.fields import Fields
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import RopeScaling
from minillm.model.rope import longrope_attention_factor, yarn_attention_factor


def read_rope(fields: Fields, default_theta: float = 10000.0) -> dict[str, Any]:
    """ModelConfig's `rope_theta` and `rope_scaling`."""
    rope = rope_section(fields)
    nested = sorted(name for name, value in rope.values.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedError(
            f"{rope.where}: has a section {nested[0]!r:.60}; of this architecture only one way of turning for all "
            "layers is implemented"
        )
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"{section.where}: partial_rotary_factor is {section.number('partial_rotary_factor')}; "
                "of this architecture only rotating whole heads is implemented"
            )
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", default_theta)
    return {"rope_theta": theta, "rope_scaling": read_scaling(rope, fields.integer("max_position_embeddings"))}


def read_two_ropes(fields: Fields) -> dict[str, Any]:
    """The same of models whose layers with a window turn at a pace of their own, never scaled.

    Written as a section for each kind of layer; or for all others as ever, and a field `rope_local_base_freq`.
    """
    both = fields.section("rope_parameters")
    unknown = sorted(both.values.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(
            f"{both.where}: has {unknown[0]!r:.60}; implemented are 'full_attention' and 'sliding_attention', "
            "a section each"
        )
    rope, own = both.section("full_attention"), both.section("sliding_attention")
    if not rope.values:
        rope = fields.section("rope_scaling")
    if own.text("rope_type", "default") != "default":
        raise UnsupportedError(
            f"{own.where}: rope_type is {own.text('rope_type')!r:.60}; 'default' is implemented where a window is"
        )
    return {
        "rope_theta": rope.number("rope_theta", None) or fields.number("rope_theta", 1e6),
        "rope_scaling": read_scaling(rope, fields.integer("max_position_embeddings")),
        "window_rope_theta": own.number("rope_theta", None) or fields.number("rope_local_base_freq", 1e4),
    }


def read_partial_rope(fields: Fields) -> dict[str, Any]:
    """The same of Phi-3, which may turn a part of each head, and has two lists of factors, for short and long texts.

    Only texts within the context that the short factors are for can be computed: beyond, all keys so far would have to
    be turned anew, and a text would no longer give the same bits however it was cut.
    """
    rope = rope_section(fields)
    context_length = fields.integer("max_position_embeddings")
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    part = rope.number("partial_rotary_factor", None) or fields.number("partial_rotary_factor", 1.0)
    settings = {
        "rope_theta": rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0),
        "rotary_dim": int(fields.integer("head_dim", head_dim) * part) if part != 1 else None,
    }
    kind = rope.text("rope_type", rope.get("type", "default"))
    if kind == "default":
        return settings
    if kind not in ("longrope", "su", "yarn"):  # its older names
        raise UnsupportedError(f"{rope.where}: rope_type is {kind!r:.60}; implemented are 'default' and 'longrope'")
    original = fields.integer("original_max_position_embeddings")
    factor = rope.number("factor", None) or context_length / original
    scaling = RopeScaling(
        "per_frequency",
        1.0,
        factors=_factors(rope, "short_factor"),
        attention_factor=rope.number("attention_factor", None) or longrope_attention_factor(factor, original),
    )
    return settings | {"rope_scaling": scaling, "context_length": min(context_length, original)}


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    factors = rope.get(name)
    if not isinstance(factors, list) or not factors:
        raise rope.wrong(name, factors, "a list of positive numbers")
    return tuple(Fields({name: factor}, rope.where).number(name) for factor in factors)


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
    attention_factor = yarn_attention_factor(factor)
    if weight and weight_of_all:
        attention_factor = yarn_attention_factor(factor, weight) / yarn_attention_factor(factor, weight_of_all)
    scaling = RopeScaling(
        "yarn",
        factor,
        original_context_length=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        whole_pairs=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", None) or attention_factor,
    )
    _check_order(rope, "beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast)
    return scaling


def _check_order(rope: Fields, low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise CheckpointError(f"{rope.where}: {low_name} is {low}, wanted less than {high_name}, {high}")


SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
