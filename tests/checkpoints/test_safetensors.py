"""Hugging Face folders against transformers and the safetensors library, and folders that break one rule each."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.builders import write_hf_folder

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_architectures import ARCHITECTURES
from minillm.checkpoints.hf_models import read_config
from minillm.checkpoints.safetensors import read_safetensors
from minillm.errors import CheckpointError, UnsupportedError

file_name = ARCHITECTURES["llama"].file_name
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


# ---- what is read


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_equal_those_transformers_saved(storage, shards, tied, tmp_path):
    path, model = write_hf_folder(
        tmp_path / "m",
        dtype=DTYPES[storage],
        max_shard_size="1GB" if shards == 1 else 80_000,
        tie_word_embeddings=tied,
        attention_bias=True,
        mlp_bias=True,
    )
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shards > 1)
    checkpoint = open_checkpoint(path)
    saved = dict(model.named_parameters())
    assert {file_name(name) for name in checkpoint.tensors} == saved.keys()
    assert checkpoint.tensors.keys() == checkpoint.config.tensor_shapes().keys()
    for name, tensor in checkpoint.tensors.items():
        theirs = saved[file_name(name)]
        assert tensor.shape == tuple(theirs.shape)
        assert tensor.storage.name == storage
        np.testing.assert_array_equal(tensor.data, bits(theirs))
        np.testing.assert_array_equal(tensor.read(), theirs.detach().to(torch.float32).numpy())
        assert not tensor.data.flags.writeable


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    notes=st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("note"), max_size=2),
    seed=st.integers(0, 2**32 - 1),
)
def test_files_equal_what_the_safetensors_library_reads(tensors, notes, seed):
    generator = torch.Generator().manual_seed(seed)
    written = {
        name: torch.randn(shape, generator=generator).to(DTYPES[kind]) for name, (kind, shape) in tensors.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.safetensors")
        save_file(written, path, notes)
        theirs, ours = load_file(path), read_safetensors(path)
        assert ours.keys() == theirs.keys() == written.keys()
        for name, tensor in ours.items():
            assert tensor.shape == tuple(theirs[name].shape)
            np.testing.assert_array_equal(tensor.data, bits(theirs[name]))
            np.testing.assert_array_equal(tensor.read(), theirs[name].to(torch.float32).numpy())


ROPE = {
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
def test_config_says_what_transformers_takes_it_for(heads, head_dim, theta, rope, form, flags):
    """Old and new ways to write the rotary settings, and every field that may be absent."""
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


# ---- what is refused: config.json


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_hf_folder(tmp_path / "m")[0]


def edit_json(path: Path, **changes) -> None:
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


WRONG_FIELDS = [
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


@pytest.mark.parametrize(("field", "value", "message"), WRONG_FIELDS)
def test_wrong_fields_are_refused(field, value, message, folder):
    edit_json(folder / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(folder)
    assert str(folder) in str(raised.value)


def test_heads_that_do_not_divide_the_width_need_a_head_dim(folder):
    edit_json(folder / "config.json", head_dim=None, hidden_size=65)
    with pytest.raises(CheckpointError, match="hidden_size 65 is not a multiple of num_attention_heads 4"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "mamba", r"model_type is 'mamba'; implemented are 'llama'"),
        ("hidden_act", "gelu", r"hidden_act is 'gelu'; only 'silu' is implemented"),
        ("quantization_config", {"bits": 4}, r"quantization_config is set"),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}, r"rope_type is 'longrope'; implemented are 'default'"),
        ("rope_parameters", {"rope_type": "proportional"}, r"rope_type is 'proportional'"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ("partial_rotary_factor", 0.25, r"partial_rotary_factor is 0.25"),
    ],
)
def test_unsupported_settings_are_refused(field, value, message, folder):
    edit_json(folder / "config.json", **{field: value})
    with pytest.raises(UnsupportedError, match=message) as raised:
        open_checkpoint(folder)
    assert str(folder) in str(raised.value)


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
def test_malformed_json_is_refused(content, message, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(folder)
    assert "config.json" in str(raised.value)


# ---- what is refused: tensors


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), CheckpointError, r"'lm_head.weight' is missing, expected shape \[288"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            CheckpointError,
            r"'model.norm.weight' has shape \[63\], expected \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(16)}),
            UnsupportedError,
            r"unknown tensor 'model.layers.1.self_attn.q_norm.weight' \(1 unknown in total\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            UnsupportedError,
            r"unknown tensor 'model.layers.0.self_attn.q_proj.bias'",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
            UnsupportedError,
            r"dtype is 'I64'; dtypes that can be read: F32, F16, BF16",
        ),
    ],
)
def test_wrong_tensors_are_refused(change, error, message, folder):
    rewrite(folder, change)
    with pytest.raises(error, match=message) as raised:
        open_checkpoint(folder)
    assert str(folder) in str(raised.value)


def test_rotary_buffers_of_old_folders_are_left_over_in_peace(folder):
    rewrite(folder, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == checkpoint.config.tensor_shapes().keys()


def test_a_tied_model_may_repeat_its_embedding_as_head_but_no_other_head(tmp_path):
    path, _ = write_hf_folder(tmp_path / "m", tie_word_embeddings=True)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in open_checkpoint(path).tensors
    rewrite(path, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ"):
        open_checkpoint(path)


def entry(dtype="F32", shape=(4,), offsets=(0, 16), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def file_bytes(header, body=bytes(16), *, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


DAMAGED = {
    r"the header needs 9,223,372,036,854,775,808 bytes but \d+ remain": file_bytes({}, length=2**63),
    r"7 bytes are too few for a header": b"1234567",
    r"header: not valid JSON": file_bytes(b"{x"),
    r"key 'x' appears twice": file_bytes(b'{"x": {}, "x": {}}'),
    r"field 'x' is 3 \(int\), expected an object": file_bytes({"x": 3}),
    r"'x': field 'dtype' is missing": file_bytes({"x": {}}),
    r"'x': field 'dtype' is 1": file_bytes({"x": entry(dtype=1)}),
    r"field 'shape' is \[4, -1\]": file_bytes({"x": entry(shape=(4, -1))}),
    r"field 'shape' is \[True\]": file_bytes({"x": entry(shape=(True,))}),
    r"field 'shape' is \[4.0\]": file_bytes({"x": entry(shape=(4.0,))}),
    r"field 'shape' is \[1, 1, 1, 1, 1, 1, \.\.\.\]": file_bytes({"x": entry(shape=(1,) * 99)}),
    r"field 'data_offsets' is \[0\]": file_bytes({"x": entry(offsets=(0,))}),
    r"data_offsets 0..16 span 16 bytes, expected 12 for F32 of shape \[3\]": file_bytes({"x": entry(shape=(3,))}),
    r"data_offsets 16..0 span -16 bytes": file_bytes({"x": entry(offsets=(16, 0))}),
    r"span 16 bytes, expected 340,": file_bytes({"x": entry(shape=(2**62, 2**62, 4))}),
    r"'x' begins at 4, expected 0": file_bytes({"x": entry(shape=(3,), offsets=(4, 16))}),
    r"'y' begins at 8, expected 16": file_bytes({"x": entry(), "y": entry(shape=(2,), offsets=(8, 16))}),
    r"tensors take 16 bytes but the file has 12": file_bytes({"x": entry()}, bytes(12)),
    r"tensors take 16 bytes but the file has 20": file_bytes({"x": entry()}, bytes(20)),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files_are_refused(message, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(DAMAGED[message])
    with pytest.raises(CheckpointError, match=message) as raised:
        read_safetensors(path)
    assert "bad.safetensors" in str(raised.value)


def test_floats_at_odd_addresses_are_read(tmp_path):
    header = json.dumps({"x": entry()}).encode()
    header += b" " * (-len(header) % 8 + 1)
    (tmp_path / "odd.safetensors").write_bytes(file_bytes(header, np.arange(4, dtype="<f4").tobytes()))
    values = read_safetensors(tmp_path / "odd.safetensors")["x"].read()
    assert values.flags.aligned
    assert values.tolist() == [0, 1, 2, 3]


# ---- what is refused: shards and their index


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_hf_folder(tmp_path / "m", max_shard_size=80_000)[0]


def place(folder: Path, tensor: str, shard) -> None:
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"][tensor] = shard
    index.write_text(json.dumps(fields))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "x\0.safetensors", 3])
def test_shard_names_that_are_no_plain_file_names_are_refused(shard, sharded):
    place(sharded, "lm_head.weight", shard)
    with pytest.raises(CheckpointError, match=r"weight_map'?: field 'lm_head.weight' is "):
        open_checkpoint(sharded)


def test_index_that_names_an_absent_shard_is_refused(sharded):
    next(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"\.safetensors: there is no such file"):
        open_checkpoint(sharded)


def test_index_that_places_a_tensor_in_no_shard_is_refused(sharded):
    place(sharded, "extra.weight", next(sharded.glob("*.safetensors")).name)
    with pytest.raises(CheckpointError, match=r"lacks tensor 'extra.weight'"):
        open_checkpoint(sharded)


def test_index_that_places_a_tensor_in_another_shard_is_refused(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name, shard = next((n, s) for n, s in index.items() if list(index.values()).count(s) > 1)
    place(sharded, name, next(other for other in index.values() if other != shard))
    with pytest.raises(
        CheckpointError,
        match=rf"(holds|lacks) tensor '{name}', which model.safetensors.index.json (lists for this|does not list for this)",
    ):
        open_checkpoint(sharded)


def test_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"contains neither 'model.safetensors' nor"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: there is no such file"):
        open_checkpoint(folder)
