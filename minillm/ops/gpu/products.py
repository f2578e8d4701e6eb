"""Matrix products and embedding on the GPU. The kernels are in products.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.ops.gpu import device
from minillm.ops.gpu.packing import PackedMatrix
from minillm.ops.reference import namespace

Array = Any  # a CuPy array

THREADS = 64  # per thread block; few, so that a matrix of a few hundred outputs occupies many processors
ROWS_PER_THREAD = 8  # rows that a thread processes at once, if there is more than one


def linear(x: Array, matrix: PackedMatrix, bias: Array | None = None) -> Array:
    """Compute `x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]. A row's bits do not depend on the other rows.

    Raises
    ------
    ValueError
        The number of columns of `x` differs from the number of inputs of the matrix.
    """
    xp, (rows, inputs), outputs = namespace(x), x.shape, matrix.num_outputs
    if inputs != matrix.num_inputs:
        raise ValueError(f"x has {inputs} columns, but the matrix has {matrix.num_inputs} inputs")
    blocks = matrix.words.shape[0]
    whole = xp.ascontiguousarray(x, dtype=xp.float32)
    if inputs != blocks * matrix.block_size:
        whole = xp.zeros((rows, blocks * matrix.block_size), dtype=xp.float32)
        whole[:, :inputs] = x
    product = xp.empty((rows, outputs), dtype=xp.float32)
    rows_per_thread = 1 if rows == 1 else ROWS_PER_THREAD
    multiply = device.kernel("products.cu", "multiply", ROWS=rows_per_thread, **matrix.settings)
    multiply(
        (-(-outputs // THREADS), -(-rows // rows_per_thread)),
        (THREADS,),
        (
            whole,
            matrix.words,
            matrix.scales,
            matrix.minimums,
            *map(np.int32, (rows, blocks, outputs)),
            product,
        ),
    )
    return product if bias is None else product + bias


def embed(token_ids: Array, matrix: PackedMatrix) -> Array:
    """Return row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]."""
    xp, inputs = namespace(matrix.words), matrix.num_inputs
    token_ids = xp.asarray(token_ids, dtype=xp.int32)
    rows = xp.empty((len(token_ids), inputs), dtype=xp.float32)
    read = device.kernel("products.cu", "embed", ROWS=1, **matrix.settings)
    read(
        (len(token_ids), -(-inputs // THREADS)),
        (THREADS,),
        (token_ids, matrix.words, matrix.scales, matrix.minimums, np.int32(inputs), np.int32(matrix.num_outputs), rows),
    )
    return rows
