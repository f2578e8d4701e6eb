"""Cursor: read the numbers, strings and arrays of a GGUF file one after another."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.mapped_file import map_file
from minillm.errors import CheckpointError

MAX_NESTING = 4  # levels of arrays within arrays; real files have none

# Types of metadata values, by their number in the file.
SCALARS = {
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
# The fewest bytes that a value takes: an array has an element type and a count, a string has a length.
MIN_VALUE_BYTES = {kind: layout.size for kind, layout in SCALARS.items()} | {BOOL: 1, STRING: 8, ARRAY: 12}


class Cursor:
    """A position in a memory-mapped file.

    Each method reads one item and advances the position. It raises CheckpointError if too few bytes remain.
    """

    def __init__(self, path: Path):
        self.path = path
        self.data = map_file(path)
        self.size = len(self.data)
        self.position = 0
        self.reading = "the header"  # the item being read, for error messages

    def damaged(self, problem: str) -> CheckpointError:
        """Return the error to raise for an invalid item."""
        return CheckpointError(f"{self.path}: {self.reading} {problem}")

    def truncated(self, needed: str, found: str) -> CheckpointError:
        """Return the error to raise if the file is too short for the item."""
        return self.damaged(f"{needed} but {found}; if a download was interrupted, download the file again")

    def need(self, num_bytes: int) -> None:
        """Raise CheckpointError unless `num_bytes` remain."""
        remaining = self.size - self.position
        if num_bytes > remaining:
            raise self.truncated(f"needs {num_bytes:,} bytes at byte {self.position:,}", f"only {remaining:,} remain")

    def take(self, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes."""
        self.need(num_bytes)
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def scalar(self, layout: struct.Struct) -> Any:
        """Read one number."""
        return layout.unpack(self.take(layout.size))[0]

    def unsigned32(self) -> int:
        """Read a u32."""
        return self.scalar(SCALARS[4])

    def unsigned64(self) -> int:
        """Read a u64."""
        return self.scalar(SCALARS[10])

    def count(self, min_bytes: int, items: str) -> int:
        """Read a number of items, and check that the rest of the file can hold them at `min_bytes` bytes each."""
        count = self.unsigned64()
        if count * min_bytes > self.size - self.position:
            raise self.truncated(
                f"announces {count:,} {items} of at least {min_bytes} bytes each",
                f"only {self.size - self.position:,} bytes remain",
            )
        return count

    def string(self) -> str:
        """Read one string."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` consecutive strings. The loop is written for speed: a vocabulary may have 100,000 strings."""
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
        """Read one metadata value; `kind` is the number of its type."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == BOOL:
            return self.array_of_bools(1)[0]
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(nesting + 1)
        raise self.damaged(f"has a value of type {kind:,}, expected 0 to {max(MIN_VALUE_BYTES)}")

    def array(self, nesting: int) -> list[Any]:
        """Read one array, whose elements may be arrays."""
        if nesting > MAX_NESTING:
            raise self.damaged(f"has arrays nested more than {MAX_NESTING} levels deep")
        kind = self.unsigned32()
        if kind not in MIN_VALUE_BYTES:
            raise self.damaged(f"has elements of type {kind:,}, expected 0 to {max(MIN_VALUE_BYTES)}")
        count = self.count(MIN_VALUE_BYTES[kind], "elements")
        if kind in SCALARS:
            layout = SCALARS[kind]
            return np.frombuffer(self.take(count * layout.size), layout.format).tolist()
        if kind == BOOL:
            return self.array_of_bools(count)
        if kind == STRING:
            return self.strings(count)
        return [self.array(nesting + 1) for _ in range(count)]

    def array_of_bools(self, count: int) -> list[bool]:
        """Read `count` booleans of one byte each."""
        values = self.take(count)
        if values.strip(b"\0\1"):
            raise self.damaged("has a boolean that is neither 0 nor 1")
        return [value == 1 for value in values]
