"""GGUF models that are split into several files."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from support.builders import random_llama, write_gguf
from support.gguf_files import file_bytes, finish, key_bytes, read_values, tensor_bytes

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.gguf import read_gguf
from minillm.errors import CheckpointError


@pytest.fixture(scope="module")
def split_model(tmp_path_factory):
    """A small model in one file, and in the parts that the gguf package writes."""
    folder, model = tmp_path_factory.mktemp("split"), random_llama()
    whole = write_gguf(folder / "whole.gguf", model, "Q8_0", with_tokenizer=True)
    return whole, write_parts(folder / "model.gguf", whole, max_tensors=6)


def write_parts(path: Path, whole: Path, max_tensors: int) -> list[Path]:
    """Copy a file into parts of at most `max_tensors` tensors each."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=max_tensors)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def test_any_part_opens_the_whole_model(split_model):
    path, parts = split_model
    whole = open_checkpoint(path)
    assert [part.name for part in parts] == [f"model-{n}-of-00004.gguf" for n in ("00001", "00002", "00003", "00004")]
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert checkpoint.config == whole.config
        assert list(checkpoint.tensors) == list(whole.tensors)
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(read_values(tensor), read_values(whole.tensors[name]))
        assert checkpoint.tokenizer.encode("hello 12") == whole.tokenizer.encode("hello 12")
        assert read_gguf(part).path == parts[0]


@pytest.fixture
def parts(split_model, tmp_path):
    return [Path(shutil.copy(part, tmp_path)) for part in split_model[1]]


@pytest.mark.parametrize("opened", [0, 2])
def test_missing_parts_are_named(parts, opened):
    parts[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"00001.*: the folder lacks 1 of the 4 parts of the model: model-00002-of-00004.gguf$"
    ):
        open_checkpoint(parts[0])
    parts[3].unlink()
    message = r": the folder lacks 2 of the 4 parts of the model: model-00002-of-00004.gguf, model-00004-of-00004.gguf$"
    with pytest.raises(CheckpointError, match=parts[opened].name + message):
        open_checkpoint(parts[opened])


def test_renamed_parts_are_refused(parts, tmp_path):
    swap = parts[1].rename(tmp_path / "aside")
    parts[2].rename(parts[1])
    swap.rename(parts[2])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00004.gguf: is named part 2, but by its metadata it is part 3"
    ):
        open_checkpoint(parts[0])
    with pytest.raises(
        CheckpointError, match=r"00003-of-00004.gguf: is named part 3 of 4, but by its metadata it is part 2 of 4"
    ):
        open_checkpoint(parts[2])
    with pytest.raises(CheckpointError, match=r"other.gguf: is part 4 of 4 of a split model, but its name does not"):
        open_checkpoint(parts[3].rename(tmp_path / "other.gguf"))


def test_parts_of_another_model_are_refused(split_model, parts, tmp_path):
    _, originals = split_model
    others = write_parts(
        tmp_path / "other.gguf", split_model[0], max_tensors=7
    )  # the same tensors, divided differently
    assert len(others) == 3
    shutil.copy(others[1], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00004.gguf: metadata 'split.count' is 3, but 4 in the first"):
        open_checkpoint(parts[0])
    shutil.copy(originals[0], parts[1])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00004.gguf: is named part 2, but by its metadata it is part 1"
    ):
        open_checkpoint(parts[0])


def set_u16(path: Path, name: bytes, value: int) -> None:
    content = path.read_bytes()
    offset = content.index(name) + len(name) + 4
    path.write_bytes(content[:offset] + struct.pack("<H", value) + content[offset + 2 :])


def test_a_tensor_in_two_parts_is_refused(parts):
    shutil.copy(parts[1], parts[2])
    set_u16(parts[2], b"split.no", 2)
    with pytest.raises(CheckpointError, match=r"00003-of-00004.gguf: tensor '.*' is also in an earlier part"):
        open_checkpoint(parts[0])


def test_parts_with_too_few_tensors_are_refused(parts):
    for part in parts:
        set_u16(part, b"split.tensors.count", 22)
    with pytest.raises(CheckpointError, match=r"the 4 parts hold 21 tensors, but metadata 'split.tensors.count' is 22"):
        open_checkpoint(parts[3])


def test_a_model_may_consist_of_one_part(tmp_path):
    (tmp_path / "one.gguf").write_bytes(file_bytes([key_bytes(b"split.count", 2, b"\1\0")], [tensor_bytes()]))
    assert list(read_gguf(tmp_path / "one.gguf").tensors) == ["x"]
