"""Backends: every operation that a transformer needs, behind one small interface.

A backend is a module with the functions below. `reference` defines each in a few lines for any array library; `jit`
computes the same in compiled loops on the CPU; `gpu` computes the same on an NVIDIA GPU, through CuPy.

    array_library()                                          the module that makes arrays: NumPy or CuPy
    as_indices(numbers)                                      move integers to the backend, once per step
    as_vector(values), as_matrix(weights)                    weights in the backend's own layout
    as_matrices(weights)                                     several matrices, stored end to end if possible
    embed(token_ids, matrix)                                 [T] -> [T, D]
    linear(x, matrix, bias)                                  [T, I] -> [T, O]
    rms_norm(x, weight, eps)                                 [T, D] -> [T, D]
    layer_norm(x, weight, bias, eps)                         [T, D] -> [T, D]
    rotary_angles(positions, frequencies, attention_factor)  [T] -> cosines, sines [T, R/2]
    rotate(heads, cosines, sines)                            [T, H, K] -> [T, H, K]
    write_kv(keys, values, ..., layer_in_block, slots)       two [T, G, K] -> KV cache
    attention(queries, ..., layer_in_block, positions, ...)  [T, H, K] -> [T, H, K], over the KV cache
    attention_scores(queries, ..., positions, ...)           [T, H, K] -> [T, H, M], for inspection
    softmax(x)                                               scores -> weights, for inspection
    swiglu(gate, up)                                         two [T, F] -> [T, F]
    geglu(gate, up)                                          two [T, F] -> [T, F]
    gelu(x)                                                  [T, F] -> [T, F]
    route(scores, count, normalize)                          [T, E] -> experts, routing weights [T, count]
    apply_soft_cap(x, cap)                                   [T, V] -> [T, V], between -cap and cap
    num_bytes(matrix)                                        bytes read when the matrix is read
    to_numpy(array)                                          an array of the backend -> NumPy
    fuse(layers, config)                                     one function for all layers, or None
    set_num_threads(threads)                                 None for all cores
    check_threads()                                          warn where threads are slow
    announcing_compilation(announce)                         a context that reports when something is compiled
"""

from __future__ import annotations

from types import ModuleType

BACKENDS = ("numba", "numpy", "reference", "cupy")


def backend(name: str) -> ModuleType:
    """Return the backend called `name`. It is imported here, so that the reference does not load a compiler.

    Raises
    ------
    ValueError
        `name` is not one of BACKENDS.
    BackendError
        The backend cannot run on this machine: CuPy is not installed, or finds no GPU.
    """
    if name == "numba":
        from minillm.ops import jit

        return jit
    if name in ("numpy", "reference"):
        from minillm.ops import reference

        return reference
    if name == "cupy":
        from minillm.ops import gpu

        gpu.array_library()  # raises its errors here rather than while a model is being loaded
        return gpu
    raise ValueError(f"backend {name!r} is unknown; it can be {', '.join(BACKENDS)}")
