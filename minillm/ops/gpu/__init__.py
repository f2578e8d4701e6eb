"""The operations on an NVIDIA GPU, through CuPy: `backend="cupy"`.

CuPy offers NumPy's functions on arrays in GPU memory, so most of this backend is `reference`, unchanged. Where that
is not enough, there are *kernels* in CUDA C++, which CuPy compiles at their first call:

    packing.py                    weights in words of 32 bits, as the kernels read them
    products.py, products.cu      matrix products and embedding; weights stay quantized on the GPU
    attention.py, attention.cu    writing to the paged cache, and attention over it, block by block
    norms.py, norms.cu            norms, and expert routing
    device.py                     finding a GPU, compiling a kernel

The source of a kernel describes *one* of thousands of threads. Threads form *thread blocks*, not to be confused with
the cache's blocks. The threads of a thread block can wait for each other and share a little fast memory. Groups of 32
threads run in step, and they read memory fastest if they read 32 consecutive numbers. So the rule of SIMD holds here as
well: numbers that are used at once are stored side by side (lesson 6).

For the same bits in every batch, each output is computed by one thread or one thread block, in an order that depends
only on its own row or sequence. Sums over a row never use CuPy, and products never use cuBLAS, because those choose the
order by the shape of the whole array. The kernels write out their multiply-adds (`fmaf`), and the compiler may make no
others.

This backend is simple, which costs speed. A step launches about forty kernels per layer, and with a small model a
launch takes longer than the kernel. Prefill's products use neither shared memory nor tensor cores. One thread block per
head walks through all keys of a sequence, so a single long sequence leaves most of a GPU idle.

**This backend has not yet run on a GPU.** Its kernels compile for one, and the tests run the same source on the CPU,
thread by thread, against the reference. `examples/gpu_check.py` is the check that remains to be run.
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
