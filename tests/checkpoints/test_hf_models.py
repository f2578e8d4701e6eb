"""Hugging Face folders of architectures other than Llama, each with one invalid field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.builders import TINY, random_model
from support.damage import ANY_JSON, allowed_bytes, edit_json, peak_bytes

from minillm.checkpoints import open_checkpoint
from minillm.errors import CheckpointError, UnsupportedError

SETTINGS = {  # model type -> changes to the settings in `TINY`; the value `...` removes a setting
    "mistral": {},
    "qwen2": {"head_dim": ...},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {"head_dim": ..., "pad_token_id": 0},
    "gpt2": {"n_inner": 96, "head_dim": ..., "intermediate_size": ..., "num_key_value_heads": ...},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16},
}


def write_folder(path: Path, model_type: str) -> Path:
    config = {name: value for name, value in (TINY | SETTINGS[model_type]).items() if value is not ...}
    random_model(transformers.CONFIG_MAPPING[model_type](**config)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "field", "value", "error", "message"),
    [
        ("mistral", "layer_types", ["full_attention"] * 2, UnsupportedError, r"layer_types is \['full_attention'"),
        ("mistral", "sliding_window", 0, CheckpointError, r"'sliding_window' is 0"),
        (
            "qwen2",
            "rope_parameters",
            {"full_attention": {}},
            UnsupportedError,
            r"has a section 'full_attention'; for this",
        ),
        (
            "qwen2",
            "layer_types",
            ["full_attention"],
            CheckpointError,
            r"expected a list of 2 layer types, each 'full_attention' or",
        ),
        (
            "qwen2",
            "layer_types",
            ["full_attention", "chunked"],
            CheckpointError,
            r"'chunked'\] \(list\), expected a list",
        ),
        ("qwen2", "layer_types", ["full_attention", []], CheckpointError, r"expected a list of 2 layer types"),
        (
            "qwen2",
            "layer_types",
            ["full_attention", "sliding_attention"],
            CheckpointError,
            r"layer 1 has sliding-window attention, but sliding_window is turned off by use_sliding_window",
        ),
        (
            "gemma2",
            "sliding_window",
            None,
            CheckpointError,
            r"layer 0 has sliding-window attention, but sliding_window is null",
        ),
        (
            "gemma2",
            "hidden_activation",
            "gelu",
            UnsupportedError,
            r"hidden_activation is 'gelu'; only 'gelu_pytorch_tanh' is",
        ),
        ("gemma2", "query_pre_attn_scalar", 0, CheckpointError, r"'query_pre_attn_scalar' is 0"),
        ("gemma2", "attn_logit_softcapping", -1.0, CheckpointError, r"'attn_logit_softcapping' is -1.0"),
        ("gemma3_text", "attn_logit_softcapping", 50.0, UnsupportedError, r"attn_logit_softcapping is 50.0"),
        ("gemma3_text", "use_bidirectional_attention", True, UnsupportedError, r"use_bidirectional_attention is True"),
        (
            "gemma3_text",
            "rope_parameters",
            {"rope_type": "default"},
            UnsupportedError,
            r"has 'rope_type'; the implemented sections are 'full_attention' and 'sliding_attention'",
        ),
        (
            "gemma3_text",
            "rope_parameters",
            {"sliding_attention": {"rope_type": "linear"}},
            UnsupportedError,
            r"rope_type is 'linear'; only 'default' is implemented for sliding windows",
        ),
        (
            "phi3",
            "rope_parameters",
            {"rope_type": "linear"},
            UnsupportedError,
            r"only 'default' and 'longrope' are implemented",
        ),
        (
            "phi3",
            "rope_parameters",
            {"partial_rotary_factor": 0.35},
            CheckpointError,
            r"the rotary dimension is 5, expected an even",
        ),
        (
            "phi3",
            "rope_parameters",
            {"partial_rotary_factor": 2.0},
            CheckpointError,
            r"the rotary dimension is 32, expected an even",
        ),
        ("phi3", "rope_parameters", {"rope_type": "longrope"}, CheckpointError, r"'short_factor' is missing"),
        ("phi3", "rope_parameters", {"type": "su", "short_factor": 1}, CheckpointError, r"expected a list of positive"),
        (
            "phi3",
            "rope_parameters",
            {"rope_type": "longrope", "short_factor": [1.0, -2.0]},
            CheckpointError,
            r"'short_factor' is -2.0",
        ),
        (
            "phi3",
            "rope_parameters",
            {"rope_type": "longrope", "short_factor": [1.0, 2.0]},
            CheckpointError,
            r"2 factors for rotary frequencies, expected 8, one per pair",
        ),
        ("gpt2", "n_embd", ..., CheckpointError, r"field 'n_embd' is missing"),
        ("gpt2", "n_embd", 65, CheckpointError, r"n_embd 65 is not a multiple of n_head 4"),
        (
            "gpt2",
            "n_positions",
            129,
            CheckpointError,
            r"'transformer.wpe.weight' has shape \[128, 64\], expected \[129",
        ),
        (
            "gpt2",
            "n_inner",
            97,
            CheckpointError,
            r"'transformer.h.0.mlp.c_fc.weight' has shape \[96, 64\], expected \[97",
        ),
        ("gpt2", "activation_function", "relu", UnsupportedError, r"activation_function is 'relu'; only 'gelu_new' is"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, UnsupportedError, r"inverse_layer_idx is True"),
        ("mixtral", "num_experts_per_tok", 5, CheckpointError, r"a token uses 5 of 4 experts"),
        (
            "mixtral",
            "num_local_experts",
            5,
            CheckpointError,
            r"'model.layers.0.block_sparse_moe.gate.weight' has shape",
        ),
        (
            "mixtral",
            "num_local_experts",
            2**30,
            CheckpointError,
            r"a token uses 2 of 1,073,741,824 experts; .* at most 4,096",
        ),
        ("qwen3_moe", "mlp_only_layers", [1], UnsupportedError, r"mlp_only_layers is \[1\]; only \[\] is implemented"),
        ("qwen3_moe", "decoder_sparse_step", 2, UnsupportedError, r"decoder_sparse_step is 2; only 1 is implemented"),
    ],
)
def test_invalid_fields_are_refused(model_type, field, value, error, message, tmp_path):
    path = write_folder(tmp_path / "m", model_type)
    edit_json(path / "config.json", **{field: value})
    with pytest.raises(error, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_a_tied_model_saved_without_its_head_opens(model_type, tmp_path):
    path = write_folder(tmp_path / "m", model_type)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path / "model.safetensors")
    edit_json(path / "config.json", tie_word_embeddings=True)
    whole = {name: tensor.read() for name, tensor in open_checkpoint(path).tensors.items()}
    save_file({name.partition(".")[2]: tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    for name, tensor in open_checkpoint(path).tensors.items():
        np.testing.assert_array_equal(tensor.read(), whole[name])


@pytest.mark.parametrize("model_type", SETTINGS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_config_with_any_values_opens_or_is_refused(model_type, data, tmp_path_factory):
    path = write_folder(tmp_path_factory.mktemp("m"), model_type)
    fields = json.loads((path / "config.json").read_text())
    changed = data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2))
    edit_json(path / "config.json", **{name: data.draw(ANY_JSON) for name in changed})
    assert peak_bytes(path) < allowed_bytes(sum(file.stat().st_size for file in path.iterdir()))
