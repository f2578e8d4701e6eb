"""safetensors: a JSON header with the name, type, shape and byte range of each tensor, then the tensors' bytes.

    8 bytes      N, the header's length (u64, little-endian)
    N bytes      {"model.norm.weight": {"dtype": "BF16", "shape": [576], "data_offsets": [0, 1152]}, ...}
    the rest     the tensors' bytes; offsets count from here; no gaps, no overlaps

minillm does not use the `safetensors` library. For NumPy, that library copies every tensor, and it cannot return
bfloat16, in which most models are stored, because NumPy has no such type. Here every tensor is a view into the mapped
file, whatever its type.

Source: huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import StoredTensor
from minillm.checkpoints.fields import Fields, parse_json
from minillm.checkpoints.mapped_file import map_file
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES

MAX_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
MAX_AXES = 8
DTYPES = ("F32", "F16", "BF16")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)  # a name without slashes: a path could leave the folder


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder under their names in the files: from the single file, or from all shards.

    Raises
    ------
    CheckpointError
        A file is missing or damaged, or a shard does not hold the tensors that the index lists for it.
    UnsupportedError
        A tensor has a dtype other than F32, F16 and BF16.
    """
    if (folder / SINGLE_FILE).exists():
        return read_safetensors(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder}: contains neither {SINGLE_FILE!r} nor {INDEX_FILE!r}")
    weight_map = Fields(parse_json(read_file(index), str(index)), str(index)).section("weight_map")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({_shard_name(weight_map, name) for name in weight_map.values}):
        for name, tensor in read_safetensors(folder / shard).items():
            if weight_map.values.get(name) != shard:
                raise CheckpointError(
                    f"{folder / shard}: holds tensor {name!r}, which {INDEX_FILE} does not list for this file"
                )
            tensors[name] = tensor
    missing = sorted(weight_map.values.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{folder / weight_map.values[missing[0]]}: lacks tensor {missing[0]!r}, which {INDEX_FILE} lists for this "
            "file"
        )
    return tensors


def read_file(path: Path) -> bytes:
    """Return the bytes of a small file; raise CheckpointError if the file is missing, empty or too large."""
    data = map_file(path)
    if len(data) > MAX_HEADER:
        raise CheckpointError(f"{path}: {len(data):,} bytes, expected at most {MAX_HEADER:,}")
    return data[:]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file as views into it. Raises the errors of `read_folder`."""
    data = map_file(path)
    if len(data) < 8:
        raise CheckpointError(
            f"{path}: {len(data)} bytes are too few for a header; if a download was interrupted, download the file "
            "again"
        )
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER):
        raise CheckpointError(
            f"{path}: the header needs {length:,} bytes but {len(data) - 8:,} remain, and at most {MAX_HEADER:,} are "
            "allowed; if a download was interrupted, download the file again"
        )
    header = Fields(parse_json(data[8 : 8 + length], f"{path}, header"), f"{path}, header")
    body = np.frombuffer(data, np.uint8)[8 + length :]
    extents = []
    tensors = {}
    for name in header.values:
        if name == "__metadata__":  # free-form notes, not a tensor
            continue
        kind, shape, (begin, end) = _read_entry(header.section(name))
        extents.append((begin, end, name))
        tensors[name] = StoredTensor(name, shape, STORAGE_TYPES[kind], body[begin:end], file=str(path))
    _check_extents(extents, len(body), path)
    return tensors


def _shard_name(weight_map: Fields, tensor: str) -> str:
    name = weight_map.text(tensor)
    if not SHARD_NAME.fullmatch(name):
        raise weight_map.invalid(tensor, name, "the name of a .safetensors file in this folder")
    return name


def _read_entry(entry: Fields) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return a tensor's type, shape and byte range; raise CheckpointError if they contradict each other."""
    kind = entry.text("dtype")
    if kind not in DTYPES:
        raise UnsupportedError(f"{entry.source}: dtype is {kind!r:.60}; dtypes that can be read: {', '.join(DTYPES)}")
    shape = _integers(entry, "shape", range(MAX_AXES + 1))
    begin, end = _integers(entry, "data_offsets", range(2, 3))
    expected = STORAGE_TYPES[kind].num_bytes(math.prod(shape))
    if end - begin != expected:
        raise CheckpointError(
            f"{entry.source}: data_offsets {begin:,}..{end:,} span {end - begin:,} bytes, "
            f"expected {expected:,} for {kind} of shape {list(shape)}"
        )
    return kind, shape, (begin, end)


def _integers(entry: Fields, name: str, lengths: range) -> tuple[int, ...]:
    values: Any = entry.get(name)
    fits = isinstance(values, list) and len(values) in lengths
    if fits and all(type(value) is int and 0 <= value < 2**63 for value in values):
        return tuple(values)
    raise entry.invalid(name, values, f"a list of {lengths.start} to {lengths.stop - 1} integers from 0 up")


def _check_extents(extents: list[tuple[int, int, str]], num_bytes: int, path: Path) -> None:
    """Raise CheckpointError if the byte ranges overlap, leave a gap, or end before or after the file does."""
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at {begin:,}, expected {position:,}, where the previous one ends"
            )
        position = end
    if position != num_bytes:
        raise CheckpointError(
            f"{path}: tensors take {position:,} bytes but the file has {num_bytes:,}; "
            "if a download was interrupted, download the file again"
        )
