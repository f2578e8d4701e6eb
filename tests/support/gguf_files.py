"""GGUF files for tests: the last steps of the gguf package's writer, and files built byte by byte."""

from __future__ import annotations

import struct

import gguf
import numpy as np

from minillm.checkpoints import StoredTensor
from minillm.quantization import QuantizedMatrix


def read_values(tensor: StoredTensor) -> np.ndarray:
    """Return a tensor's values as float32."""
    with np.errstate(all="ignore"):
        values = tensor.read()
        return values.dequantize() if isinstance(values, QuantizedMatrix) else values


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added to a writer, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def string_bytes(value: bytes) -> bytes:
    """Return a string with its length, as a GGUF file stores it."""
    return struct.pack("<Q", len(value)) + value


def key_bytes(name: bytes, kind: int, value: bytes) -> bytes:
    """Return a metadata key with the number of its type and its value."""
    return string_bytes(name) + struct.pack("<I", kind) + value


def tensor_bytes(name=b"x", dims=(4,), kind=0, offset=0, num_axes=None) -> bytes:
    """Return a tensor's entry in the table of tensors. Axes are listed innermost first."""
    num_axes = len(dims) if num_axes is None else num_axes
    return string_bytes(name) + struct.pack(f"<I{len(dims)}QIQ", num_axes, *dims, kind, offset)


def file_bytes(keys=(), tensors=(), body=bytes(64), *, version=3, counts=None, magic=b"GGUF") -> bytes:
    """Return a whole file. `counts` replaces the numbers of tensors and keys in the header."""
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + body
