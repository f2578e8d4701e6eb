"""A damaged checkpoint opens or raises a MinillmError, and takes memory in proportion to its size."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf, write_hf_folder
from support.damage import ANY_JSON, EDGE_NUMBERS, OPENED, REFUSED, allowed_bytes, open_and_read, peak_bytes

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


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Small checkpoints: `bare.gguf` without a tokenizer, `full.gguf` with one, and the folder `hf`."""
    folder = tmp_path_factory.mktemp("originals")
    write_gguf(folder / "bare.gguf", random_llama(**BARE))
    write_gguf(folder / "full.gguf", random_llama(**SMALL | {"hidden_size": 32}), "Q4_1", with_tokenizer=True)
    write_hf_folder(folder / "hf", with_tokenizer=True, **SMALL)
    return folder


@pytest.fixture
def hf(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "hf", tmp_path / "hf"))


@pytest.mark.parametrize("name", ["bare.gguf", "full.gguf", "hf"])
def test_undamaged_checkpoints_open(name, originals):
    assert open_and_read(originals / name) == OPENED


# ---- GGUF


def header_size(original: bytes) -> int:
    """Return the number of bytes before the tensors' data, which starts within 40 bytes of the last tensor's name."""
    return original.rindex(b".weight") + 40


def test_gguf_truncated_anywhere_is_refused(originals, tmp_path):
    path = Path(shutil.copy(originals / "bare.gguf", tmp_path / "t.gguf"))
    used = len(path.read_bytes().rstrip(b"\0"))
    for size in range(used - 1, -1, -1):
        os.truncate(path, size)
        assert open_and_read(path) == REFUSED


def test_gguf_with_any_header_byte_changed_opens_or_is_refused(originals, tmp_path):
    original = (originals / "bare.gguf").read_bytes()
    path = tmp_path / "f.gguf"
    rng = np.random.default_rng(0)
    outcomes = []
    for position in range(header_size(original)):
        damaged = bytearray(original)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        outcomes.append(open_and_read(path))
    assert outcomes.count(REFUSED) > len(outcomes) / 2  # most bytes of a header matter
    assert OPENED in outcomes  # some do not, such as the last bits of theta


@settings(max_examples=300)
@given(data=st.data())
def test_gguf_with_numbers_overwritten_takes_no_more_memory(data, originals, tmp_path):
    original = (originals / data.draw(st.sampled_from(["bare.gguf", "full.gguf"]))).read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 2))):
        position = data.draw(st.integers(4, header_size(original) - 8))
        number = data.draw(st.sampled_from(EDGE_NUMBERS))
        layout = "<Q" if number >= 2**32 else data.draw(st.sampled_from(["<Q", "<I"]))
        struct.pack_into(layout, damaged, position, number)
    path = tmp_path / "n.gguf"
    path.write_bytes(damaged)
    assert peak_bytes(path) < allowed_bytes(len(damaged))


@settings(max_examples=300)
@given(data=st.data())
def test_gguf_with_bytes_removed_or_inserted_opens_or_is_refused(data, originals, tmp_path):
    original = (originals / data.draw(st.sampled_from(["bare.gguf", "full.gguf"]))).read_bytes()
    begin = data.draw(st.integers(0, header_size(original)))
    end = begin + data.draw(st.integers(0, 40))
    path = tmp_path / "c.gguf"
    path.write_bytes(original[:begin] + data.draw(st.binary(max_size=20)) + original[end:])
    open_and_read(path)


@settings(max_examples=200)
@given(content=st.binary(max_size=300))
def test_random_bytes_after_the_magic_number_are_refused(content, tmp_path):
    path = tmp_path / "r.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    assert open_and_read(path) == REFUSED


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


def header_end(hf: Path) -> int:
    return 8 + struct.unpack("<Q", (hf / "model.safetensors").read_bytes()[:8])[0]


def test_safetensors_truncated_anywhere_is_refused(hf):
    path = hf / "model.safetensors"
    size = path.stat().st_size
    for end in [*range(size - 1, header_end(hf), -97), *range(header_end(hf), -1, -1)]:
        os.truncate(path, end)
        assert open_and_read(hf) == REFUSED


def test_safetensors_with_any_header_byte_changed_opens_or_is_refused(hf):
    path = hf / "model.safetensors"
    original = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in range(header_end(hf)):
        damaged = bytearray(original)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        open_and_read(hf)


@settings(max_examples=300)
@given(data=st.data())
def test_config_with_any_values_opens_or_is_refused(data, hf):
    path = hf / "config.json"
    original = path.read_text()
    fields = json.loads(original)
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        fields[name] = data.draw(ANY_JSON)
    if data.draw(st.booleans()):
        fields["rope_parameters"] = data.draw(
            st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), ANY_JSON)
        )
    path.write_text(json.dumps(fields))
    assert peak_bytes(hf) < allowed_bytes(sum(file.stat().st_size for file in hf.iterdir()))
    path.write_text(original)


@settings(max_examples=200)
@given(data=st.data())
def test_safetensors_header_with_any_values_opens_or_is_refused(data, hf):
    path = hf / "model.safetensors"
    original = path.read_bytes()
    header = json.loads(original[8 : header_end(hf)])
    name = data.draw(st.sampled_from(sorted(header)))
    if name == "__metadata__" or data.draw(st.booleans()):
        header[name] = data.draw(ANY_JSON)
    else:
        header[name][data.draw(st.sampled_from(sorted(header[name])))] = data.draw(ANY_JSON)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + original[header_end(hf) :])
    assert peak_bytes(hf) < allowed_bytes(sum(file.stat().st_size for file in hf.iterdir()))
    path.write_bytes(original)


@settings(max_examples=100)
@given(weight_map=ANY_JSON | st.dictionaries(st.just("lm_head.weight"), ANY_JSON))
def test_index_with_any_values_is_refused(weight_map, hf):
    (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_and_read(hf) == REFUSED
    (hf / "model-00001-of-00001.safetensors").rename(hf / "model.safetensors")
