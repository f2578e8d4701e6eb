"""Damaged checkpoints either still open or raise a MinillmError; neither takes memory the file does not justify."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf, write_hf_folder

from minillm.checkpoints import open_checkpoint
from minillm.errors import MinillmError

SMALL = {
    "vocab_size": 264,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
BARE = SMALL | {"vocab_size": 8}
TELLING = [0, 1, 2, 7, 8, 9, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
OPENED, REFUSED = "opened", "refused"


def use(path: Path) -> str:
    """Open a checkpoint, read all there is in it, and say what became of it."""
    try:
        checkpoint = open_checkpoint(path)
        with np.errstate(all="ignore"):
            for name, tensor in checkpoint.tensors.items():
                assert tensor.read().shape == checkpoint.config.tensor_shapes()[name]
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hello"))
        return OPENED
    except MinillmError as error:
        message = str(error)
    assert path.name in message
    return REFUSED


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        use(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def allowed_bytes(size: int) -> int:
    """Python's objects for a file's many small strings and numbers are larger than those are, but not by more."""
    return 1_000_000 + 64 * size


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Small checkpoints: `bare.gguf`, `full.gguf` (with a tokenizer), and the folder `hf`."""
    folder = tmp_path_factory.mktemp("originals")
    write_gguf(folder / "bare.gguf", random_llama(**BARE))
    write_gguf(folder / "full.gguf", random_llama(**SMALL | {"hidden_size": 32}), "Q4_1", with_tokenizer=True)
    write_hf_folder(folder / "hf", with_tokenizer=True, **SMALL)
    return folder


@pytest.fixture
def hf(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "hf", tmp_path / "hf"))


@pytest.mark.parametrize("name", ["bare.gguf", "full.gguf", "hf"])
def test_undamaged_they_open(name, originals):
    assert use(originals / name) == OPENED


# ---- GGUF


def header_size(original: bytes) -> int:
    """Bytes before the tensors': up to what follows the last tensor's name."""
    return original.rindex(b".weight") + 40


def test_gguf_truncated_anywhere_is_refused(originals, tmp_path):
    path = Path(shutil.copy(originals / "bare.gguf", tmp_path / "t.gguf"))
    used = len(path.read_bytes().rstrip(b"\0"))
    for size in range(used - 1, -1, -1):
        os.truncate(path, size)
        assert use(path) == REFUSED


def test_gguf_with_any_header_byte_changed_opens_or_is_refused(originals, tmp_path):
    original = (originals / "bare.gguf").read_bytes()
    path = tmp_path / "f.gguf"
    rng = np.random.default_rng(0)
    outcomes = []
    for position in range(header_size(original)):
        damaged = bytearray(original)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        outcomes.append(use(path))
    assert outcomes.count(REFUSED) > len(outcomes) / 2  # most of a header matters
    assert OPENED in outcomes  # the last bits of theta, say, do not


@settings(max_examples=300)
@given(data=st.data())
def test_gguf_with_numbers_overwritten_takes_no_more_memory(data, originals, tmp_path):
    original = (originals / data.draw(st.sampled_from(["bare.gguf", "full.gguf"]))).read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 2))):
        position = data.draw(st.integers(4, header_size(original) - 8))
        number = data.draw(st.sampled_from(TELLING))
        layout = "<Q" if number >= 2**32 else data.draw(st.sampled_from(["<Q", "<I"]))
        struct.pack_into(layout, damaged, position, number)
    path = tmp_path / "n.gguf"
    path.write_bytes(damaged)
    assert peak_bytes(path) < allowed_bytes(len(damaged))


@settings(max_examples=300)
@given(data=st.data())
def test_gguf_with_bytes_cut_or_put_in_opens_or_is_refused(data, originals, tmp_path):
    original = (originals / data.draw(st.sampled_from(["bare.gguf", "full.gguf"]))).read_bytes()
    begin = data.draw(st.integers(0, header_size(original)))
    end = begin + data.draw(st.integers(0, 40))
    path = tmp_path / "c.gguf"
    path.write_bytes(original[:begin] + data.draw(st.binary(max_size=20)) + original[end:])
    use(path)


@settings(max_examples=200)
@given(content=st.binary(max_size=300))
def test_gguf_of_any_bytes_is_refused(content, tmp_path):
    path = tmp_path / "r.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    assert use(path) == REFUSED


@pytest.mark.parametrize("kind", [0, 1, 2, 7, 8, 12])
def test_large_metadata_arrays_take_memory_in_proportion(kind, tmp_path):
    count = 200_000
    size = {0: 1, 1: 1, 2: 2, 7: 1, 8: 8, 12: 8}[kind]
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count)
    path = tmp_path / "a.gguf"
    body = bytes(count * size) if kind in (7, 8) else np.random.default_rng(0).bytes(count * size)
    path.write_bytes(head + body)
    assert peak_bytes(path) < allowed_bytes(path.stat().st_size)


# ---- Hugging Face folders


def json_size(hf: Path) -> int:
    return 8 + struct.unpack("<Q", (hf / "model.safetensors").read_bytes()[:8])[0]


def test_safetensors_truncated_anywhere_is_refused(hf):
    path = hf / "model.safetensors"
    size = path.stat().st_size
    for end in [*range(size - 1, json_size(hf), -97), *range(json_size(hf), -1, -1)]:
        os.truncate(path, end)
        assert use(hf) == REFUSED


def test_safetensors_with_any_header_byte_changed_opens_or_is_refused(hf):
    path = hf / "model.safetensors"
    original = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in range(json_size(hf)):
        damaged = bytearray(original)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        use(hf)


# Anything JSON can say, numbers of any size among it, and what Python's parser takes beyond JSON.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.sampled_from(TELLING) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(data=st.data())
def test_config_with_any_values_opens_or_is_refused(data, hf):
    path = hf / "config.json"
    original = path.read_text()
    fields = json.loads(original)
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        fields[name] = data.draw(ANYTHING)
    if data.draw(st.booleans()):
        fields["rope_parameters"] = data.draw(
            st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), ANYTHING)
        )
    path.write_text(json.dumps(fields))
    assert peak_bytes(hf) < allowed_bytes(sum(file.stat().st_size for file in hf.iterdir()))
    path.write_text(original)


@settings(max_examples=200)
@given(data=st.data())
def test_safetensors_header_with_any_values_opens_or_is_refused(data, hf):
    path = hf / "model.safetensors"
    original = path.read_bytes()
    header = json.loads(original[8 : json_size(hf)])
    name = data.draw(st.sampled_from(sorted(header)))
    if name == "__metadata__" or data.draw(st.booleans()):
        header[name] = data.draw(ANYTHING)
    else:
        header[name][data.draw(st.sampled_from(sorted(header[name])))] = data.draw(ANYTHING)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + original[json_size(hf) :])
    assert peak_bytes(hf) < allowed_bytes(sum(file.stat().st_size for file in hf.iterdir()))
    path.write_bytes(original)


@settings(max_examples=100)
@given(weight_map=ANYTHING | st.dictionaries(st.just("lm_head.weight"), ANYTHING))
def test_index_with_any_values_is_refused(weight_map, hf):
    (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert use(hf) == REFUSED
    (hf / "model-00001-of-00001.safetensors").rename(hf / "model.safetensors")
