"""The operations as compiled loops (Numba): the default backend on a CPU.

    tiles.py            weights laid out for SIMD
    weight_formats.py   the six formats of weights, from float32 to 4 bits, and how each is read
    scales.py           scales and minimums of integer codes, and how each is read
    microkernel.py      the innermost loop: four rows of numbers times a tile
    products.py         matrix products, for one row and for many
    attention.py        attention over the paged cache
    routing.py          expert routing
    layers.py           all layers in one call
    float16.py          float16, a type that Numba does not have, as bits
    prefetching.py      requests for memory before it is needed
    pointwise.py        embedding, norms, rotary embedding, activations
    compiling.py        compiler options, and the number of threads

The bits never depend on the batch: every output is a sum taken in one fixed order, SIMD lanes run across outputs and
never across the terms of a sum, and the compiler may not reorder any sum.

The attention kernels hold scores and weights only briefly, one tile at a time. For inspection, the reference computes
them again from the same queries and keys.
"""

from minillm.ops.jit.attention import attention, write_kv
from minillm.ops.jit.compiling import announcing_compilation, check_threads, set_num_threads
from minillm.ops.jit.layers import fuse
from minillm.ops.jit.pointwise import (
    apply_soft_cap,
    embed,
    geglu,
    gelu,
    layer_norm,
    rms_norm,
    rotary_angles,
    rotate,
    swiglu,
)
from minillm.ops.jit.products import linear
from minillm.ops.jit.routing import route
from minillm.ops.jit.tiles import as_matrices, as_matrix, as_vector, dequantize, num_bytes, to_numpy
from minillm.ops.reference import array_library, as_indices, attention_scores, softmax

__all__ = [
    "announcing_compilation",
    "apply_soft_cap",
    "array_library",
    "as_indices",
    "as_matrices",
    "as_matrix",
    "as_vector",
    "attention",
    "attention_scores",
    "check_threads",
    "dequantize",
    "embed",
    "fuse",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "num_bytes",
    "rms_norm",
    "rotary_angles",
    "rotate",
    "route",
    "set_num_threads",
    "softmax",
    "swiglu",
    "to_numpy",
    "write_kv",
]
