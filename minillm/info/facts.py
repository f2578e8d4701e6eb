"""The tensors of a model's file, part by part, and their types and sizes in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from minillm.checkpoints import Checkpoint, StoredTensor
from minillm.ops import backend
from minillm.quantization import QuantizedMatrix

PARTS = ("embedding", "attention", "mlp", "norms", "head")
SAMPLE = 64  # rows of a matrix that are read to determine its type in memory: the outputs of one tile
FLOATS = {32: "float32", 16: "bfloat16"}  # bits per weight -> type in memory, in the compiled backend


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one part of a model that the file stores in the same type.

    Attributes
    ----------
    part : one of PARTS. Biases belong to the part of their matrices.
    storage : ggml's name of the type in the file
    count : number of tensors
    num_values : numbers in all of them
    num_bytes : bytes in the file
    memory_type : type in the compiled backend's memory: "4 bits" to "8 bits" (integer codes), "bfloat16" or "float32"
    bytes_in_memory : bytes in memory, including scales and minimums. Whether these fit float16 is judged by a sample of
        rows, so this may be off by a few percent.
    is_widened : whether a number has more bits in memory, without its scales, than in the file with them
    """

    part: str
    storage: str
    count: int
    num_values: int
    num_bytes: int
    memory_type: str
    bytes_in_memory: int
    is_widened: bool


@dataclass(frozen=True)
class StoredInMemory:
    """Type and size of a tensor in memory."""

    name: str
    bits: int
    num_bytes: int


def count_parameters(checkpoint: Checkpoint) -> int:
    """Count the numbers in all tensors of the model. A head that is the embedding counts once."""
    return sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())


def part_of(name: str) -> str:
    """Return which of PARTS the tensor called `name` belongs to."""
    modules = name.split(".")[:-1]
    if modules[-1].endswith("norm"):
        return "norms"
    if modules[0] in ("embedding", "positions"):
        return "embedding"
    return modules[2] if modules[0] == "layers" else modules[0]


def tensor_groups(checkpoint: Checkpoint) -> list[TensorGroup]:
    """Group the model's tensors by part and type, in the order of PARTS, and within a part by size."""
    gathered: dict[tuple[str, str], list[StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        gathered.setdefault((part_of(name), tensor.storage.name), []).append(tensor)
    groups = [_group(part, tensors) for (part, _), tensors in gathered.items()]
    return sorted(groups, key=lambda group: (PARTS.index(group.part), -group.num_bytes))


def _group(part: str, tensors: list[StoredTensor]) -> TensorGroup:
    storage = tensors[0].storage
    by_shape: dict[tuple[int, ...], list[StoredTensor]] = {}
    for tensor in tensors:
        by_shape.setdefault(tensor.shape, []).append(tensor)
    # One tensor of each shape is enough; a large mixture of experts has tens of thousands.
    in_memory = {shape: stored_in_memory(same_shape[0]) for shape, same_shape in by_shape.items()}
    largest = in_memory[max(in_memory, key=prod)]
    return TensorGroup(
        part=part,
        storage=storage.name,
        count=len(tensors),
        num_values=sum(prod(tensor.shape) for tensor in tensors),
        num_bytes=sum(tensor.data.nbytes for tensor in tensors),
        memory_type=largest.name,
        bytes_in_memory=sum(in_memory[tensor.shape].num_bytes for tensor in tensors),
        is_widened=largest.bits > storage.bits_stored,
    )


def stored_in_memory(tensor: StoredTensor) -> StoredInMemory:
    """Return the type and size of a tensor in the compiled backend's memory, judged by its first rows."""
    if len(tensor.shape) == 1:
        return StoredInMemory("float32", 32, 4 * tensor.shape[0])
    ops = backend("numba")
    rows = replace(tensor, interleaved_heads=0).outputs(0, min(SAMPLE, tensor.shape[0]))
    numbers = rows.read()
    tile = ops.num_bytes(ops.as_matrix(numbers))
    if isinstance(numbers, QuantizedMatrix):
        name, bits = f"{numbers.bits} bits", numbers.bits
    else:
        bits = 32 if tile >= 4 * SAMPLE * tensor.shape[1] else 16
        name = FLOATS[bits]
    return StoredInMemory(name, bits, tile * -(-tensor.shape[0] // SAMPLE))


def total(groups: Iterable[TensorGroup], field: str) -> int:
    """Sum one field over all groups."""
    return sum(getattr(group, field) for group in groups)
