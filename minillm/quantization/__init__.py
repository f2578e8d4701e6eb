"""Weights stored in few bits: integer codes times a scale for every small block of inputs.

A matrix of outputs x inputs (`[O, I]`) is cut along its inputs into blocks of `Q` neighbours (16 or 32 for nearly all
types). A block keeps one small integer a weight and one or two floats for all of them:

    weight[o, b*Q + q]  =  codes[o, b, q] * scales[o, b]  (+ minimums[o, b])

Where a row does not divide into blocks, its last block is full in memory, and what stands past the row is not read.

The parts:

    matrix.py       QuantizedMatrix, the one form that all others become
    rounding.py     from floats to a QuantizedMatrix
    storage.py      StorageType: how a type in a GGUF file lays its bytes out
    planes.py       how small codes share bytes
    floats.py       F32, F16, BF16
    block_types.py  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: a scale for every 32 weights
    k_types.py      Q2_K to Q6_K: scales that are quantized themselves
    tables.py       IQ4_NL, IQ4_XS, MXFP4: codes that number the entries of a table
    ternary.py      TQ1_0, TQ2_0: nothing but -1, 0 and 1

Nothing is lost on the way from a GGUF file to a `QuantizedMatrix`: the codes are the file's own, and its scales, and
products of two of them, are exact in float32. The layouts are ggml's (`ggml-common.h` in ggml-org/ggml).
"""

from minillm.quantization import block_types, floats, k_types, tables, ternary
from minillm.quantization.floats import widen_bfloat16
from minillm.quantization.matrix import QuantizedMatrix, QuantizedScales
from minillm.quantization.planes import unpack_nibbles
from minillm.quantization.rounding import CHUNK, quantize, round_blocks
from minillm.quantization.storage import StorageType

__all__ = [
    "CHUNK",
    "STORAGE_TYPES",
    "QuantizedMatrix",
    "QuantizedScales",
    "StorageType",
    "quantize",
    "round_blocks",
    "unpack_nibbles",
    "widen_bfloat16",
]

STORAGE_TYPES: dict[str, StorageType] = {
    kind.name: kind for family in (floats, block_types, k_types, tables, ternary) for kind in family.TYPES
}
