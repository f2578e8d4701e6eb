"""Quantized weights: small integer codes with one scale per block of inputs.

A matrix of outputs x inputs (`[O, I]`) is divided along its inputs into blocks of `Q` consecutive weights (16 or 32 in
nearly all types). A block stores one small integer per weight, and one or two floats that all its weights share:

    weight[o, b*Q + q]  =  codes[o, b, q] * scales[o, b]  (+ minimums[o, b])

If the row length is not a multiple of `Q`, the last block is padded in memory, and the padding is never used.

The modules:

    matrix.py       QuantizedMatrix, the common form of all quantized types
    rounding.py     quantizes float matrices
    storage.py      StorageType: the byte layout of a tensor type
    planes.py       the packing of several small codes into one byte
    floats.py       F32, F16, BF16
    block_types.py  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: one scale per 32 weights
    k_types.py      Q2_K to Q6_K: scales that are themselves quantized
    tables.py       IQ4_NL, IQ4_XS, MXFP4: codes that index a table
    ternary.py      TQ1_0, TQ2_0: weights that are -1, 0 or 1

The conversion from a GGUF file to a `QuantizedMatrix` is lossless: a code keeps its value, and float32 represents
every scale, and every product of two scales, exactly. The layouts are ggml's (`ggml-common.h` in ggml-org/ggml).
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
