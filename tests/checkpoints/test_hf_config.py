"""The fields of a Hugging Face `config.json`: read as transformers reads them, and refused if they are invalid."""

from __future__ import annotations

import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import edit_json

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_models import read_config
from minillm.errors import CheckpointError, UnsupportedError

ROPE = {  # type of scaling -> its fields
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


@settings(max_examples=60)
@given(
    heads=st.sampled_from([(4, 4), (8, 2), (6, 3), (4, None)]),
    head_dim=st.sampled_from([None, 16, 30]),
    theta=st.sampled_from([None, 10000, 5e5]),
    rope=st.sampled_from(sorted(ROPE)),
    form=st.sampled_from(["rope_parameters", "rope_scaling", "type"]),
    flags=st.fixed_dictionaries(
        {}, optional={name: st.booleans() for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")}
    ),
)
def test_a_config_equals_the_one_that_transformers_reads(heads, head_dim, theta, rope, form, flags):
    """The rotary settings are in their old or new form, and any optional field may be missing."""
    scaling = {("type" if form == "type" else "rope_type"): rope} | ROPE[rope]
    written = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        **flags,
    }
    if theta is not None and form == "rope_parameters":
        scaling["rope_theta"] = theta
    elif theta is not None:
        written["rope_theta"] = theta
    written["rope_parameters" if form == "rope_parameters" else "rope_scaling"] = scaling
    ours = read_config(Fields(json.loads(json.dumps(written)), "config.json"))
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps(written)))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.attention_bias, ours.mlp_bias) == (theirs.attention_bias, theirs.mlp_bias)
    assert ours.output_bias == theirs.attention_bias
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    if rope == "default":
        assert ours.rope_scaling is None
        return
    assert ours.rope_scaling.kind == rope
    ours_by_name = {"original_max_position_embeddings": ours.rope_scaling.original_context_length}
    for name in ROPE[rope]:
        assert ours_by_name.get(name, getattr(ours.rope_scaling, name, None)) == theirs.rope_parameters[name]


# ---- invalid fields

INVALID_FIELDS = [
    *((name, ..., "is missing") for name in ("vocab_size", "hidden_size", "num_hidden_layers", "model_type")),
    ("hidden_size", "64", r"is '64' \(str\), expected an integer from 1"),
    ("hidden_size", 64.0, r"is 64.0 \(float\)"),
    ("hidden_size", [64], r"is \[64\] \(list\)"),
    ("hidden_size", True, r"is True \(bool\)"),
    ("hidden_size", 0, r"is 0 \(int\)"),
    ("hidden_size", -64, r"is -64"),
    ("hidden_size", 2**63, r"is 9223372036854775808"),
    ("hidden_size", 10**4000, r"is 1000"),
    ("num_hidden_layers", 2**31 - 1, r"claims 2,147,483,647 layers but holds only 21 tensors"),
    ("num_hidden_layers", 3, r"'model.layers.2.input_layernorm.weight' is missing"),
    ("num_key_value_heads", 3, r"4 query heads cannot be divided evenly among 3"),
    ("num_key_value_heads", 4, r"'model.layers.0.self_attn.k_proj.weight' has shape \[32, 64\], expected \[64, 64\]"),
    ("head_dim", 15, r"head_dim is 15, expected an even number"),
    ("vocab_size", 289, r"'model.embed_tokens.weight' has shape \[288, 64\], expected \[289, 64\]"),
    ("rms_norm_eps", float("nan"), r"is nan \(float\), expected a positive finite number"),
    ("rms_norm_eps", float("inf"), r"is inf"),
    ("rms_norm_eps", -1e-6, r"is -1e-06"),
    ("rms_norm_eps", 10**400, r"is 1000"),
    ("rms_norm_eps", False, r"is False \(bool\)"),
    ("attention_bias", 1, r"is 1 \(int\), expected true or false"),
    ("attention_bias", True, r"'model.layers.0.self_attn.q_proj.bias' is missing"),
    ("tie_word_embeddings", "yes", r"is 'yes' \(str\), expected true or false"),
    ("model_type", 3, r"is 3 \(int\), expected a string"),
    ("rope_parameters", [], r"is \[\] \(list\), expected an object"),
    ("rope_parameters", {"rope_type": "linear"}, r"'rope_parameters': field 'factor' is missing"),
    ("rope_parameters", {"rope_type": "linear", "factor": "2"}, r"field 'factor' is '2'"),
    ("rope_parameters", {"rope_type": 1}, r"field 'rope_type' is 1"),
    (
        "rope_parameters",
        {"rope_type": "llama3"} | ROPE["llama3"] | {"low_freq_factor": 4.0},
        r"low_freq_factor is 4.0, expected less than high_freq_factor, 4.0",
    ),
    ("rope_parameters", {"rope_type": "dynamic"}, r"'rope_parameters': field 'factor' is missing"),
    (
        "rope_parameters",
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1},
        r"beta_slow is 1.0, expected less than beta_fast, 1.0",
    ),
]


@pytest.mark.parametrize(("field", "value", "message"), INVALID_FIELDS)
def test_invalid_fields_are_refused(field, value, message, hf_folder):
    edit_json(hf_folder / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(hf_folder)
    assert str(hf_folder) in str(raised.value)


def test_head_dim_is_required_if_the_hidden_size_is_not_a_multiple_of_the_heads(hf_folder):
    edit_json(hf_folder / "config.json", head_dim=None, hidden_size=65)
    with pytest.raises(CheckpointError, match="hidden_size 65 is not a multiple of num_attention_heads 4"):
        open_checkpoint(hf_folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "mamba", r"model_type is 'mamba'; implemented: 'llama'"),
        ("hidden_act", "gelu", r"hidden_act is 'gelu'; only 'silu' is implemented"),
        ("quantization_config", {"bits": 4}, r"quantization_config is set"),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}, r"rope_type is 'longrope'; implemented: 'default'"),
        ("rope_parameters", {"rope_type": "proportional"}, r"rope_type is 'proportional'"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ("partial_rotary_factor", 0.25, r"partial_rotary_factor is 0.25"),
    ],
)
def test_unsupported_settings_are_refused(field, value, message, hf_folder):
    edit_json(hf_folder / "config.json", **{field: value})
    with pytest.raises(UnsupportedError, match=message) as raised:
        open_checkpoint(hf_folder)
    assert str(hf_folder) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the file is empty"),
        (b"{", r"not valid JSON"),
        (b"\xff{}", r"not UTF-8 at byte 0"),
        (b"[1]", r"holds a JSON list, expected an object"),
        (b"[" * 100_000, r"nested deeper than"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", r"not valid JSON.*digits"),
        (b'{"a": 1, "b": 2, "a": 3}', r"key 'a' appears twice"),
    ],
)
def test_malformed_json_is_refused(content, message, hf_folder):
    (hf_folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(hf_folder)
    assert "config.json" in str(raised.value)
