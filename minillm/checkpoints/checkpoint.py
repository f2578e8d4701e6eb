"""Checkpoint: a model at rest. Its config, its tensors under this project's names, and its tokenizer.

Opening reads headers only. Tensors stay views into the memory-mapped file until somebody calls `read`, so a
checkpoint opens in milliseconds and the operating system fetches from disk just the pages that are touched.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from minillm.errors import CheckpointError, UnsupportedError
from minillm.model.config import ModelConfig
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
    data : uint8, its bytes in their order, a view into the mapped file; it cannot be written to
    interleaved_heads : how many heads' rows are interleaved as GGUF keeps Llama's Q and K; 0 for none
    is_transposed : whether the file has it inputs first
    added : what is added to every number when it is read
    """

    name: str
    shape: tuple[int, ...]
    storage: StorageType
    data: np.ndarray
    interleaved_heads: int = 0
    is_transposed: bool = False
    added: float = 0.0

    def read(self) -> np.ndarray | QuantizedMatrix:
        """The tensor's numbers: a float32 array, or a QuantizedMatrix where the file holds integer codes.

        F32 is a view into the file, which cannot be written to; every other type is converted into new memory.
        """
        data = self.data.reshape(-1)
        if self.interleaved_heads:
            data = split_halves(data.reshape(self.shape[0], -1), self.interleaved_heads).reshape(-1)
        if data.ctypes.data % self.storage.block.alignment:
            data = data.copy()  # files may place a float at an odd address; kernels may not
        numbers = self.storage.read(data, self.shape[::-1] if self.is_transposed else self.shape)
        if self.is_transposed:
            numbers = np.ascontiguousarray(numbers.T)
        if self.added:
            numbers = numbers + np.float32(self.added)
        release_pages(self.data)
        return numbers

    def transposed(self) -> StoredTensor:
        """The same matrix, outputs first, of a file that has it inputs first. Of floats only."""
        return replace(self, shape=self.shape[::-1], is_transposed=True)

    def outputs(self, start: int, stop: int) -> StoredTensor:
        """Those from `start` up to `stop` alone: some files keep several matrices end to end as one."""
        if (start, stop) == (0, self.shape[0]):
            return self
        if self.is_transposed:
            data = self.data.reshape(*self.shape[::-1], -1)[:, start:stop]
        else:
            data = self.data.reshape(self.shape[0], -1)[start:stop].reshape(-1)
        return replace(self, shape=(stop - start, *self.shape[1:]), data=data)

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
    recommended : how its makers say to sample from it, by the names of `SamplingParams`
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tensors: dict[str, StoredTensor],
        load_tokenizer: Callable[[], Tokenizer | None],
        recommended: Mapping[str, float] | None = None,
    ):
        self.path = path
        self.config = config
        self.tensors = tensors
        self.recommended = dict(recommended or {})
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


def name_in_file(name: str, names: Mapping[str, str], layers: str) -> str:
    """What a file calls the tensor `name` of this project, whose layers' names begin with `layers` there.

    `names` says so of modules; in those of experts, `{}` stands for the expert's number.
    """
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if not layer:
        return f"{names[module]}.{kind}"
    expert = re.search(r"(?<=experts\.)\d+", layer[2])
    part = layer[2].replace(expert[0], "{}") if expert else layer[2]
    return f"{layers}{layer[1]}.{names[part].format(expert and expert[0])}.{kind}"


MOST_EXPERTS = 4096  # more than any model has


def check_layers(num_layers: int, num_tensors: int, where: str) -> int:
    """`num_layers`, unless a file of `num_tensors` tensors cannot have so many: then CheckpointError."""
    if num_layers > num_tensors:
        raise CheckpointError(f"{where}: claims {num_layers:,} layers but holds {num_tensors:,} tensors in all")
    return num_layers


def check_config(config: ModelConfig, where: str) -> None:
    """Raise CheckpointError unless the config's numbers fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly"
        )
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if not config.learned_positions and (rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim):
        name = "head_dim" if config.rotary_dim is None else "the part of a head that is turned"
        raise CheckpointError(
            f"{where}: {name} is {rotary_dim}, wanted an even number, at most {config.head_dim}: "
            "rotary embeddings turn pairs"
        )
    factors = config.rope_scaling.factors if config.rope_scaling else ()
    if factors and len(factors) != rotary_dim // 2:
        raise CheckpointError(
            f"{where}: {len(factors)} factors of rotary frequencies, wanted {rotary_dim // 2}, one for each pair"
        )
    if not config.experts_per_token <= config.num_experts <= MOST_EXPERTS:
        raise CheckpointError(
            f"{where}: a token takes {config.experts_per_token:,} of {config.num_experts:,} experts; "
            f"wanted no more than there are, and those at most {MOST_EXPERTS:,}"
        )


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
    shapes = config.tensor_shapes()
    parts_of: dict[str, list[str]] = {}  # the file's name of a tensor -> what of the model is in it, end to end
    for name in shapes:
        parts_of.setdefault(file_name(name), []).append(name)
    matched = {}
    for stored_name, parts in parts_of.items():
        outputs = [shapes[name][0] for name in parts]
        shape = (sum(outputs), *shapes[parts[0]][1:])
        tensor = found.get(stored_name)
        if tensor is None:
            raise CheckpointError(f"{where}: tensor {stored_name!r} is missing, wanted one of shape {list(shape)}")
        if tensor.shape == (len(parts), *shapes[parts[0]]):  # a stack of matrices is the same bytes as one long one
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"wanted {list(shape)} by the config (outputs first)"
            )
        if len(shape) == 1 and tensor.storage.is_quantized:
            raise UnsupportedError(
                f"{where}: tensor {tensor.name!r} is a vector stored as {tensor.storage.name}, wanted floats"
            )
        for name, stop in zip(parts, accumulate(outputs), strict=True):
            matched[name] = tensor.outputs(stop - shapes[name][0], stop)
    left_over = sorted(found.keys() - parts_of.keys() - set(unused))
    if left_over:
        raise UnsupportedError(
            f"{where}: {len(left_over)} tensors have no place in the model its config describes, "
            f"first {left_over[0]!r}; leaving them out would compute another model"
        )
    return {name: matched[name] for name in shapes}
