"""Checkpoint: a model at rest. Its config, its tensors under this project's names, and its tokenizer.

Opening reads headers only. Tensors stay views into the memory-mapped file until somebody calls `read`, so a
checkpoint opens in milliseconds and the operating system fetches from disk just the pages that are touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from minillm.config import ModelConfig
from minillm.errors import CheckpointError, UnsupportedError
from minillm.quantization import QuantizedMatrix, StorageType
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file.

    Attributes
    ----------
    name : what the file calls it, for messages
    shape : row-major; of a matrix, outputs first
    storage : how its bytes become numbers
    data : uint8 [num_bytes], a view into the mapped file; it cannot be written to
    interleaved_heads : how many heads' rows are interleaved as GGUF keeps Llama's Q and K; 0 for none
    """

    name: str
    shape: tuple[int, ...]
    storage: StorageType
    data: np.ndarray
    interleaved_heads: int = 0

    def read(self) -> np.ndarray | QuantizedMatrix:
        """The tensor's numbers: a float32 array, or a QuantizedMatrix where the file holds integer codes.

        F32 is a view into the file, which cannot be written to; every other type is converted into new memory.
        """
        data = self.data
        if self.interleaved_heads:
            data = split_halves(data.reshape(self.shape[0], -1), self.interleaved_heads).reshape(-1)
        if data.ctypes.data % self.storage.block.alignment:
            data = data.copy()  # files may place a float at an odd address; kernels may not
        numbers = self.storage.read(data, self.shape)
        release_pages(self.data)
        return numbers

    def __repr__(self):
        size = " x ".join(map(str, self.shape))
        return f"StoredTensor({self.name!r}, {size}, {self.storage.name}, {self.data.nbytes:,} bytes)"


class Checkpoint:
    """What `open_checkpoint` gives.

    Attributes
    ----------
    path : the file or folder
    config : the model's numbers
    tensors : a StoredTensor for every name in `config.tensor_shapes()`, and no other; shapes agree
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tensors: dict[str, StoredTensor],
        load_tokenizer: Callable[[], Tokenizer | None],
    ):
        self.path = path
        self.config = config
        self.tensors = tensors
        self._load_tokenizer = load_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, built when first asked for; None when it carries none.

        Raises
        ------
        CheckpointError when it knows more tokens than the embedding has rows; whatever building it raises.
        """
        tokenizer = self._load_tokenizer()
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} tokens but the embedding matrix only "
                f"{self.config.vocab_size:,} rows; they belong to different models"
            )
        return tokenizer

    def __repr__(self):
        size = sum(tensor.data.nbytes for tensor in self.tensors.values())
        kinds = ", ".join(sorted({str(tensor.storage) for tensor in self.tensors.values()}))
        return (
            f"Checkpoint({self.path.name}: {self.config.architecture}, {self.config.num_layers} layers, "
            f"{len(self.tensors)} tensors, {kinds}, {size / 1e6:.1f} MB)"
        )


def map_file(path: Path) -> mmap.mmap:
    """Map a file's bytes read-only into memory: nothing is read from disk until it is touched.

    The mapping lives as long as an array into it does; nobody may shorten the file meanwhile. CheckpointError when
    the file is absent or empty.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: the file is empty (interrupted download? delete it, fetch it again)")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def release_pages(data: np.ndarray) -> None:
    """Give back the memory that holds mapped bytes for now; they are read from the file again if need be.

    Without it, a model would lie in memory twice while it loads: as its file's pages, and as what they became.
    """
    mapped = data.base if isinstance(data.base, mmap.mmap) else getattr(data.base, "obj", None)
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put each head's rows back into two halves: [H * K, ...] -> [H * K, ...].

    Rotary embeddings turn pairs of a head's numbers. llama.cpp pairs neighbours (0 with 1, 2 with 3, ...) and
    GGUF files order the rows of Q and K for that; Hugging Face, and this project, pair the first half with the
    second (0 with K/2, 1 with K/2 + 1, ...).
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, K/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def check_config(config: ModelConfig, num_tensors: int, where: str) -> None:
    """Raise CheckpointError unless the config's numbers fit each other and could describe `num_tensors` tensors."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{where}: head_dim is {config.head_dim}, wanted an even number: rotary embeddings turn pairs"
        )
    if config.num_layers > num_tensors:
        raise CheckpointError(f"{where}: claims {config.num_layers:,} layers but holds {num_tensors:,} tensors in all")


def match_tensors(
    config: ModelConfig,
    found: dict[str, StoredTensor],
    file_name: Callable[[str], str],
    unused: Iterable[str],
    where: str,
) -> dict[str, StoredTensor]:
    """Give the tensors of a file this project's names, making sure each is there and none is left over.

    Parameters
    ----------
    config : says which tensors the model has, and their shapes
    found : the file's tensors under its own names
    file_name : from this project's name of a tensor to the file's
    unused : the file's names of tensors that may be left over, because nothing is computed from them

    Raises
    ------
    CheckpointError for a missing or misshapen tensor. UnsupportedError for one left over: a model with more
    weights than are used here is another model, and would answer something else.
    """
    names = {name: file_name(name) for name in config.tensor_shapes()}
    for name, shape in config.tensor_shapes().items():
        tensor = found.get(names[name])
        if tensor is None:
            raise CheckpointError(f"{where}: tensor {names[name]!r} is missing, wanted one of shape {list(shape)}")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"wanted {list(shape)} by the config (outputs first)"
            )
        if len(shape) == 1 and tensor.storage.is_quantized:
            raise UnsupportedError(
                f"{where}: tensor {tensor.name!r} is a vector stored as {tensor.storage.name}, wanted floats"
            )
    left_over = sorted(found.keys() - set(names.values()) - set(unused))
    if left_over:
        raise UnsupportedError(
            f"{where}: {len(left_over)} tensors have no place in the model its config describes, "
            f"first {left_over[0]!r}; leaving them out would compute another model"
        )
    return {name: found[names[name]] for name in names}
