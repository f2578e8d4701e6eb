"""The rotary settings of a `config.json`, in every place and spelling: the frequencies equal those of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_models import read_config
from minillm.model.rope import rope_frequencies

SCALINGS = {  # type of scaling -> its required fields and its optional ones, with values to draw from
    "default": ({}, {}),
    "linear": ({"factor": 4.0}, {}),
    "llama3": ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
    "yarn": (
        {"factor": 4.0},
        {
            "beta_fast": [32.0, 16, 0, None],
            "beta_slow": [1.0, 2, 0, None],
            "mscale": [0, 0.7, 1.0, None],
            "mscale_all_dim": [0, 0.5, 1.0, None],
            "attention_factor": [1.2, None],
            "truncate": [True, False],
        },
    ),
}
LENGTHS = st.sampled_from([None, 512, 1024])


@st.composite
def configs(draw):
    kind = draw(st.sampled_from(sorted(SCALINGS)))
    required, optional = SCALINGS[kind]
    section = {draw(st.sampled_from(["type", "rope_type"])): kind} | required
    for name, values in optional.items():
        if draw(st.booleans()):
            section[name] = draw(st.sampled_from(values))
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    for place in (config, section):
        if (length := draw(LENGTHS)) is not None:
            place["original_max_position_embeddings"] = length
        if draw(st.booleans()):
            place["rope_theta"] = draw(st.sampled_from([1e4, 5e5]))
    return config | {draw(st.sampled_from(["rope_scaling", "rope_parameters"])): section}


@settings(max_examples=200)
@given(config=configs())
def test_frequencies_equal_those_of_transformers(config):
    ours = read_config(Fields(json.loads(json.dumps(config)), "config.json"))
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(json.loads(json.dumps(config))))
    frequencies = rope_frequencies(ours.head_dim, ours.rope_theta, ours.rope_scaling)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=1e-5)
    attention_factor = ours.rope_scaling.attention_factor if ours.rope_scaling else 1.0
    assert attention_factor == pytest.approx(theirs.attention_scaling)
