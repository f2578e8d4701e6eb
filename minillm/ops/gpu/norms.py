"""Norms on the GPU, whose kernels are in norms.cu; and the router's choice, which the CPU makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.ops import reference
from minillm.ops.gpu import device
from minillm.ops.reference import namespace

Array = Any  # CuPy's

THREADS = 128  # of a block, which takes a row


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale every row of [T, D] to a root mean square of one, then by `weight`; see `reference`."""
    return _norm("rms_norm", x, weight, np.float32(eps))


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Shift and scale every row of [T, D] to a mean of zero and a variance of one; then as said; see `reference`."""
    return _norm("layer_norm", x, weight, bias, np.float32(eps))


def _norm(name: str, x: Array, *how: Any) -> Array:
    xp, (rows, size) = namespace(x), x.shape
    normed = xp.empty((rows, size), dtype=xp.float32)
    norm = device.kernel("norms.cu", name, THREADS=THREADS)
    norm((rows,), (THREADS,), (xp.ascontiguousarray(x, dtype=xp.float32), *how, np.int32(size), normed))
    return normed


def route(scores: Array, count: int, normalize: bool) -> tuple[np.ndarray, Array]:
    """A router's choice for every token; see `reference`.

    The CPU must know it before it can start the experts' products, so it makes it: a few numbers a token.
    """
    chosen, routing_weights = reference.route(device.to_numpy(scores), count, normalize)
    return chosen, namespace(scores).asarray(routing_weights)
