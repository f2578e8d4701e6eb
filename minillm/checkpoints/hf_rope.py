"""Read the settings of rotary position embeddings from `config.json`, in every form that transformers has used.

Since transformers 5, one section `rope_parameters` holds them. Older versions wrote a field `rope_theta` and a section
`rope_scaling`, which named the type of scaling `rope_type` or, in the oldest form, `type`.
"""

from __future__ import annotations

from typing import Any

from minillm.checkpoints.fields import Fields
from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import RopeScaling
from minillm.model.rope import longrope_attention_factor, yarn_attention_factor

ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_rope(fields: Fields, default_theta: float = 10000.0) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of ModelConfig."""
    rope = rope_section(fields)
    nested = sorted(name for name, value in rope.values.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedError(
            f"{rope.source}: has a section {nested[0]!r:.60}; for this architecture, only the same rotary settings in "
            "all layers are implemented"
        )
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"{section.source}: partial_rotary_factor is {section.number('partial_rotary_factor')}; "
                "for this architecture, only rotating whole heads is implemented"
            )
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", default_theta)
    rope = _with_original_length(rope, fields)
    return {"rope_theta": theta, "rope_scaling": read_scaling(rope, fields.integer("max_position_embeddings"))}


def _with_original_length(rope: Fields, fields: Fields) -> Fields:
    """Return the section with the length of the texts in pretraining. Beside the section, it has precedence.

    Source: `standardize_rope_params` in transformers.
    """
    original = fields.integer(ORIGINAL_LENGTH, None)
    return rope if original is None else Fields({**rope.values, ORIGINAL_LENGTH: original}, rope.source)


def read_two_ropes(fields: Fields) -> dict[str, Any]:
    """Return the rotary settings of a model whose sliding-window layers have their own theta, without scaling.

    `config.json` has one section per type of layer. Older files have the usual section for full-attention layers, and
    a field `rope_local_base_freq` for the theta of sliding-window layers.
    """
    sections = fields.section("rope_parameters")
    unknown = sorted(sections.values.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(
            f"{sections.source}: has {unknown[0]!r:.60}; the implemented sections are "
            "'full_attention' and 'sliding_attention'"
        )
    rope, window_rope = sections.section("full_attention"), sections.section("sliding_attention")
    if not rope.values:
        rope = fields.section("rope_scaling")
    window_kind = window_rope.text("rope_type", "default")
    if window_kind != "default":
        raise UnsupportedError(
            f"{window_rope.source}: rope_type is {window_kind!r:.60}; only 'default' is implemented for sliding windows"
        )
    return {
        "rope_theta": rope.number("rope_theta", None) or fields.number("rope_theta", 1e6),
        "rope_scaling": read_scaling(rope, fields.integer("max_position_embeddings")),
        "window_rope_theta": window_rope.number("rope_theta", None) or fields.number("rope_local_base_freq", 1e4),
    }


def read_partial_rope(fields: Fields) -> dict[str, Any]:
    """Return the rotary settings of Phi-3, which may rotate only a part of each head.

    Phi-3 has two lists of factors, for short and for long texts. minillm limits the context to the range of the short
    factors. To go beyond it, all earlier keys would have to be rotated again, and the result would depend on how the
    text was divided into chunks.
    """
    rope = rope_section(fields)
    context_length = fields.integer("max_position_embeddings")
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    rotary_fraction = rope.number("partial_rotary_factor", None) or fields.number("partial_rotary_factor", 1.0)
    settings = {
        "rope_theta": rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0),
        "rotary_dim": int(fields.integer("head_dim", head_dim) * rotary_fraction) if rotary_fraction != 1 else None,
    }
    kind = rope.text("rope_type", rope.get("type", "default"))
    if kind == "default":
        return settings
    if kind not in ("longrope", "su", "yarn"):  # the last two are older names of longrope
        raise UnsupportedError(
            f"{rope.source}: rope_type is {kind!r:.60}; only 'default' and 'longrope' are implemented"
        )
    original = fields.integer(ORIGINAL_LENGTH)
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
        raise rope.invalid(name, factors, "a list of positive numbers")
    return tuple(Fields({name: factor}, rope.source).number(name) for factor in factors)


def rope_section(fields: Fields) -> Fields:
    """Return the section with the scaling of rotary frequencies, which may be empty."""
    section = fields.section("rope_scaling")
    return section if section.values else fields.section("rope_parameters")


def read_scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    """Return the scaling that a section describes, for a model with `context_length` positions."""
    kind = rope.text("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        raise UnsupportedError(
            f"{rope.source}: rope_type is {kind!r:.60}; implemented: {', '.join(map(repr, SCALINGS))}"
        )
    return SCALINGS[kind](rope, context_length)


def _default(rope: Fields, context_length: int) -> None:
    return None


def _dynamic(rope: Fields, context_length: int) -> None:
    """Return no scaling: it starts beyond the model's context, which minillm never exceeds. See `RopeScaling`."""
    rope.number("factor")  # checked, although unused


def _linear(rope: Fields, context_length: int) -> RopeScaling:
    return RopeScaling("linear", rope.number("factor"))


def _llama3(rope: Fields, context_length: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.integer(ORIGINAL_LENGTH, context_length),
    )
    _check_order(rope, "low_freq_factor", scaling.low_freq_factor, "high_freq_factor", scaling.high_freq_factor)
    return scaling


def _yarn(rope: Fields, context_length: int) -> RopeScaling:
    original = rope.integer(ORIGINAL_LENGTH, context_length)
    factor = rope.number("factor", None) or context_length / original
    mscale, mscale_all_dim = (_nonzero(rope, name, None) for name in ("mscale", "mscale_all_dim"))
    attention_factor = yarn_attention_factor(factor)
    if mscale and mscale_all_dim:
        attention_factor = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    scaling = RopeScaling(
        "yarn",
        factor,
        original_context_length=original,
        beta_fast=_nonzero(rope, "beta_fast", 32.0),
        beta_slow=_nonzero(rope, "beta_slow", 1.0),
        whole_pairs=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", None) or attention_factor,
    )
    _check_order(rope, "beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast)
    return scaling


def _nonzero(rope: Fields, name: str, default: Any) -> Any:
    """Return a number, or the default if it is 0: transformers treats 0 as if the field were missing."""
    return default if rope.get(name, None) == 0 else rope.number(name, default)


def _check_order(rope: Fields, low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise CheckpointError(f"{rope.source}: {low_name} is {low}, expected less than {high_name}, {high}")


SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
