"""The operations as compiled loops (Numba): the default on a CPU.

    tiles.py       weights laid out for SIMD
    forms.py       the six forms of weights, from float32 to 4 bits, and how each is read
    scales.py      scales and minimums of integer codes, and how each is read
    rows.py        the innermost loop: four rows of numbers times a tile
    products.py    matrix products, for one row and for many
    attention.py   attention over the paged cache
    routing.py     which experts a token takes
    layers.py      all layers in one call
    halves.py      float16, which Numba does not know, as bits
    prefetching.py asking the memory for what will be needed soon
    pointwise.py   embedding, norms, rotary embedding, activations
    compiling.py   how all of these are compiled, and on how many threads they run

Why the bits never depend on the batch: every number that comes out is a sum taken in one fixed order, SIMD lanes run
across outputs and never across the terms of a sum, and the compiler is not allowed to reorder any.

Scores and weights of attention exist here only in passing, a tile at a time. For those who want to look, the reference
works them out again, from the same queries and keys.
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
