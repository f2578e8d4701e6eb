"""The operations on an NVIDIA GPU, through CuPy: `backend="cupy"`.

CuPy is NumPy's functions on arrays that live on the GPU, so most of this backend is `reference`, as it stands. What
would not do is written as *kernels*, in CUDA C++, which CuPy compiles when they are first called:

    packing.py                    weights in words of 32 bits, as the kernels read them
    products.py, products.cu      matrix products and embedding, of weights that stay quantized on the GPU
    attention.py, attention.cu    keys and values into the paged cache, and attention over it, block by block
    norms.py, norms.cu            norms; and the router's choice
    device.py                     finding a GPU, compiling a kernel

A kernel says what *one* of thousands of threads does. Threads come in *blocks* (not those of the cache), whose threads
can wait for each other and share a little fast memory; 32 threads of a block run in step, and memory is read fastest
where these 32 read 32 neighbouring numbers. So SIMD's rule holds here as well: what lies side by side must be what is
computed at once (lesson 6).

The same bits: every number that comes out is computed by one thread, or by one block, in an order that depends on its
own row or sequence alone. A sum over a row is never handed to CuPy, nor a product to cuBLAS: they choose the order by
the shape of the whole. The kernels' multiply-adds are written out (`fmaf`), and the compiler may make no others.

What is simple here and costs speed: a step is some forty launches of kernels a layer, which take longer to start than
to run where the model is small; prefill's products use neither shared memory nor tensor cores; and a sequence's keys
are walked by one block a head, so that one long sequence alone leaves most of a GPU idle.

**This backend has not yet run on a GPU.** Its kernels compile for one, and the tests run the same source on the CPU,
thread by thread, against the reference. `examples/gpu_check.py` is the check that is still to be made.
"""

from minillm.ops.gpu.attention import attention, write_kv
from minillm.ops.gpu.device import array_library, as_indices, as_vector, set_num_threads, to_numpy
from minillm.ops.gpu.norms import layer_norm, rms_norm, route
from minillm.ops.gpu.packing import as_matrices, as_matrix, num_bytes
from minillm.ops.gpu.products import embed, linear
from minillm.ops.reference import (
    announcing_compilation,
    apply_soft_cap,
    attention_scores,
    check_threads,
    fuse,
    geglu,
    gelu,
    rotary_angles,
    rotate,
    softmax,
    swiglu,
)

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
