"""Checkpoint: a model on disk. It consists of a config, tensors under minillm's names, and a tokenizer.

Opening a checkpoint reads only headers. Each tensor is a view into the memory-mapped file until `read` converts it.
Opening therefore takes milliseconds, and the operating system reads only the pages that are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm.checkpoints.mapped_file import check_size, release_pages
from minillm.errors import CheckpointError
from minillm.model.config import ModelConfig
from minillm.quantization import QuantizedMatrix, StorageType
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes
    ----------
    name : the tensor's name in the file, for error messages
    shape : in row-major order; the shape of a matrix is (outputs, inputs)
    storage : the type that its bytes encode
    data : uint8, the tensor's bytes in file order, as a read-only view into the mapped file
    interleaved_heads : the number of heads whose rows are interleaved, as in Q and K of Llama GGUF files; 0 if none are
    is_transposed : True if the file stores the matrix as (inputs, outputs)
    offset : a number that `read` adds to every value
    file : path of the file, for error messages
    """

    name: str
    shape: tuple[int, ...]
    storage: StorageType
    data: np.ndarray
    interleaved_heads: int = 0
    is_transposed: bool = False
    offset: float = 0.0
    file: str = ""

    def read(self) -> np.ndarray | QuantizedMatrix:
        """Return the tensor's values: a float32 array, or a QuantizedMatrix if the file holds integer codes.

        The values are in new memory, so the file can change or disappear afterwards.

        Raises
        ------
        CheckpointError
            The file has been shortened since it was opened.
        """
        check_size(self.data, f"{self.file}, tensor {self.name!r}" if self.file else f"tensor {self.name!r}")
        data = self.data.reshape(-1)
        if self.interleaved_heads:
            data = deinterleave_heads(data.reshape(self.shape[0], -1), self.interleaved_heads).reshape(-1)
        if data.ctypes.data % self.storage.block.alignment:
            data = data.copy()  # a file may store floats at unaligned addresses, but the kernels need aligned ones
        numbers = self.storage.read(data, self.shape[::-1] if self.is_transposed else self.shape)
        if isinstance(numbers, np.ndarray):
            if self.is_transposed:
                numbers = np.ascontiguousarray(numbers.T)
            if self.offset:
                numbers = numbers + np.float32(self.offset)
        numbers = without_views(numbers, self.data)
        release_pages(self.data)
        return numbers

    def transposed(self) -> StoredTensor:
        """Return the (outputs, inputs) view of a float matrix that the file stores as (inputs, outputs)."""
        return replace(self, shape=self.shape[::-1], is_transposed=True)

    def outputs(self, start: int, stop: int) -> StoredTensor:
        """Return outputs `start` to `stop` (exclusive): some files store several matrices as one."""
        if (start, stop) == (0, self.shape[0]):
            return self
        if self.is_transposed:
            data = self.data.reshape(*self.shape[::-1], -1)[:, start:stop]
        else:
            data = self.data.reshape(self.shape[0], -1)[start:stop].reshape(-1)
        return replace(self, shape=(stop - start, *self.shape[1:]), data=data)

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.shape))
        return f"StoredTensor({self.name!r}, {size}, {self.storage.name}, {self.data.nbytes:,} bytes)"


class Checkpoint:
    """A model on disk, as returned by `open_checkpoint`.

    Attributes
    ----------
    path : the file or folder
    config : the model's dimensions and settings
    tensors : one StoredTensor for each name in `config.tensor_shapes()`, with the shape given there
    recommended_sampling : the sampling settings that the model's authors recommend, by field name of `SamplingParams`
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tensors: dict[str, StoredTensor],
        load_tokenizer: Callable[[], Tokenizer | None],
        recommended_sampling: Mapping[str, Any] | None = None,
    ):
        self.path = path
        self.config = config
        self.tensors = tensors
        self.recommended_sampling = dict(recommended_sampling or {})
        self._load_tokenizer = load_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, loaded on first access; None if the checkpoint has no tokenizer.

        Raises
        ------
        CheckpointError
            The tokenizer has more tokens than the embedding matrix has rows.
        TokenizerError
            The tokenizer's data is missing or invalid.
        """
        tokenizer = self._load_tokenizer()
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} tokens but the embedding matrix only "
                f"{self.config.vocab_size:,} rows; they belong to different models"
            )
        return tokenizer

    def __repr__(self) -> str:
        size = sum(tensor.data.nbytes for tensor in self.tensors.values())
        kinds = ", ".join(sorted({str(tensor.storage) for tensor in self.tensors.values()}))
        return (
            f"Checkpoint({self.path.name}: {self.config.architecture}, {self.config.num_layers} layers, "
            f"{len(self.tensors)} tensors, {kinds}, {size / 1e6:.1f} MB)"
        )


def without_views(values: Any, data: np.ndarray) -> Any:
    """Return an array, or a dataclass of arrays, with a copy of each array that may be a view of `data`."""
    if isinstance(values, np.ndarray):
        return values.copy() if np.may_share_memory(values, data) else values
    if is_dataclass(values) and not isinstance(values, type):
        parts = {field.name: without_views(getattr(values, field.name), data) for field in fields(values)}
        return replace(values, **parts)
    return values


def deinterleave_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from interleaved pairs to two halves: [H * K, ...] -> [H * K, ...].

    Rotary embeddings rotate pairs of a head's elements. llama.cpp pairs neighbours (0 with 1, 2 with 3, ...), and GGUF
    files order the rows of Q and K accordingly. Hugging Face and minillm pair the first half with the second
    (0 with K/2, 1 with K/2 + 1, ...).
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, K/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
