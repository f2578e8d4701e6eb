"""Models in GGUF files: equal to the same models in folders, and refused if metadata and tensors disagree."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType, GGUFValue, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import READ_ONLY_TYPES, TINY, random_llama, random_model, storage_for, write_gguf, write_hf_folder
from support.gguf_files import read_values

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.gguf_architectures import ARCHITECTURES
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES

file_name = ARCHITECTURES["llama"].file_name


@settings(max_examples=15, deadline=None)
@given(
    options=st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(1, 3),
            "head_dim": st.sampled_from([None, 2, 6, 16, 32]),
            "hidden_size": st.sampled_from([32, 48, 64]),
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
            "rope_parameters": st.sampled_from(
                [
                    {"rope_type": "default", "rope_theta": 1e4},
                    {"rope_type": "default", "rope_theta": 123456.7},
                    {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.5},
                ]
            ),
        }
    ),
    heads=st.sampled_from([(4, 4), (4, 2), (2, 1), (8, 2)]),
    storage=st.sampled_from(sorted(STORAGE_TYPES.keys() - READ_ONLY_TYPES)),
)
def test_both_formats_hold_the_same_model(options, heads, storage):
    with tempfile.TemporaryDirectory() as folder:
        hf_path, model = write_hf_folder(
            Path(folder, "hf"), num_attention_heads=heads[0], num_key_value_heads=heads[1], **options
        )
        hf = open_checkpoint(hf_path)
        file = open_checkpoint(write_gguf(Path(folder, "m.gguf"), model, storage))
        assert file.config == hf.config
        assert list(file.tensors) == list(hf.tensors) == list(hf.config.tensor_shapes())
        for name, shape in hf.config.tensor_shapes().items():
            values = hf.tensors[name].read()
            kind = storage_for(shape, storage)
            # rows are quantized independently, so that their order does not matter
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            assert file.tensors[name].shape == values.shape == shape
            np.testing.assert_array_equal(read_values(file.tensors[name]), expected)


def test_llama3_scaling_is_stored_as_one_factor_per_frequency(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(rope_parameters=rope)))
    scaling = file.config.rope_scaling
    assert scaling.kind == "per_frequency"
    assert len(scaling.factors) == file.config.head_dim // 2
    assert min(scaling.factors) == 1.0
    assert max(scaling.factors) == 8.0
    assert list(scaling.factors) == sorted(scaling.factors)


def test_the_two_attention_factors_are_multiplied(tmp_path):
    def edit(writer):
        writer.add_rope_scaling_attn_factors(1.5)
        set_key("llama.rope.scaling.yarn_attn_factor", 2.0, FLOAT)(writer)

    scaling = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(), edit=edit)).config.rope_scaling
    assert scaling.attention_factor == 3.0


@pytest.mark.parametrize("kind", ["none", "linear", "yarn"])
def test_every_scaling_may_have_an_attention_factor(kind, tmp_path):
    def edit(writer):
        writer.add_rope_scaling_attn_factors(1.5)
        set_key("llama.rope.scaling.type", kind, TEXT)(writer)
        if kind != "none":
            writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    scaling = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(), edit=edit)).config.rope_scaling
    assert scaling.kind == ("yarn" if kind == "yarn" else "linear")
    assert scaling.factor == (1.0 if kind == "none" else 4.0)
    assert scaling.attention_factor == pytest.approx(1.5 * (1 + 0.1 * np.log(4)) if kind == "yarn" else 1.5)


def test_the_tokenizer_is_loaded_once_and_is_equal_in_both_formats(tmp_path):
    hf_path, model = write_hf_folder(tmp_path / "hf", with_tokenizer=True)
    hf = open_checkpoint(hf_path)
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, with_tokenizer=True))
    assert file.tokenizer.encode("hello, 12 añós") == hf.tokenizer.encode("hello, 12 añós")
    assert file.tokenizer is file.tokenizer
    assert open_checkpoint(write_gguf(tmp_path / "none.gguf", model)).tokenizer is None
    (hf_path / "tokenizer.json").unlink()
    assert open_checkpoint(hf_path).tokenizer is None


def test_a_tokenizer_with_more_tokens_than_embedding_rows_is_refused(tmp_path):
    hf_path, model = write_hf_folder(tmp_path / "hf", with_tokenizer=True, vocab_size=261)
    for path in (hf_path, write_gguf(tmp_path / "m.gguf", model, with_tokenizer=True)):
        checkpoint = open_checkpoint(path)
        with pytest.raises(CheckpointError, match="tokenizer has 262 tokens but the embedding matrix only 261 rows"):
            _ = checkpoint.tokenizer


# ---- invalid models


def set_key(name: str, value, kind=GGUFValueType.UINT32):
    """Return an edit that sets the metadata key `name`, or removes it if `value` is None."""

    def edit(writer):
        if value is None:
            del writer.kv_data[0][name]
        else:
            writer.kv_data[0][name] = GGUFValue(value, kind, GGUFValueType.UINT32)

    return edit


def add_tensor(name: str, values: np.ndarray):
    return lambda writer: writer.add_tensor(name, np.asarray(values, np.float32))


def remove_tensors(*names: str):
    return lambda writer: [writer.tensors[0].pop(name) for name in names]


def replace_tensor(name: str, values: np.ndarray):
    return lambda writer: (writer.tensors[0].pop(name), writer.add_tensor(name, values))


FLOAT, TEXT, FLAG, LIST = GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.BOOL, GGUFValueType.ARRAY
BIASES = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}


def add_biases(*parts: str, layers=range(2)):
    return lambda writer: [
        writer.add_tensor(f"blk.{layer}.{part}.bias", np.zeros(BIASES.get(part, 96), np.float32))
        for layer in layers
        for part in parts
    ]


CONTRADICTIONS = {
    r"'llama.expert_used_count' is missing": set_key("llama.expert_count", 8),
    r"a token uses 9 of 8 experts": lambda writer: (
        set_key("llama.expert_count", 8)(writer),
        set_key("llama.expert_used_count", 9)(writer),
    ),
    r"'blk.0.ffn_gate_inp.weight' is missing": lambda writer: (
        set_key("llama.expert_count", 8)(writer),
        set_key("llama.expert_used_count", 2)(writer),
    ),
    **{
        f"field 'llama.{name}' is missing": set_key(f"llama.{name}", None)
        for name in (
            "context_length",
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "attention.head_count",
            "attention.layer_norm_rms_epsilon",
        )
    },
    r"'llama.block_count' is 0 \(int\), expected an integer from 1": set_key("llama.block_count", 0),
    r"'llama.block_count' is -2": set_key("llama.block_count", -2, GGUFValueType.INT32),
    r"'llama.block_count' is 2.0 \(float\)": set_key("llama.block_count", 2.0, FLOAT),
    r"'llama.block_count' is True \(bool\)": set_key("llama.block_count", True, FLAG),
    r"'llama.embedding_length' is '64' \(str\)": set_key("llama.embedding_length", "64", TEXT),
    r"'llama.embedding_length' is 4294967295": set_key("llama.embedding_length", 2**32 - 1),
    r"claims 2,147,483,647 layers but holds only 21 tensors": set_key("llama.block_count", 2**31 - 1),
    r"'blk.2.attn_norm.weight' is missing": set_key("llama.block_count", 3),
    r"4 query heads cannot be divided evenly among 3 key/value heads": set_key("llama.attention.head_count_kv", 3),
    r"'llama.rope.freq_base' is nan": set_key("llama.rope.freq_base", float("nan"), FLOAT),
    r"'llama.rope.freq_base' is inf": set_key("llama.rope.freq_base", float("inf"), FLOAT),
    r"'llama.attention.layer_norm_rms_epsilon' is 0.0": set_key("llama.attention.layer_norm_rms_epsilon", 0.0, FLOAT),
    r"'token_embd.weight' has shape \[288, 64\], expected \[289, 64\]": set_key("llama.vocab_size", 289),
    r"'blk.0.ffn_gate.weight' has shape \[96, 64\], expected \[97, 64\]": set_key("llama.feed_forward_length", 97),
    r"'output_norm.weight' is missing, expected shape \[64\]": remove_tensors("output_norm.weight"),
    r"'blk.1.attn_norm.weight' has shape \[64, 1\]": replace_tensor(
        "blk.1.attn_norm.weight", np.ones((64, 1), np.float32)
    ),
    r"'blk.0.attn_k.weight' has shape \[64, 32\], expected \[32, 64\] according to the config": replace_tensor(
        "blk.0.attn_k.weight", np.ones((64, 32), np.float32)
    ),
    r"'blk.1.attn_q.bias' is missing": add_biases(*BIASES, layers=[0]),
    r"'blk.0.ffn_up.bias' is missing": add_biases("ffn_gate"),
    r"'llama.rope.scaling.original_context_length' is missing": set_key("llama.rope.scaling.type", "yarn", TEXT),
    r"7 factors for rotary frequencies, expected 8": add_tensor("rope_freqs.weight", np.ones(7)),
    r"'rope_freqs.weight' is F32 of shape \[8, 1\], expected an F32 vector": add_tensor(
        "rope_freqs.weight", np.ones((8, 1))
    ),
    r"'rope_freqs.weight' holds a value that is not positive": add_tensor(
        "rope_freqs.weight", [1, 1, 1, 1, 1, 1, 1, np.nan]
    ),
}
UNSUPPORTED = {
    r"the architecture is 'mamba'; implemented: 'llama'": set_key("general.architecture", "mamba", TEXT),
    r"'llama.expert_gating_func' is 2": set_key("llama.expert_gating_func", 2),
    r"'llama.attention.sliding_window' is 128": set_key("llama.attention.sliding_window", 128),
    r"'llama.attention.head_count' varies by layer": set_key("llama.attention.head_count", [4, 2], LIST),
    r"'llama.attention.causal' is False; only True": set_key("llama.attention.causal", False, FLAG),
    r"'llama.rope.scaling.yarn_ext_factor' is 0.0; only 1.0": set_key("llama.rope.scaling.yarn_ext_factor", 0.0, FLOAT),
    r"'llama.attention.value_length' is 8": set_key("llama.attention.value_length", 8),
    r"'llama.rope.dimension_count' is 8": set_key("llama.rope.dimension_count", 8),
    r"'llama.rope.scaling.type' is 'longrope'": set_key("llama.rope.scaling.type", "longrope", TEXT),
    r"unknown tensor 'blk.0.attn_q_norm.weight'": add_tensor("blk.0.attn_q_norm.weight", np.ones(16)),
    r"unknown tensor 'blk.7.attn_norm.weight'": add_tensor("blk.7.attn_norm.weight", np.ones(64)),
    r"unknown tensor 'blk.bias'": add_tensor("blk.bias", np.ones(64)),
    r"'output_norm.weight' is a vector stored as Q8_0": lambda writer: (
        writer.tensors[0].pop("output_norm.weight"),
        writer.add_tensor("output_norm.weight", np.zeros(68, np.uint8), raw_dtype=GGMLQuantizationType.Q8_0),
    ),
    r"linear rope scaling combined with": lambda writer: (
        set_key("llama.rope.scaling.factor", 2.0, FLOAT)(writer),
        add_tensor("rope_freqs.weight", np.ones(8))(writer),
    ),
}
HARMLESS = {
    "no experts": set_key("llama.expert_count", 0),
    "experts used without experts": set_key("llama.expert_used_count", 0),
    "original context length": set_key("llama.rope.scaling.original_context_length", 64),
    "rotary buffer": add_tensor("blk.0.attn_rot_embd.weight", np.ones(8)),
    "no vocab_size": set_key("llama.vocab_size", None),
    "no key_length": set_key("llama.attention.key_length", None),
    "causal": set_key("llama.attention.causal", True, FLAG),
    "as many heads in every layer": set_key("llama.attention.head_count_kv", [2, 2], LIST),
    "factor of one": set_key("llama.rope.scaling.yarn_attn_factor", 1.0, FLOAT),
    "scaling none": set_key("llama.rope.scaling.type", "none", TEXT),
}


@pytest.fixture(scope="module")
def tiny():
    return random_llama()


def test_a_window_of_zero_means_no_window(tmp_path):
    model = random_model(transformers.Phi3Config(**TINY | {"head_dim": 16}, pad_token_id=0))

    def add_window(writer):
        writer.kv_data[0]["phi3.attention.sliding_window"] = GGUFValue(0, GGUFValueType.UINT32)

    config = open_checkpoint(write_gguf(tmp_path / "phi4.gguf", model, edit=add_window)).config
    assert (config.sliding_window, config.window_layers) == (None, ())


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_refused(message, tiny, tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", tiny, edit=CONTRADICTIONS[message])
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(path)
    assert "bad.gguf" in str(raised.value)


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_models_are_refused(message, tiny, tmp_path):
    path = write_gguf(tmp_path / "more.gguf", tiny, edit=UNSUPPORTED[message])
    with pytest.raises(UnsupportedError, match=message) as raised:
        open_checkpoint(path)
    assert "more.gguf" in str(raised.value)


@pytest.mark.parametrize("case", HARMLESS)
def test_keys_and_tensors_without_effect_are_ignored(case, tiny, tmp_path):
    plain = open_checkpoint(write_gguf(tmp_path / "plain.gguf", tiny))
    edited = open_checkpoint(write_gguf(tmp_path / "edited.gguf", tiny, edit=HARMLESS[case]))
    assert edited.config == plain.config
    assert edited.tensors.keys() == plain.tensors.keys()


def test_every_tensor_has_a_distinct_name_in_the_file(tiny, tmp_path):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny)).config
    names = [file_name(name) for name in config.tensor_shapes()]
    assert len(set(names)) == len(names)
    assert config.vocab_size == TINY["vocab_size"]
