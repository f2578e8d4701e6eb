"""The numeric floor: every operation a transformer needs, behind one narrow interface.

A backend is a module with these functions; `reference` defines what each computes, in a few lines for any array
library, `jit` computes the same as compiled loops on the CPU, and `gpu` on an NVIDIA GPU, through CuPy. Whoever reads
`reference` knows what all of them do.

    array_library()                                          the module that makes arrays: NumPy, or CuPy
    as_indices(numbers)                                      positions and the like, once a step, where they are read
    as_vector(values), as_matrix(weights)                    weights in the form the backend likes
    as_matrices(weights)                                     the same of several, laid end to end if they can be
    embed(token_ids, matrix)                                 [T] -> [T, D]
    linear(x, matrix, bias)                                  [T, I] -> [T, O]
    rms_norm(x, weight, eps)                                 [T, D] -> [T, D]
    layer_norm(x, weight, bias, eps)                         [T, D] -> [T, D]
    rotary_angles(positions, frequencies, attention_factor)         [T] -> cosines, sines [T, R/2]
    rotate(heads, cosines, sines)                            [T, H, K] -> [T, H, K]
    write_kv(keys, values, ..., layer, slots)                [T, G, K] twice -> into the KV cache
    attention(queries, ..., layer, positions, ...)           [T, H, K] -> [T, H, K], over the KV cache
    attention_scores(queries, ..., layer, positions, ...)    [T, H, K] -> [T, H, M], for those who look
    softmax(x)                                               scores -> weights, for those who look
    swiglu(gate, up)                                         [T, F] twice -> [T, F]
    geglu(gate, up)                                          [T, F] twice -> [T, F]
    gelu(x)                                                  [T, F] -> [T, F]
    route(scores, count, normalize)                         [T, E] -> experts, routing_weights [T, count]
    apply_soft_cap(x, cap)                                          [T, V] -> [T, V], between -cap and cap
    num_bytes(matrix)                                        that reading it moves
    to_numpy(array)                                          whatever the backend computes with -> NumPy
    fuse(layers, config)                                     a faster way through all layers, or None
    set_num_threads(threads)                                 None: as many as there are
    check_threads()                                          warns where they are slow
    announcing_compilation(announce)                         a context: says so when something must be compiled
"""

from __future__ import annotations

from types import ModuleType

BACKENDS = ("numba", "numpy", "reference", "cupy")


def backend(name: str) -> ModuleType:
    """The backend called `name`, imported only now: a reader of the reference need not wait for a compiler.

    Raises
    ------
    ValueError
        `name` is not one of BACKENDS.
    BackendError
        It cannot compute here: CuPy is not installed, or finds no GPU.
    """
    if name == "numba":
        from minillm.ops import jit

        return jit
    if name in ("numpy", "reference"):
        from minillm.ops import reference

        return reference
    if name == "cupy":
        from minillm.ops import gpu

        gpu.array_library()  # fails now, if it must, and not in the middle of loading a model
        return gpu
    raise ValueError(f"backend {name!r} is unknown; there are {', '.join(BACKENDS)}")
