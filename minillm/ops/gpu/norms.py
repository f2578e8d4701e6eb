"""Norms on the GPU, with kernels in norms.cu; and expert routing, which runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.ops import reference
from minillm.ops.gpu import device
from minillm.ops.reference import namespace

Array = Any  # a CuPy array

THREADS = 128  # per thread block; each thread block handles one row


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale every row of [T, D] to a root mean square of one, then multiply by `weight`; see `reference`."""
    return _norm("rms_norm", x, weight, np.float32(eps))


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Normalize every row of [T, D] to mean zero and variance one, then scale and shift it; see `reference`."""
    return _norm("layer_norm", x, weight, bias, np.float32(eps))


def _norm(name: str, x: Array, *arguments: Any) -> Array:
    xp, (rows, size) = namespace(x), x.shape
    normed = xp.empty((rows, size), dtype=xp.float32)
    norm = device.kernel("norms.cu", name, THREADS=THREADS)
    norm((rows,), (THREADS,), (xp.ascontiguousarray(x, dtype=xp.float32), *arguments, np.int32(size), normed))
    return normed


def route(scores: Array, count: int, normalize: bool) -> tuple[np.ndarray, Array]:
    """Choose the experts of every token; see `reference`.

    The CPU needs the choice before it can launch the experts' products, so it computes it: a few numbers per token.
    """
    chosen, routing_weights = reference.route(device.to_numpy(scores), count, normalize)
    return chosen, namespace(scores).asarray(routing_weights)
