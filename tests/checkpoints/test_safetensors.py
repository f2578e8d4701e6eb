"""Weights in Hugging Face folders, compared with transformers and the safetensors library, and invalid files."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.builders import write_hf_folder

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.hf_architectures import ARCHITECTURES
from minillm.checkpoints.safetensors import read_safetensors
from minillm.errors import CheckpointError, UnsupportedError

file_name = ARCHITECTURES["llama"].file_name
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


# ---- valid files


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_equal_the_ones_that_transformers_saved(storage, shards, tied, tmp_path):
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
        np.testing.assert_array_equal(tensor.data, raw_bytes(theirs))
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
def test_tensors_equal_the_ones_that_the_safetensors_library_reads(tensors, notes, seed):
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
            np.testing.assert_array_equal(tensor.data, raw_bytes(theirs[name]))
            np.testing.assert_array_equal(tensor.read(), theirs[name].to(torch.float32).numpy())


# ---- invalid tensors


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
def test_unexpected_tensors_are_refused(change, error, message, hf_folder):
    rewrite(hf_folder, change)
    with pytest.raises(error, match=message) as raised:
        open_checkpoint(hf_folder)
    assert str(hf_folder) in str(raised.value)


def test_rotary_buffers_in_old_folders_are_ignored(hf_folder):
    rewrite(hf_folder, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    checkpoint = open_checkpoint(hf_folder)
    assert checkpoint.tensors.keys() == checkpoint.config.tensor_shapes().keys()


def test_the_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path):
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


def test_floats_at_unaligned_addresses_are_read(tmp_path):
    header = json.dumps({"x": entry()}).encode()
    header += b" " * (-len(header) % 8 + 1)
    (tmp_path / "odd.safetensors").write_bytes(file_bytes(header, np.arange(4, dtype="<f4").tobytes()))
    values = read_safetensors(tmp_path / "odd.safetensors")["x"].read()
    assert values.flags.aligned
    assert values.tolist() == [0, 1, 2, 3]


# ---- invalid shards and indexes


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_hf_folder(tmp_path / "m", max_shard_size=80_000)[0]


def set_shard(folder: Path, tensor: str, shard) -> None:
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"][tensor] = shard
    index.write_text(json.dumps(fields))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "x\0.safetensors", 3])
def test_shard_names_that_are_not_file_names_are_refused(shard, sharded):
    set_shard(sharded, "lm_head.weight", shard)
    with pytest.raises(CheckpointError, match=r"weight_map'?: field 'lm_head.weight' is "):
        open_checkpoint(sharded)


def test_an_index_that_names_a_missing_shard_is_refused(sharded):
    next(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"\.safetensors: there is no such file"):
        open_checkpoint(sharded)


def test_an_index_that_lists_a_missing_tensor_is_refused(sharded):
    set_shard(sharded, "extra.weight", next(sharded.glob("*.safetensors")).name)
    with pytest.raises(CheckpointError, match=r"lacks tensor 'extra.weight'"):
        open_checkpoint(sharded)


def test_an_index_that_lists_a_tensor_for_the_wrong_shard_is_refused(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name, shard = next((n, s) for n, s in index.items() if list(index.values()).count(s) > 1)
    set_shard(sharded, name, next(other for other in index.values() if other != shard))
    with pytest.raises(
        CheckpointError,
        match=rf"(holds|lacks) tensor '{name}', which model.safetensors.index.json (lists|does not list) for this",
    ):
        open_checkpoint(sharded)


def test_a_folder_without_weights_or_config_is_refused(hf_folder):
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"contains neither 'model.safetensors' nor"):
        open_checkpoint(hf_folder)
    (hf_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: there is no such file"):
        open_checkpoint(hf_folder)
