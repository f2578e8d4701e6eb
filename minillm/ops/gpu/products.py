"""Matrix products and embedding on the GPU; the kernels are in products.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm.ops.gpu import device
from minillm.ops.gpu.packing import PackedMatrix
from minillm.ops.reference import namespace

Array = Any  # CuPy's

THREADS = 64  # of a block: few, so that a matrix of a few hundred outputs keeps as many processors busy as it can
MANY_ROWS = 8  # rows that a thread takes at once where there is more than one


def linear(x: Array, matrix: PackedMatrix, bias: Array | None = None) -> Array:
    """`x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]; a row's bits do not depend on the rows beside it.

    Raises
    ------
    ValueError
        `x` has not as many columns as the matrix has inputs.
    """
    xp, (rows, inputs), outputs = namespace(x), x.shape, matrix.num_outputs
    if inputs != matrix.num_inputs:
        raise ValueError(f"rows of {inputs} numbers do not fit a matrix of {matrix.num_inputs} inputs")
    blocks = matrix.words.shape[0]
    whole = xp.ascontiguousarray(x, dtype=xp.float32)
    if inputs != blocks * matrix.block_size:
        whole = xp.zeros((rows, blocks * matrix.block_size), dtype=xp.float32)
        whole[:, :inputs] = x
    product = xp.empty((rows, outputs), dtype=xp.float32)
    together = 1 if rows == 1 else MANY_ROWS
    multiply = device.kernel("products.cu", "multiply", ROWS=together, **matrix.settings)
    multiply(
        (-(-outputs // THREADS), -(-rows // together)),
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
    """Row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]."""
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
