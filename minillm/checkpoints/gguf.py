"""GGUF: one file that holds a whole model. Metadata first, then a table of tensors, then their bytes.

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
    | the tensors' bytes, each beginning at a multiple of alignment |
    +---------------------------------------------------------------+

Numbers are little-endian. A string is its length in bytes (u64), then UTF-8. An array is the type of its
elements (u32), their number (u64), then the elements. Axes are listed innermost first: the reverse of NumPy.

The file is mapped, not read, and nothing in it is believed: every length, count and offset is held against the
bytes that are really there before it is used, so a damaged file costs an error message and no memory.

The format: docs/gguf.md in ggml-org/ggml.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import StoredTensor, map_file
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES

VERSIONS = (2, 3)  # 3 only added big-endian files; 1 had 32-bit counts
MAX_AXES = 4
MAX_NESTING = 4  # arrays in arrays; real files have none
DEFAULT_ALIGNMENT = 32

# Types of metadata values.
SCALARS = {  # number in the file -> layout
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
BOOL, STRING, ARRAY = 7, 8, 9
# What a value takes at the least: an element type and a count for an array, a length for a string.
SMALLEST_VALUE = {kind: layout.size for kind, layout in SCALARS.items()} | {BOOL: 1, STRING: 8, ARRAY: 12}
SMALLEST_METADATA = 8 + 4 + 1  # an empty key, its type, one byte
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one axis, type and offset

# Types of tensors, in ggml's numbering; those in STORAGE_TYPES can be read.
TENSOR_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file: metadata as plain Python values (lists for arrays), and its tensors under its own names."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse a GGUF file's header; the tensors' bytes stay where they are.

    Raises
    ------
    CheckpointError when the file is damaged. UnsupportedError for another version, for a big-endian file, for a
    part of a split file, and for tensor types that cannot be read.
    """
    cursor = _Cursor(path)
    version, num_tensors, num_keys = _read_header(cursor)
    metadata = _read_metadata(cursor, num_keys)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError(
            f"{path}: one of the {metadata['split.count']} parts of a split model; "
            "merge them first (llama.cpp: llama-gguf-split --merge)"
        )
    tensors = _read_tensors(cursor, num_tensors, _alignment(metadata, path))
    return GGUFFile(path, version, metadata, tensors)


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """The version, the number of tensors, and the number of metadata keys."""
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{cursor.path}: not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.unsigned32()
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise UnsupportedError(f"{cursor.path}: a big-endian GGUF file; only little-endian ones can be read")
    if version not in VERSIONS:
        raise UnsupportedError(f"{cursor.path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors = cursor.count(SMALLEST_TENSOR, "tensors")
    num_keys = cursor.count(SMALLEST_METADATA, "metadata keys")
    return version, num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
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
        raise CheckpointError(f"{path}: metadata 'general.alignment' is {alignment!r:.60}, wanted a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, StoredTensor]:
    entries = [_read_tensor_entry(cursor, index) for index in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    extents = []
    for name, shape, kind, offset in entries:
        cursor.reading = f"tensor {name!r}"
        if name in tensors:
            raise cursor.damaged("appears twice")
        if offset % alignment:
            raise cursor.damaged(f"lies at offset {offset:,}, wanted a multiple of {alignment}")
        begin = start + offset
        end = begin + STORAGE_TYPES[kind].num_bytes(math.prod(shape))
        if end > cursor.size:
            raise cursor.truncated(f"wants bytes {begin:,}..{end:,}", f"the file ends at {cursor.size:,}")
        data = np.frombuffer(cursor.data, np.uint8, end - begin, begin)
        tensors[name] = StoredTensor(name, shape, STORAGE_TYPES[kind], data)
        extents.append((begin, end, name))
    _check_overlap(extents, cursor.path)
    return tensors


def _read_tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], str, int]:
    """A tensor's name, its shape (outermost axis first), its type, and its offset from the data's start."""
    cursor.reading = f"tensor {index}"
    name = cursor.string()
    cursor.reading = f"tensor {name!r}"
    num_axes = cursor.unsigned32()
    if not 1 <= num_axes <= MAX_AXES:
        raise cursor.damaged(f"has {num_axes:,} axes, wanted 1 to {MAX_AXES}")
    shape = tuple(cursor.unsigned64() for _ in range(num_axes))[::-1]
    if 0 in shape:
        raise cursor.damaged(f"has shape {list(shape)}, wanted no zero in it")
    number = cursor.unsigned32()
    kind = TENSOR_TYPES.get(number, f"type {number}, unknown here")
    if kind not in STORAGE_TYPES:
        raise UnsupportedError(
            f"{cursor.path}: {cursor.reading} is {kind}; types that can be read: {', '.join(STORAGE_TYPES)}"
        )
    block_size = STORAGE_TYPES[kind].block_size
    if shape[-1] % block_size:
        raise cursor.damaged(f"has rows of {shape[-1]:,} values, wanted whole blocks of {block_size} as {kind}")
    return name, shape, kind, cursor.unsigned64()


def _check_overlap(extents: list[tuple[int, int, str]], path: Path) -> None:
    extents.sort()
    for (_, end, name), (begin, _, next_name) in itertools.pairwise(extents):
        if begin < end:
            raise CheckpointError(
                f"{path}: tensor {next_name!r} begins at byte {begin:,}, inside tensor {name!r}, which ends at {end:,}"
            )


class _Cursor:
    """A position in the mapped file. Each method reads one thing and moves on, if that many bytes remain."""

    def __init__(self, path: Path):
        self.path = path
        self.data = map_file(path)
        self.size = len(self.data)
        self.position = 0
        self.reading = "the header"  # for messages: what the bytes at hand belong to

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.reading} {problem}")

    def truncated(self, wanted: str, found: str) -> CheckpointError:
        return self.damaged(f"{wanted} but {found} (truncated download? delete the file and fetch it again)")

    def need(self, num_bytes: int) -> None:
        """Raise CheckpointError unless `num_bytes` remain."""
        remaining = self.size - self.position
        if num_bytes > remaining:
            raise self.truncated(f"wants {num_bytes:,} bytes at byte {self.position:,}", f"only {remaining:,} remain")

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def scalar(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def unsigned32(self) -> int:
        return self.scalar(SCALARS[4])

    def unsigned64(self) -> int:
        return self.scalar(SCALARS[10])

    def count(self, smallest: int, what: str) -> int:
        """The number of things that follow here or later, each of which takes at least `smallest` bytes."""
        count = self.unsigned64()
        if count * smallest > self.size - self.position:
            raise self.truncated(
                f"announces {count:,} {what} of at least {smallest} bytes each",
                f"only {self.size - self.position:,} bytes remain",
            )
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings in a row. A vocabulary has 100,000 of them, so this loop is kept tight."""
        data, size, position = self.data, self.size, self.position
        read_length = SCALARS[10].unpack_from
        strings = []
        for _ in range(count):
            begin = position + 8
            if begin > size:
                self.position = position
                self.need(8)
            end = begin + read_length(data, position)[0]
            if end > size:
                self.position = begin
                self.need(end - begin)
            try:
                strings.append(str(data[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.damaged(f"is not UTF-8 at byte {begin + error.start:,}") from None
            position = end
        self.position = position
        return strings

    def value(self, kind: int, nesting: int = 0) -> Any:
        """One metadata value of a type given by its number."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == BOOL:
            return self.array_of_bools(1)[0]
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(nesting + 1)
        raise self.damaged(f"has a value of type {kind:,}, wanted 0 to {max(SMALLEST_VALUE)}")

    def array(self, nesting: int) -> list[Any]:
        if nesting > MAX_NESTING:
            raise self.damaged(f"has arrays nested more than {MAX_NESTING} deep")
        kind = self.unsigned32()
        if kind not in SMALLEST_VALUE:
            raise self.damaged(f"has elements of type {kind:,}, wanted 0 to {max(SMALLEST_VALUE)}")
        count = self.count(SMALLEST_VALUE[kind], "elements")
        if kind in SCALARS:
            layout = SCALARS[kind]
            return np.frombuffer(self.take(count * layout.size), layout.format).tolist()
        if kind == BOOL:
            return self.array_of_bools(count)
        if kind == STRING:
            return self.strings(count)
        return [self.array(nesting + 1) for _ in range(count)]

    def array_of_bools(self, count: int) -> list[bool]:
        values = self.take(count)
        if values.strip(b"\0\1"):
            raise self.damaged("has a truth value that is neither 0 nor 1")
        return [value == 1 for value in values]
