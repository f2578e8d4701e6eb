"""The GGUF reader, compared with the `gguf` package, and files that are invalid in one respect each."""

from __future__ import annotations

import struct
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValue, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import READ_ONLY_TYPES, random_blocks
from support.gguf_files import file_bytes, finish, key_bytes, read_values, string_bytes, tensor_bytes

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.gguf import read_gguf
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES, QuantizedMatrix

SETTINGS = settings(max_examples=60, deadline=None)


# ---- tensors


@SETTINGS
@given(
    storage=st.sampled_from(sorted(STORAGE_TYPES)),
    outer=st.lists(st.integers(1, 5), max_size=3),
    blocks=st.integers(1, 3),
    alignment=st.sampled_from([1, 8, 32, 256]),
    seed=st.integers(0, 2**32 - 1),
    any_bits=st.booleans(),
)
def test_tensors_equal_the_ones_that_the_gguf_package_reads(storage, outer, blocks, alignment, seed, any_bits):
    kind = GGMLQuantizationType[storage]
    if STORAGE_TYPES[storage].is_quantized:
        outer = [*outer, 2][:1]  # a quantized tensor is a matrix
    shape = (*outer, blocks * STORAGE_TYPES[storage].block_size)
    rng = np.random.default_rng(seed)
    if storage in READ_ONLY_TYPES:
        stored = random_blocks(kind, shape, rng)
    else:
        stored = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    if any_bits:  # any bits that a file may hold: NaN or infinite scales, all codes
        stored = rng.integers(0, 256, stored.nbytes, np.uint8).view(stored.dtype).reshape(stored.shape)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder, "t.gguf"), "any")
        writer.add_custom_alignment(alignment)
        writer.add_tensor("before", np.ones(3, np.float16))  # moves the next tensor if the alignment is small
        writer.add_tensor("x", stored, raw_dtype=kind)
        finish(writer)
        tensor = read_gguf(Path(folder, "t.gguf")).tensors["x"]
        assert tensor.shape == shape
        assert tensor.storage.name == storage
        np.testing.assert_array_equal(read_values(tensor), expected)


@pytest.mark.parametrize("storage", sorted(STORAGE_TYPES))
def test_a_storage_type_describes_its_form_in_memory(storage):
    """Quantized types stay quantized, in the narrowest width that can hold their codes."""
    kind = STORAGE_TYPES[storage]
    block_bytes = kind.block.itemsize
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[storage]] == (kind.block_size, block_bytes)
    assert kind.bits_stored == 8 * block_bytes / kind.block_size
    with np.errstate(all="ignore"):
        data = np.random.default_rng(0).integers(0, 256, 64 * block_bytes, np.uint8)
        read = kind.read(data, (2, 32 * kind.block_size))
    assert isinstance(read, QuantizedMatrix) == kind.is_quantized
    if kind.is_quantized:
        negative = 0.5 if read.minimums is None else 0  # the fraction of the range of codes that is below zero
        widths = (
            bits
            for bits in (4, 5, 6, 8)
            if -negative * 2**bits <= read.codes.min() <= read.codes.max() < (1 - negative) * 2**bits
        )
        assert kind.bits == read.bits == next(widths)
        assert str(kind) == f"{storage} as {kind.bits}-bit codes"
    else:
        assert read.dtype == np.float32
        assert str(kind) == f"{storage} as float32"


# ---- metadata

INTEGER_RANGES = {
    GGUFValueType.UINT8: (0, 2**8 - 1),
    GGUFValueType.INT8: (-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: (0, 2**16 - 1),
    GGUFValueType.INT16: (-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: (0, 2**32 - 1),
    GGUFValueType.INT32: (-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: (0, 2**64 - 1),
    GGUFValueType.INT64: (-(2**63), 2**63 - 1),
}
SCALARS = {
    **{kind: st.integers(*limits) for kind, limits in INTEGER_RANGES.items()},
    GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: st.text(st.characters(exclude_categories=["Cs"])),
}


@st.composite
def metadata_values(draw) -> GGUFValue:
    kind = draw(st.sampled_from(list(SCALARS)))
    if draw(st.booleans()):
        return GGUFValue(draw(SCALARS[kind]), kind)
    return GGUFValue(draw(st.lists(SCALARS[kind], min_size=1, max_size=5)), GGUFValueType.ARRAY, kind)


@SETTINGS
@given(values=st.lists(metadata_values(), max_size=8))
def test_metadata_is_read_as_it_was_written(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        writer = gguf.GGUFWriter(path, "any")
        for index, value in enumerate(values):
            writer.add_key_value(f"key.{index}", value.value, value.type, value.sub_type)
        finish(writer)
        metadata = read_gguf(path).metadata
    assert metadata == {"general.architecture": "any"} | {f"key.{i}": v.value for i, v in enumerate(values)}
    for index, value in enumerate(values):
        assert type(metadata[f"key.{index}"]) is type(value.value)


def test_default_model_equals_what_the_gguf_package_reads(default_gguf):
    ours, theirs = read_gguf(default_gguf), gguf.GGUFReader(default_gguf)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape[::-1].tolist())
        assert mine.storage.name == tensor.tensor_type.name
        np.testing.assert_array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))


def test_default_model_opens_fast_and_without_copies(default_gguf):
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        checkpoint = open_checkpoint(default_gguf)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.15
    assert not any(tensor.data.flags.owndata or tensor.data.flags.writeable for tensor in checkpoint.tensors.values())


# ---- invalid files

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
NESTED = U32(9) + U64(1)

DAMAGED = {
    "does not begin with": file_bytes(magic=b"GGML"),
    "the file is empty": b"",
    r"needs 8 bytes at byte 16.*only 4 remain": file_bytes()[:20],
    r"announces 9,223,372,036,854,775,808 tensors": file_bytes(counts=(2**63, 0)),
    r"announces 18,446,744,073,709,551,615 metadata keys": file_bytes(counts=(0, 2**64 - 1)),
    r"announces 9,223,372,036,854,775,808 elements of at least 8": file_bytes(
        [key_bytes(b"k", 9, U32(8) + U64(2**63))]
    ),
    r"'k' announces 1,000 elements of at least 1 ": file_bytes([key_bytes(b"k", 9, U32(7) + U64(1000))]),
    r"metadata key 0 needs 9,223,372,036,854,775,808 bytes": file_bytes([U64(2**63) + bytes(20)]),
    r"'k' needs 4,294,967,296 bytes": file_bytes([key_bytes(b"k", 8, U64(2**32))]),
    r"key 0 is not UTF-8 at byte 32": file_bytes([key_bytes(b"\xff", 0, b"\1")]),
    r"'k' is not UTF-8 at byte 68": file_bytes(
        [key_bytes(b"k", 9, U32(8) + U64(2) + string_bytes(b"ok") + string_bytes(b"a\xc3"))]
    ),
    r"'k' has a value of type 13": file_bytes([key_bytes(b"k", 13, bytes(8))]),
    r"'k' has elements of type 99": file_bytes([key_bytes(b"k", 9, U32(99) + U64(0))]),
    r"'k' has a boolean": file_bytes([key_bytes(b"k", 7, b"\2")]),
    r"nested more than 4": file_bytes([key_bytes(b"k", 9, NESTED * 5 + U32(0) + U64(0))]),
    r"'split.count' is 'a', expected an integer": file_bytes([key_bytes(b"split.count", 8, string_bytes(b"a"))]),
    r"'split.no' is missing, expected an integer": file_bytes([key_bytes(b"split.count", 2, b"\3\0")]),
    r"part 2 of 3 of a split model, but its name does not end in -00002-of-00003.gguf": file_bytes(
        [key_bytes(b"split.count", 2, b"\3\0"), key_bytes(b"split.no", 2, b"\1\0")]
    ),
    r"metadata 'k' appears twice": file_bytes([key_bytes(b"k", 0, b"\1")] * 2),
    r"tensor 'x' appears twice": file_bytes([], [tensor_bytes(), tensor_bytes(offset=32)]),
    r"'x' has 0 axes": file_bytes([], [tensor_bytes(dims=()) + bytes(8)]),
    r"'x' has 5 axes": file_bytes([], [tensor_bytes(dims=(1, 1, 1, 1, 1))]),
    r"'x' has shape \[0, 4\]": file_bytes([], [tensor_bytes(dims=(4, 0))]),
    r"'x' needs bytes .* but the file ends": file_bytes([], [tensor_bytes(dims=(2**63, 2**63, 2**63, 2**63))]),
    r"'x' needs bytes 64..128 but the file ends at 96": file_bytes([], [tensor_bytes(dims=(16,))], bytes(32)),
    r"'x' starts at offset 4, expected a multiple of 32": file_bytes([], [tensor_bytes(offset=4)]),
    r"rows of 640 values, expected a multiple of 256, the block size of Q4_K": file_bytes(
        [], [tensor_bytes(dims=(640,), kind=12)]
    ),
    r"rows of 33 values, expected a multiple of 32, the block size of Q8_0": file_bytes(
        [], [tensor_bytes(dims=(33,), kind=8)]
    ),
    r"'y' begins at byte 128, inside tensor 'x'": file_bytes(
        [], [tensor_bytes(dims=(9,)), tensor_bytes(b"y", offset=32)]
    ),
    r"'general.alignment' is 0": file_bytes([key_bytes(b"general.alignment", 4, U32(0))]),
    r"'general.alignment' is 24": file_bytes([key_bytes(b"general.alignment", 4, U32(24))]),
    r"'general.alignment' is 'a'": file_bytes([key_bytes(b"general.alignment", 8, string_bytes(b"a"))]),
    r"'general.alignment' is True": file_bytes([key_bytes(b"general.alignment", 7, b"\1")]),
}
UNSUPPORTED = {
    r"big-endian": file_bytes(version=3 << 24),
    r"GGUF version 1;": file_bytes(version=1),
    r"GGUF version 4;": file_bytes(version=4),
    r"tensor 'x' is IQ2_XXS; types that can be read: F32, F16, BF16": file_bytes(
        [], [tensor_bytes(dims=(256,), kind=16)]
    ),
    r"tensor 'x' is type 77, which is unknown": file_bytes([], [tensor_bytes(kind=77)]),
    r"a big-endian GGUF file": file_bytes(magic=b"FUGG"),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files_are_refused(message, tmp_path):
    check_refused(tmp_path, DAMAGED[message], CheckpointError, message)


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_files_are_refused(message, tmp_path):
    check_refused(tmp_path, UNSUPPORTED[message], UnsupportedError, message)


def check_refused(folder: Path, content: bytes, error: type[Exception], message: str) -> None:
    path = folder / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        read_gguf(path)
    assert "bad.gguf" in str(raised.value)


def test_valid_files_are_read(tmp_path):
    keys = [
        key_bytes(b"k", 9, U32(7) + U64(2) + b"\1\0"),
        key_bytes(b"nested", 9, NESTED * 3 + U32(0) + U64(2) + b"\5\6"),
        key_bytes(b"empty", 9, U32(8) + U64(0)),
    ]
    (tmp_path / "good.gguf").write_bytes(
        file_bytes(keys, [tensor_bytes(dims=(4, 2)), tensor_bytes(b"y", offset=32)], version=2)
    )
    file = read_gguf(tmp_path / "good.gguf")
    assert file.version == 2
    assert file.metadata == {"k": [True, False], "nested": [[[[5, 6]]]], "empty": []}
    assert {name: t.shape for name, t in file.tensors.items()} == {"x": (2, 4), "y": (4,)}


def test_a_big_endian_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("x", np.ones(4, np.float32))
    finish(writer)
    with pytest.raises(UnsupportedError, match=r"big.gguf: a big-endian GGUF file; .*gguf-convert-endian"):
        open_checkpoint(tmp_path / "big.gguf")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_checkpoint(tmp_path / "none.gguf")
