"""What is in a model's file, part by part, and what becomes of it in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from minillm.checkpoints import Checkpoint, StoredTensor
from minillm.ops import backend
from minillm.quantization import QuantizedMatrix

PARTS = ("embedding", "attention", "mlp", "norms", "head")
SAMPLE = 64  # rows of a matrix that are read to see what becomes of all: the outputs of one tile
FLOATS = {32: "float32", 16: "bfloat16"}  # bits that a weight takes -> what the compiled backend keeps it as


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one part of a model that the file stores alike.

    Attributes
    ----------
    part : one of PARTS. Biases belong to the part that their matrices belong to.
    storage : what ggml calls the type
    count : tensors
    num_values : numbers in all of them
    num_bytes : that they take in the file
    kept_as : what the compiled backend makes of them: "4 bits" to "8 bits" (integer codes), "bfloat16", "float32"
    bytes_in_memory : that it takes, scales and minimums included. Whether float16 does for these is judged by a sample
        of rows, so that this may be off by a few per cent.
    is_widened : whether a number's own bits, scales apart, are more in memory than all it takes in the file
    """

    part: str
    storage: str
    count: int
    num_values: int
    num_bytes: int
    kept_as: str
    bytes_in_memory: int
    is_widened: bool


@dataclass(frozen=True)
class Kept:
    """What becomes of a tensor in memory."""

    name: str
    bits: int
    num_bytes: int


def count_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors of the model; a head that is the embedding counts once."""
    return sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())


def part_of(name: str) -> str:
    """Which of PARTS the tensor called `name` belongs to."""
    modules = name.split(".")[:-1]
    if modules[-1].endswith("norm"):
        return "norms"
    if modules[0] in ("embedding", "positions"):
        return "embedding"
    return modules[2] if modules[0] == "layers" else modules[0]


def tensor_groups(checkpoint: Checkpoint) -> list[TensorGroup]:
    """The model's tensors by part and type, in the order of PARTS, the largest group of a part first."""
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
    # One of each shape tells for the others: a large mixture of experts has tens of thousands.
    kept = {shape: keep(alike[0]) for shape, alike in by_shape.items()}
    largest = kept[max(kept, key=prod)]
    return TensorGroup(
        part=part,
        storage=storage.name,
        count=len(tensors),
        num_values=sum(prod(tensor.shape) for tensor in tensors),
        num_bytes=sum(tensor.data.nbytes for tensor in tensors),
        kept_as=largest.name,
        bytes_in_memory=sum(kept[tensor.shape].num_bytes for tensor in tensors),
        is_widened=largest.bits > storage.bits_stored,
    )


def keep(tensor: StoredTensor) -> Kept:
    """What the compiled backend makes of a tensor, judged by its first rows."""
    if len(tensor.shape) == 1:
        return Kept("float32", 32, 4 * tensor.shape[0])
    ops = backend("numba")
    rows = replace(tensor, interleaved_heads=0).outputs(0, min(SAMPLE, tensor.shape[0]))
    numbers = rows.read()
    tile = ops.num_bytes(ops.as_matrix(numbers))
    if isinstance(numbers, QuantizedMatrix):
        name, bits = f"{numbers.bits} bits", numbers.bits
    else:
        bits = 32 if tile >= 4 * SAMPLE * tensor.shape[1] else 16
        name = FLOATS[bits]
    return Kept(name, bits, tile * -(-tensor.shape[0] // SAMPLE))


def total(groups: Iterable[TensorGroup], field: str) -> int:
    """The sum of one field over all groups."""
    return sum(getattr(group, field) for group in groups)
