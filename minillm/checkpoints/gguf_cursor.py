"""Cursor: the smallest parts of a GGUF file, read one after another: numbers, strings, arrays."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import map_file
from minillm.errors import CheckpointError

MAX_NESTING = 4  # arrays in arrays; real files have none

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


class Cursor:
    """A position in the mapped file. Each method reads one thing and moves on, if that many bytes remain."""

    def __init__(self, path: Path):
        self.path = path
        self.data = map_file(path)
        self.size = len(self.data)
        self.position = 0
        self.reading = "the header"  # for messages: what the bytes at hand belong to

    def damaged(self, problem: str) -> CheckpointError:
        """The error to raise for what is being read."""
        return CheckpointError(f"{self.path}: {self.reading} {problem}")

    def truncated(self, wanted: str, found: str) -> CheckpointError:
        """The error to raise where more bytes are wanted than there are."""
        return self.damaged(f"{wanted} but {found} (truncated download? delete the file and fetch it again)")

    def need(self, num_bytes: int) -> None:
        """Raise CheckpointError unless `num_bytes` remain."""
        remaining = self.size - self.position
        if num_bytes > remaining:
            raise self.truncated(f"wants {num_bytes:,} bytes at byte {self.position:,}", f"only {remaining:,} remain")

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        self.need(num_bytes)
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def scalar(self, layout: struct.Struct) -> Any:
        """One number."""
        return layout.unpack(self.take(layout.size))[0]

    def unsigned32(self) -> int:
        """A u32."""
        return self.scalar(SCALARS[4])

    def unsigned64(self) -> int:
        """A u64."""
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
        """One string."""
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
        """One array, whose elements may be arrays."""
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
        """`count` truth values, a byte each."""
        values = self.take(count)
        if values.strip(b"\0\1"):
            raise self.damaged("has a truth value that is neither 0 nor 1")
        return [value == 1 for value in values]
