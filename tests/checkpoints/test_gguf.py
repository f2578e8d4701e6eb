"""The GGUF reader against the `gguf` package, and against files that break one rule each."""

from __future__ import annotations

import shutil
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
from support.builders import ONLY_READ, TINY, random_blocks, random_llama, storage_for, write_gguf, write_hf_folder

from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.gguf import read_gguf
from minillm.checkpoints.gguf_architectures import ARCHITECTURES
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES, QuantizedMatrix

file_name = ARCHITECTURES["llama"].file_name
SETTINGS = settings(max_examples=60, deadline=None)


def numbers(tensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = tensor.read()
        return values.dequantize() if isinstance(values, QuantizedMatrix) else values


# ---- the container: tensors


@SETTINGS
@given(
    storage=st.sampled_from(sorted(STORAGE_TYPES)),
    outer=st.lists(st.integers(1, 5), max_size=3),
    blocks=st.integers(1, 3),
    alignment=st.sampled_from([1, 8, 32, 256]),
    seed=st.integers(0, 2**32 - 1),
    any_bits=st.booleans(),
)
def test_tensors_equal_the_gguf_packages(storage, outer, blocks, alignment, seed, any_bits):
    kind = GGMLQuantizationType[storage]
    if STORAGE_TYPES[storage].is_quantized:
        outer = [*outer, 2][:1]  # a quantized tensor is a matrix
    shape = (*outer, blocks * STORAGE_TYPES[storage].block_size)
    rng = np.random.default_rng(seed)
    if storage in ONLY_READ:
        stored = random_blocks(kind, shape, rng)
    else:
        stored = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    if any_bits:  # every bit pattern a file may hold: NaN scales, infinities, all codes
        stored = rng.integers(0, 256, stored.nbytes, np.uint8).view(stored.dtype).reshape(stored.shape)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder, "t.gguf"), "any")
        writer.add_custom_alignment(alignment)
        writer.add_tensor("before", np.ones(3, np.float16))  # shifts what follows when alignment is small
        writer.add_tensor("x", stored, raw_dtype=kind)
        write(writer)
        tensor = read_gguf(Path(folder, "t.gguf")).tensors["x"]
        assert tensor.shape == shape
        assert tensor.storage.name == storage
        np.testing.assert_array_equal(numbers(tensor), expected)


@pytest.mark.parametrize("storage", sorted(STORAGE_TYPES))
def test_a_storage_type_tells_what_becomes_of_it(storage):
    """Nothing is widened to floats that is not floats in the file; the fewer bits a code needs, the fewer it gets."""
    kind = STORAGE_TYPES[storage]
    bytes_of_block = kind.block.itemsize
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[storage]] == (kind.block_size, bytes_of_block)
    assert kind.bits_stored == 8 * bytes_of_block / kind.block_size
    with np.errstate(all="ignore"):
        data = np.random.default_rng(0).integers(0, 256, 64 * bytes_of_block, np.uint8)
        read = kind.read(data, (2, 32 * kind.block_size))
    assert isinstance(read, QuantizedMatrix) == kind.is_quantized
    if kind.is_quantized:
        below = 0.5 if read.minimums is None else 0  # how much of the codes' range is below zero
        few = (
            bits
            for bits in (4, 5, 6, 8)
            if -below * 2**bits <= read.codes.min() <= read.codes.max() < (1 - below) * 2**bits
        )
        assert kind.bits == read.bits == next(few)
        assert str(kind) == f"{storage} as {kind.bits}-bit codes"
    else:
        assert read.dtype == np.float32
        assert str(kind) == f"{storage} as float32"


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- the container: metadata

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
def test_metadata_comes_back_as_written(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        writer = gguf.GGUFWriter(path, "any")
        for index, value in enumerate(values):
            writer.add_key_value(f"key.{index}", value.value, value.type, value.sub_type)
        write(writer)
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


def test_default_model_opens_at_once_and_copies_nothing(default_gguf):
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        checkpoint = open_checkpoint(default_gguf)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.15
    assert not any(tensor.data.flags.owndata or tensor.data.flags.writeable for tensor in checkpoint.tensors.values())


# ---- Llama: names, row order, config


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (2, 1), (8, 2)]),
    head_dim=st.sampled_from([None, 2, 6, 16, 32]),
    hidden_size=st.sampled_from([32, 48, 64]),
    biases=st.tuples(st.booleans(), st.booleans()),
    tied=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-6]),
    rope=st.sampled_from(
        [
            {"rope_type": "default", "rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": 123456.7},
            {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.5},
        ]
    ),
    storage=st.sampled_from(sorted(STORAGE_TYPES.keys() - ONLY_READ)),
)
def test_both_formats_hold_the_same_model(layers, heads, head_dim, hidden_size, biases, tied, eps, rope, storage):
    with tempfile.TemporaryDirectory() as folder:
        hf_path, model = write_hf_folder(
            Path(folder, "hf"),
            num_hidden_layers=layers,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_dim,
            hidden_size=hidden_size,
            attention_bias=biases[0],
            mlp_bias=biases[1],
            tie_word_embeddings=tied,
            rms_norm_eps=eps,
            rope_parameters=rope,
        )
        hf = open_checkpoint(hf_path)
        file = open_checkpoint(write_gguf(Path(folder, "m.gguf"), model, storage))
        assert file.config == hf.config
        assert list(file.tensors) == list(hf.tensors) == list(hf.config.tensor_shapes())
        for name, shape in hf.config.tensor_shapes().items():
            values = hf.tensors[name].read()
            kind = storage_for(shape, storage)
            # quantizing works row by row, so it is the same before and after rows change places
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            assert file.tensors[name].shape == values.shape == shape
            np.testing.assert_array_equal(numbers(file.tensors[name]), expected)


def test_llama3_scaling_arrives_as_a_factor_per_frequency(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(rope_parameters=rope)))
    scaling = file.config.rope_scaling
    assert scaling.kind == "per_frequency"
    assert len(scaling.factors) == file.config.head_dim // 2
    assert min(scaling.factors) == 1.0
    assert max(scaling.factors) == 8.0
    assert list(scaling.factors) == sorted(scaling.factors)


@pytest.mark.parametrize("kind", ["none", "linear", "yarn"])
def test_turned_queries_may_be_made_larger_whatever_the_scaling(kind, tmp_path):
    def edit(writer):
        writer.add_rope_scaling_attn_factors(1.5)
        number("llama.rope.scaling.type", kind, TEXT)(writer)
        if kind != "none":
            writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    scaling = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(), edit=edit)).config.rope_scaling
    assert scaling.kind == ("yarn" if kind == "yarn" else "linear")
    assert scaling.factor == (1.0 if kind == "none" else 4.0)
    assert scaling.attention_factor == pytest.approx(1.5 * (1 + 0.1 * np.log(4)) if kind == "yarn" else 1.5)


def test_tokenizer_is_built_when_asked_for_and_equal_in_both_formats(tmp_path):
    hf_path, model = write_hf_folder(tmp_path / "hf", with_tokenizer=True)
    hf = open_checkpoint(hf_path)
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, with_tokenizer=True))
    assert file.tokenizer.encode("hello, 12 añós") == hf.tokenizer.encode("hello, 12 añós")
    assert file.tokenizer is file.tokenizer
    assert open_checkpoint(write_gguf(tmp_path / "none.gguf", model)).tokenizer is None
    (hf_path / "tokenizer.json").unlink()
    assert open_checkpoint(hf_path).tokenizer is None


def test_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path):
    hf_path, model = write_hf_folder(tmp_path / "hf", with_tokenizer=True, vocab_size=261)
    for path in (hf_path, write_gguf(tmp_path / "m.gguf", model, with_tokenizer=True)):
        checkpoint = open_checkpoint(path)
        with pytest.raises(CheckpointError, match="tokenizer has 262 tokens but the embedding matrix only 261 rows"):
            _ = checkpoint.tokenizer


# ---- what is refused: the container


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name=b"x", dims=(4,), kind=0, offset=0, num_axes=None) -> bytes:
    num_axes = len(dims) if num_axes is None else num_axes
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", num_axes, *dims, kind, offset)


def file_bytes(keys=(), tensors=(), body=bytes(64), *, version=3, counts=None, magic=b"GGUF") -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + body


U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
NESTED = U32(9) + U64(1)

DAMAGED = {
    "does not begin with": file_bytes(magic=b"GGML"),
    "the file is empty": b"",
    r"needs 8 bytes at byte 16.*only 4 remain": file_bytes()[:20],
    r"announces 9,223,372,036,854,775,808 tensors": file_bytes(counts=(2**63, 0)),
    r"announces 18,446,744,073,709,551,615 metadata keys": file_bytes(counts=(0, 2**64 - 1)),
    r"announces 9,223,372,036,854,775,808 elements of at least 8": file_bytes([key(b"k", 9, U32(8) + U64(2**63))]),
    r"'k' announces 1,000 elements of at least 1 ": file_bytes([key(b"k", 9, U32(7) + U64(1000))]),
    r"metadata key 0 needs 9,223,372,036,854,775,808 bytes": file_bytes([U64(2**63) + bytes(20)]),
    r"'k' needs 4,294,967,296 bytes": file_bytes([key(b"k", 8, U64(2**32))]),
    r"key 0 is not UTF-8 at byte 32": file_bytes([key(b"\xff", 0, b"\1")]),
    r"'k' is not UTF-8 at byte 68": file_bytes([key(b"k", 9, U32(8) + U64(2) + text(b"ok") + text(b"a\xc3"))]),
    r"'k' has a value of type 13": file_bytes([key(b"k", 13, bytes(8))]),
    r"'k' has elements of type 99": file_bytes([key(b"k", 9, U32(99) + U64(0))]),
    r"'k' has a boolean": file_bytes([key(b"k", 7, b"\2")]),
    r"nested more than 4": file_bytes([key(b"k", 9, NESTED * 5 + U32(0) + U64(0))]),
    r"'split.count' is 'a', expected an integer": file_bytes([key(b"split.count", 8, text(b"a"))]),
    r"'split.no' is missing, expected an integer": file_bytes([key(b"split.count", 2, b"\3\0")]),
    r"part 2 of 3 of a split model, but its name does not end in -00002-of-00003.gguf": file_bytes(
        [key(b"split.count", 2, b"\3\0"), key(b"split.no", 2, b"\1\0")]
    ),
    r"metadata 'k' appears twice": file_bytes([key(b"k", 0, b"\1")] * 2),
    r"tensor 'x' appears twice": file_bytes([], [tensor(), tensor(offset=32)]),
    r"'x' has 0 axes": file_bytes([], [tensor(dims=()) + bytes(8)]),
    r"'x' has 5 axes": file_bytes([], [tensor(dims=(1, 1, 1, 1, 1))]),
    r"'x' has shape \[0, 4\]": file_bytes([], [tensor(dims=(4, 0))]),
    r"'x' needs bytes .* but the file ends": file_bytes([], [tensor(dims=(2**63, 2**63, 2**63, 2**63))]),
    r"'x' needs bytes 64..128 but the file ends at 96": file_bytes([], [tensor(dims=(16,))], bytes(32)),
    r"'x' starts at offset 4, expected a multiple of 32": file_bytes([], [tensor(offset=4)]),
    r"rows of 640 values, expected a multiple of 256, the block size of Q4_K": file_bytes(
        [], [tensor(dims=(640,), kind=12)]
    ),
    r"rows of 33 values, expected a multiple of 32, the block size of Q8_0": file_bytes(
        [], [tensor(dims=(33,), kind=8)]
    ),
    r"'y' begins at byte 128, inside tensor 'x'": file_bytes([], [tensor(dims=(9,)), tensor(b"y", offset=32)]),
    r"'general.alignment' is 0": file_bytes([key(b"general.alignment", 4, U32(0))]),
    r"'general.alignment' is 24": file_bytes([key(b"general.alignment", 4, U32(24))]),
    r"'general.alignment' is 'a'": file_bytes([key(b"general.alignment", 8, text(b"a"))]),
    r"'general.alignment' is True": file_bytes([key(b"general.alignment", 7, b"\1")]),
}
UNSUPPORTED = {
    r"big-endian": file_bytes(version=3 << 24),
    r"GGUF version 1;": file_bytes(version=1),
    r"GGUF version 4;": file_bytes(version=4),
    r"tensor 'x' is IQ2_XXS; types that can be read: F32, F16, BF16": file_bytes([], [tensor(dims=(256,), kind=16)]),
    r"tensor 'x' is type 77, which is unknown": file_bytes([], [tensor(kind=77)]),
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


def test_the_same_bytes_without_the_fault_are_read(tmp_path):
    keys = [
        key(b"k", 9, U32(7) + U64(2) + b"\1\0"),
        key(b"nested", 9, NESTED * 3 + U32(0) + U64(2) + b"\5\6"),
        key(b"empty", 9, U32(8) + U64(0)),
    ]
    (tmp_path / "good.gguf").write_bytes(file_bytes(keys, [tensor(dims=(4, 2)), tensor(b"y", offset=32)], version=2))
    file = read_gguf(tmp_path / "good.gguf")
    assert file.version == 2
    assert file.metadata == {"k": [True, False], "nested": [[[[5, 6]]]], "empty": []}
    assert {name: t.shape for name, t in file.tensors.items()} == {"x": (2, 4), "y": (4,)}


def test_a_big_endian_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("x", np.ones(4, np.float32))
    write(writer)
    with pytest.raises(UnsupportedError, match=r"big.gguf: a big-endian GGUF file; .*gguf-convert-endian"):
        open_checkpoint(tmp_path / "big.gguf")


# ---- split files


@pytest.fixture(scope="module")
def split_model(tmp_path_factory):
    """A small model in one file, and in the parts that the gguf package's writer makes."""
    folder, model = tmp_path_factory.mktemp("split"), random_llama()
    whole = write_gguf(folder / "whole.gguf", model, "Q8_0", with_tokenizer=True)
    return whole, write_parts(folder / "model.gguf", whole, most=6)


def write_parts(path: Path, whole: Path, most: int) -> list[Path]:
    """Copy a file into parts of at most `most` tensors each."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=most)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def test_any_part_of_a_split_model_opens_all(split_model):
    path, parts = split_model
    whole = open_checkpoint(path)
    assert [part.name for part in parts] == [f"model-{n}-of-00004.gguf" for n in ("00001", "00002", "00003", "00004")]
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert checkpoint.config == whole.config
        assert list(checkpoint.tensors) == list(whole.tensors)
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(numbers(tensor), numbers(whole.tensors[name]))
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


def test_parts_that_were_renamed_are_told(parts, tmp_path):
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


def test_parts_of_another_model_are_told(split_model, parts, tmp_path):
    _, several = split_model
    others = write_parts(tmp_path / "other.gguf", split_model[0], most=7)  # of as many tensors, otherwise divided
    assert len(others) == 3
    shutil.copy(others[1], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00004.gguf: metadata 'split.count' is 3, but 4 in the first"):
        open_checkpoint(parts[0])
    shutil.copy(several[0], parts[1])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00004.gguf: is named part 2, but by its metadata it is part 1"
    ):
        open_checkpoint(parts[0])


def set_u16(path: Path, name: bytes, value: int) -> None:
    content = path.read_bytes()
    place = content.index(name) + len(name) + 4
    path.write_bytes(content[:place] + struct.pack("<H", value) + content[place + 2 :])


def test_parts_that_hold_the_wrong_tensors_are_told(parts):
    shutil.copy(parts[1], parts[2])
    set_u16(parts[2], b"split.no", 2)
    with pytest.raises(CheckpointError, match=r"00003-of-00004.gguf: tensor '.*' is also in an earlier part"):
        open_checkpoint(parts[0])


def test_parts_with_too_few_tensors_are_told(parts):
    for part in parts:
        set_u16(part, b"split.tensors.count", 22)
    with pytest.raises(CheckpointError, match=r"the 4 parts hold 21 tensors, but metadata 'split.tensors.count' is 22"):
        open_checkpoint(parts[3])


def test_a_file_that_is_its_only_part_is_whole(tmp_path):
    (tmp_path / "one.gguf").write_bytes(file_bytes([key(b"split.count", 2, b"\1\0")], [tensor()]))
    assert list(read_gguf(tmp_path / "one.gguf").tensors) == ["x"]


def test_absent_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_checkpoint(tmp_path / "none.gguf")


# ---- what is refused: the model


def number(name: str, value, kind=GGUFValueType.UINT32):
    """An edit that sets metadata `name`; `value` None removes it."""

    def edit(writer):
        if value is None:
            del writer.kv_data[0][name]
        else:
            writer.kv_data[0][name] = GGUFValue(value, kind, GGUFValueType.UINT32)

    return edit


def added(name: str, values: np.ndarray):
    return lambda writer: writer.add_tensor(name, np.asarray(values, np.float32))


def removed(*names: str):
    return lambda writer: [writer.tensors[0].pop(name) for name in names]


def reshaped(name: str, values: np.ndarray):
    return lambda writer: (writer.tensors[0].pop(name), writer.add_tensor(name, values))


FLOAT, TEXT, FLAG, LIST = GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.BOOL, GGUFValueType.ARRAY
BIASES = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}


def bias(*parts: str, layers=range(2)):
    return lambda writer: [
        writer.add_tensor(f"blk.{layer}.{part}.bias", np.zeros(BIASES.get(part, 96), np.float32))
        for layer in layers
        for part in parts
    ]


CONTRADICTIONS = {
    r"'llama.expert_used_count' is missing": number("llama.expert_count", 8),
    r"9 experts per token of 8; expected no more than all": lambda writer: (
        number("llama.expert_count", 8)(writer),
        number("llama.expert_used_count", 9)(writer),
    ),
    r"'blk.0.ffn_gate_inp.weight' is missing": lambda writer: (
        number("llama.expert_count", 8)(writer),
        number("llama.expert_used_count", 2)(writer),
    ),
    **{
        f"field 'llama.{name}' is missing": number(f"llama.{name}", None)
        for name in (
            "context_length",
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "attention.head_count",
            "attention.layer_norm_rms_epsilon",
        )
    },
    r"'llama.block_count' is 0 \(int\), expected an integer from 1": number("llama.block_count", 0),
    r"'llama.block_count' is -2": number("llama.block_count", -2, GGUFValueType.INT32),
    r"'llama.block_count' is 2.0 \(float\)": number("llama.block_count", 2.0, FLOAT),
    r"'llama.block_count' is True \(bool\)": number("llama.block_count", True, FLAG),
    r"'llama.embedding_length' is '64' \(str\)": number("llama.embedding_length", "64", TEXT),
    r"'llama.embedding_length' is 4294967295": number("llama.embedding_length", 2**32 - 1),
    r"claims 2,147,483,647 layers but holds only 21 tensors": number("llama.block_count", 2**31 - 1),
    r"'blk.2.attn_norm.weight' is missing": number("llama.block_count", 3),
    r"4 query heads cannot be divided evenly among 3 key/value heads": number("llama.attention.head_count_kv", 3),
    r"'llama.rope.freq_base' is nan": number("llama.rope.freq_base", float("nan"), FLOAT),
    r"'llama.rope.freq_base' is inf": number("llama.rope.freq_base", float("inf"), FLOAT),
    r"'llama.attention.layer_norm_rms_epsilon' is 0.0": number("llama.attention.layer_norm_rms_epsilon", 0.0, FLOAT),
    r"'token_embd.weight' has shape \[288, 64\], expected \[289, 64\]": number("llama.vocab_size", 289),
    r"'blk.0.ffn_gate.weight' has shape \[96, 64\], expected \[97, 64\]": number("llama.feed_forward_length", 97),
    r"'output_norm.weight' is missing, expected shape \[64\]": removed("output_norm.weight"),
    r"'blk.1.attn_norm.weight' has shape \[64, 1\]": reshaped("blk.1.attn_norm.weight", np.ones((64, 1), np.float32)),
    r"'blk.0.attn_k.weight' has shape \[64, 32\], expected \[32, 64\] according to the config": reshaped(
        "blk.0.attn_k.weight", np.ones((64, 32), np.float32)
    ),
    r"'blk.1.attn_q.bias' is missing": bias(*BIASES, layers=[0]),
    r"'blk.0.ffn_up.bias' is missing": bias("ffn_gate"),
    r"'llama.rope.scaling.original_context_length' is missing": number("llama.rope.scaling.type", "yarn", TEXT),
    r"7 factors for rotary frequencies, expected 8": added("rope_freqs.weight", np.ones(7)),
    r"'rope_freqs.weight' is F32 of shape \[8, 1\], expected an F32 vector": added(
        "rope_freqs.weight", np.ones((8, 1))
    ),
    r"'rope_freqs.weight' holds a value that is not positive": added(
        "rope_freqs.weight", [1, 1, 1, 1, 1, 1, 1, np.nan]
    ),
}
ADDITIONS = {
    r"the architecture is 'mamba'; implemented are 'llama'": number("general.architecture", "mamba", TEXT),
    r"'llama.expert_gating_func' is 2": number("llama.expert_gating_func", 2),
    r"'llama.attention.sliding_window' is 128": number("llama.attention.sliding_window", 128),
    r"'llama.attention.head_count' varies by layer": number("llama.attention.head_count", [4, 4], LIST),
    r"'llama.attention.value_length' is 8": number("llama.attention.value_length", 8),
    r"'llama.rope.dimension_count' is 8": number("llama.rope.dimension_count", 8),
    r"'llama.rope.scaling.type' is 'longrope'": number("llama.rope.scaling.type", "longrope", TEXT),
    r"unknown tensor 'blk.0.attn_q_norm.weight'": added("blk.0.attn_q_norm.weight", np.ones(16)),
    r"unknown tensor 'blk.7.attn_norm.weight'": added("blk.7.attn_norm.weight", np.ones(64)),
    r"unknown tensor 'blk.bias'": added("blk.bias", np.ones(64)),
    r"'output_norm.weight' is a vector stored as Q8_0": lambda writer: (
        writer.tensors[0].pop("output_norm.weight"),
        writer.add_tensor("output_norm.weight", np.zeros(68, np.uint8), raw_dtype=GGMLQuantizationType.Q8_0),
    ),
    r"linear rope scaling combined with": lambda writer: (
        number("llama.rope.scaling.factor", 2.0, FLOAT)(writer),
        added("rope_freqs.weight", np.ones(8))(writer),
    ),
}
HARMLESS = {
    "no experts": number("llama.expert_count", 0),
    "experts used of none": number("llama.expert_used_count", 0),
    "a note": number("llama.rope.scaling.original_context_length", 64),
    "rotary buffer": added("blk.0.attn_rot_embd.weight", np.ones(8)),
    "no vocab_size": number("llama.vocab_size", None),
    "no key_length": number("llama.attention.key_length", None),
    "scaling none": number("llama.rope.scaling.type", "none", TEXT),
}


@pytest.fixture(scope="module")
def tiny():
    return random_llama()


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_refused(message, tiny, tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", tiny, edit=CONTRADICTIONS[message])
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(path)
    assert "bad.gguf" in str(raised.value)


@pytest.mark.parametrize("message", ADDITIONS)
def test_models_with_more_than_is_computed_are_refused(message, tiny, tmp_path):
    path = write_gguf(tmp_path / "more.gguf", tiny, edit=ADDITIONS[message])
    with pytest.raises(UnsupportedError, match=message) as raised:
        open_checkpoint(path)
    assert "more.gguf" in str(raised.value)


@pytest.mark.parametrize("what", HARMLESS)
def test_additions_without_effect_change_nothing(what, tiny, tmp_path):
    plain = open_checkpoint(write_gguf(tmp_path / "plain.gguf", tiny))
    edited = open_checkpoint(write_gguf(tmp_path / "edited.gguf", tiny, edit=HARMLESS[what]))
    assert edited.config == plain.config
    assert edited.tensors.keys() == plain.tensors.keys()


def test_every_tensor_has_a_distinct_name_in_the_file(tiny, tmp_path):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny)).config
    names = [file_name(name) for name in config.tensor_shapes()]
    assert len(set(names)) == len(names)
    assert config.vocab_size == TINY["vocab_size"]
