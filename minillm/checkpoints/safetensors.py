"""safetensors: tensors one after another, and in front of them a JSON header that says which bytes are whose.

    8 bytes      N, the header's length (u64, little-endian)
    N bytes      {"model.norm.weight": {"dtype": "BF16", "shape": [576], "data_offsets": [0, 1152]}, ...}
    the rest     the tensors' bytes; offsets count from here, without a gap and without an overlap

The `safetensors` library is not used for it: to NumPy it gives copies, and it cannot give bfloat16 at all, which
NumPy lacks and most models are stored in. Here tensors are views into the mapped file, whatever their type.

The format: huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.checkpoint import StoredTensor, map_file
from minillm.checkpoints.fields import Fields, parse_json
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import STORAGE_TYPES

MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
MAX_AXES = 8
DTYPES = ("F32", "F16", "BF16")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)  # a plain name: a path could lead out of the folder


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, under the files' own names: from the one file, or from an index's shards.

    Raises
    ------
    CheckpointError when a file is absent or damaged, or when the index and the shards disagree.
    UnsupportedError for a dtype other than F32, F16 and BF16.
    """
    if (folder / SINGLE_FILE).exists():
        return read_safetensors(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE!r} nor {INDEX_FILE!r}")
    shard_of = Fields(parse_json(read_whole(index), str(index)), str(index)).section("weight_map")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({_shard_name(shard_of, name) for name in shard_of.values}):
        for name, tensor in read_safetensors(folder / shard).items():
            if shard_of.values.get(name) != shard:
                raise CheckpointError(
                    f"{folder / shard}: holds tensor {name!r}, which {INDEX_FILE} does not place here"
                )
            tensors[name] = tensor
    absent = sorted(shard_of.values.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{folder / shard_of.values[absent[0]]}: lacks tensor {absent[0]!r} that {INDEX_FILE} places here"
        )
    return tensors


def read_whole(path: Path) -> bytes:
    """A small file's bytes."""
    data = map_file(path)
    if len(data) > MAX_HEADER:
        raise CheckpointError(f"{path}: {len(data):,} bytes, wanted at most {MAX_HEADER:,}")
    return data[:]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, as views into it; raises as `read_folder` does."""
    data = map_file(path)
    if len(data) < 8:
        raise CheckpointError(f"{path}: {len(data)} bytes are too few for a header (truncated download?)")
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER):
        raise CheckpointError(
            f"{path}: the header wants {length:,} bytes but {len(data) - 8:,} remain "
            f"(at most {MAX_HEADER:,}; truncated download? delete the file and fetch it again)"
        )
    header = Fields(parse_json(data[8 : 8 + length], f"{path}, header"), f"{path}, header")
    body = np.frombuffer(data, np.uint8)[8 + length :]
    extents = []
    tensors = {}
    header.values.pop("__metadata__", None)  # notes of whoever wrote the file
    for name in header.values:
        kind, shape, (begin, end) = _read_entry(header.section(name))
        extents.append((begin, end, name))
        tensors[name] = StoredTensor(name, shape, STORAGE_TYPES[kind], body[begin:end])
    _check_extents(extents, len(body), path)
    return tensors


def _shard_name(shard_of: Fields, tensor: str) -> str:
    name = shard_of.text(tensor)
    if not SHARD_NAME.fullmatch(name):
        raise shard_of.wrong(tensor, name, "the plain name of a .safetensors file in this folder")
    return name


def _read_entry(entry: Fields) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """A tensor's type, shape and extent, which agree with each other."""
    kind = entry.text("dtype")
    if kind not in DTYPES:
        raise UnsupportedError(f"{entry.where}: dtype is {kind!r:.60}; dtypes that can be read: {', '.join(DTYPES)}")
    shape = _whole_numbers(entry, "shape", range(MAX_AXES + 1))
    begin, end = _whole_numbers(entry, "data_offsets", range(2, 3))
    wanted = STORAGE_TYPES[kind].num_bytes(math.prod(shape))
    if end - begin != wanted:
        raise CheckpointError(
            f"{entry.where}: data_offsets {begin:,}..{end:,} span {end - begin:,} bytes, "
            f"wanted {wanted:,} for {kind} of shape {list(shape)}"
        )
    return kind, shape, (begin, end)


def _whole_numbers(entry: Fields, name: str, lengths: range) -> tuple[int, ...]:
    values: Any = entry.get(name)
    fits = isinstance(values, list) and len(values) in lengths
    if fits and all(type(value) is int and 0 <= value < 2**63 for value in values):
        return tuple(values)
    raise entry.wrong(name, values, f"a list of {lengths.start} to {lengths.stop - 1} whole numbers")


def _check_extents(extents: list[tuple[int, int, str]], num_bytes: int, path: Path) -> None:
    """Sorted by where they begin, tensors must follow each other and fill the file exactly."""
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at {begin:,}, wanted {position:,}, where the last one ends"
            )
        position = end
    if position != num_bytes:
        raise CheckpointError(
            f"{path}: tensors take {position:,} bytes but the file has {num_bytes:,} for them "
            "(truncated download? delete the file and fetch it again)"
        )
