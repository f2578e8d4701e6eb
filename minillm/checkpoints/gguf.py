"""GGUF: one file that holds a whole model: metadata, then a table of tensors, then the tensors' bytes.

    +---------------------------------------------------------------+  byte 0
    | "GGUF"   version u32   number of tensors u64   of keys u64    |
    +---------------------------------------------------------------+  24
    | metadata   key string, type u32, value       (once per key)   |  general.architecture = "llama"
    |                                                               |  llama.block_count    = 30
    |                                                               |  tokenizer.ggml.tokens = ["<|endoftext|>", ...
    +---------------------------------------------------------------+
    | tensors    name string, number of axes u32, axes u64 each,    |  blk.0.attn_q.weight, 2 axes: 576, 576,
    |            type u32, offset u64           (once per tensor)   |  type 3 (Q4_1), at offset 53,084,160
    +---------------------------------------------------------------+
    | zeros, up to a multiple of general.alignment (32)             |
    +---------------------------------------------------------------+  data start: offsets count from here
    | the tensors' bytes, each tensor aligned to general.alignment  |
    +---------------------------------------------------------------+

Numbers are little-endian; this reader rejects big-endian files. A string is its length in bytes (u64), then UTF-8. An
array is the type of its elements (u32), their number (u64), then the elements. Axes are listed innermost first, the
reverse of NumPy's order.

A large model may be split into `model-00001-of-00003.gguf` and so on. Each part is a complete GGUF file with some of
the tensors. The first part holds all metadata; the other parts hold only the keys that describe the split:

    split.no              0, 1, 2: the number in the file name, minus one
    split.count           3
    split.tensors.count   the number of tensors in all parts

The file is memory-mapped, and no value in it is trusted: every length, count and offset is checked against the actual
file size before use. A damaged file therefore causes an error message, never a large allocation.

Source: docs/gguf.md in ggml-org/ggml.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import StoredTensor
from minillm.checkpoints.gguf_cursor import Cursor
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES

VERSIONS = (2, 3)  # version 3 only added big-endian files; version 1 had 32-bit counts
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"

MIN_METADATA_BYTES = 8 + 4 + 1  # an empty key, its type, one byte
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, the number of axes, one axis, type and offset

# Tensor types by their number in ggml. Only the types in STORAGE_TYPES can be read.
TENSOR_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


@dataclass(frozen=True)
class GGUFFile:
    """A parsed GGUF file. For a split model, `path`, `version` and `metadata` come from the first part.

    Attributes
    ----------
    path : the file, or the first part
    version : the version of the format, 2 or 3
    metadata : key -> value; arrays are lists
    tensors : the tensors of the file, or of all parts, under their names in the file
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file. If `path` is any part of a split model, parse the headers of all parts.

    The tensors are views into the mapped file; their bytes are not read.

    Raises
    ------
    CheckpointError
        The file is damaged, a part is missing, or the parts belong to different models.
    UnsupportedError
        The file has another version, is big-endian, or holds a tensor of a type that cannot be read.
    """
    file = _read_file(path)
    if _split_field(file, SPLIT_COUNT, default=1) in (0, 1):
        return file
    return _join([file if part == path else _read_file(part) for part in _part_paths(file)])


def _read_file(path: Path) -> GGUFFile:
    cursor = Cursor(path)
    version, num_tensors, num_keys = _read_header(cursor)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, _alignment(metadata, path))
    return GGUFFile(path, version, metadata, tensors)


def _split_field(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 0:
        found = "missing" if value is None else f"{value!r:.60}"
        raise CheckpointError(f"{file.path}: metadata {key!r} is {found}, expected an integer of at least 0")
    return value


def _part_paths(file: GGUFFile) -> list[Path]:
    """Return the paths of all parts, derived from the name of one; raise CheckpointError if one is missing."""
    number, count = _split_field(file, SPLIT_NO) + 1, _split_field(file, SPLIT_COUNT)
    name = PART_NAME.fullmatch(file.path.name)
    if name is None:
        raise CheckpointError(
            f"{file.path}: is part {number} of {count} of a split model, but its name does not end in "
            f"-{number:05d}-of-{count:05d}.gguf, so the other parts cannot be found; restore the names of all parts"
        )
    if (int(name[2]), int(name[3])) != (number, count):
        raise CheckpointError(
            f"{file.path}: is named part {int(name[2])} of {int(name[3])}, but by its metadata it is part {number} of "
            f"{count}; restore the names of all parts"
        )
    paths = [file.path.with_name(f"{name[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            f"{file.path}: the folder lacks {len(missing)} of the {count} parts of the model: "
            f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
        )
    return paths


def _join(parts: list[GGUFFile]) -> GGUFFile:
    """Join all parts, in order, into one file; raise CheckpointError if they belong to different models."""
    first = parts[0]
    tensors: dict[str, StoredTensor] = {}
    for index, part in enumerate(parts):
        _check_part(part, index, first)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r} is also in an earlier part")
            tensors[name] = tensor
    if len(tensors) != (expected := _split_field(first, SPLIT_TENSORS)):
        raise CheckpointError(
            f"{first.path}: the {len(parts)} parts hold {len(tensors):,} tensors, but metadata {SPLIT_TENSORS!r} is "
            f"{expected:,}"
        )
    return GGUFFile(first.path, first.version, first.metadata, tensors)


def _check_part(part: GGUFFile, index: int, first: GGUFFile) -> None:
    if (found := _split_field(part, SPLIT_NO)) != index:
        raise CheckpointError(
            f"{part.path}: is named part {index + 1}, but by its metadata it is part {found + 1}; restore the names of "
            "all parts"
        )
    for key, value in part.metadata.items():
        if key != SPLIT_NO and key != "general.alignment" and first.metadata.get(key) != value:
            raise CheckpointError(
                f"{part.path}: metadata {key!r} is {value!r:.60}, but {first.metadata.get(key)!r:.60} in the first "
                "part; they belong to different models"
            )


def _read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Return the version, the number of tensors, and the number of metadata keys."""
    magic = cursor.take(4)
    if magic == b"FUGG":
        raise _big_endian(cursor.path)
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path}: not a GGUF file, because it does not begin with 'GGUF'")
    version = cursor.unsigned32()
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise _big_endian(cursor.path)
    if version not in VERSIONS:
        raise UnsupportedError(f"{cursor.path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors = cursor.count(MIN_TENSOR_BYTES, "tensors")
    num_keys = cursor.count(MIN_METADATA_BYTES, "metadata keys")
    return version, num_tensors, num_keys


def _big_endian(path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: a big-endian GGUF file; only little-endian files can be read (convert it with gguf-convert-endian "
        "from the gguf package)"
    )


def _read_metadata(cursor: Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.reading = f"metadata key {index}"
        key = cursor.string()
        cursor.reading = f"metadata {key!r}"
        if key in metadata:
            raise cursor.damaged("appears twice")
        metadata[key] = cursor.value(cursor.unsigned32())
    return metadata


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: metadata 'general.alignment' is {alignment!r:.60}, expected a power of two")
    return alignment


def _read_tensors(cursor: Cursor, num_tensors: int, alignment: int) -> dict[str, StoredTensor]:
    entries = [_read_tensor_entry(cursor, index) for index in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    extents = []
    for name, shape, kind, offset in entries:
        cursor.reading = f"tensor {name!r}"
        if name in tensors:
            raise cursor.damaged("appears twice")
        if offset % alignment:
            raise cursor.damaged(f"starts at offset {offset:,}, expected a multiple of {alignment}")
        begin = start + offset
        end = begin + STORAGE_TYPES[kind].num_bytes(math.prod(shape))
        if end > cursor.size:
            raise cursor.truncated(f"needs bytes {begin:,}..{end:,}", f"the file ends at {cursor.size:,}")
        data = np.frombuffer(cursor.data, np.uint8, end - begin, begin)
        tensors[name] = StoredTensor(name, shape, STORAGE_TYPES[kind], data, file=str(cursor.path))
        extents.append((begin, end, name))
    _check_overlap(extents, cursor.path)
    return tensors


def _read_tensor_entry(cursor: Cursor, index: int) -> tuple[str, tuple[int, ...], str, int]:
    """Return a tensor's name, shape (outermost axis first), type, and offset from the data start."""
    cursor.reading = f"tensor {index}"
    name = cursor.string()
    cursor.reading = f"tensor {name!r}"
    num_axes = cursor.unsigned32()
    if not 1 <= num_axes <= MAX_AXES:
        raise cursor.damaged(f"has {num_axes:,} axes, expected 1 to {MAX_AXES}")
    shape = tuple(cursor.unsigned64() for _ in range(num_axes))[::-1]
    if 0 in shape:
        raise cursor.damaged(f"has shape {list(shape)}, expected no axis of size 0")
    number = cursor.unsigned32()
    kind = TENSOR_TYPES.get(number, f"type {number}, which is unknown")
    if kind not in STORAGE_TYPES:
        raise UnsupportedError(
            f"{cursor.path}: {cursor.reading} is {kind}; types that can be read: {', '.join(STORAGE_TYPES)}"
        )
    block_size = STORAGE_TYPES[kind].block_size
    if shape[-1] % block_size:
        raise cursor.damaged(
            f"has rows of {shape[-1]:,} values, expected a multiple of {block_size}, the block size of {kind}"
        )
    return name, shape, kind, cursor.unsigned64()


def _check_overlap(extents: list[tuple[int, int, str]], path: Path) -> None:
    extents.sort()
    for (_, end, name), (begin, _, next_name) in itertools.pairwise(extents):
        if begin < end:
            raise CheckpointError(
                f"{path}: tensor {next_name!r} begins at byte {begin:,}, inside tensor {name!r}, which ends at {end:,}"
            )
