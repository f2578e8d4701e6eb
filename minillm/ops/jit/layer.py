"""A whole layer in one call: what `Transformer._layer` says, compiled into one piece.

At two thousandths of a second a token, Python's share counts: sixteen calls a layer, a microsecond or two each, come
to a fifth of a decode step. Compiled together they are one call. The kernels are the very same, so are the bits;
`Transformer._layer` remains the definition, and runs whenever somebody watches with a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from minillm.ops.jit.attention import attention, write_kv
from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.pointwise import rms_norm, rotate, swiglu
from minillm.ops.jit.products import NO_BIAS, multiply
from minillm.ops.jit.tiles import LANES, joined


def fuse(layer: Any, eps: float) -> Callable | None:
    """The compiled pass through a layer (a `minillm.transformer.Layer`): `(x, angles, batch, kv_cache, index) -> x`.

    Queries, keys and values come out of one product, and so do gate and up: fewer, larger pieces of work to share
    among the threads. None where their weights do not lie side by side, and with the compiler off, where the readable
    pass is as fast and can be stepped through.
    """
    qkv = joined([layer.q.weight, layer.k.weight, layer.v.weight])
    gate_up = joined([layer.gate.weight, layer.up.weight])
    if numba.config.DISABLE_JIT or qkv is None or gate_up is None:
        return None
    weights = (
        np.float32(eps),
        layer.attention_norm,
        layer.mlp_norm,
        tuple(qkv),
        tuple(_or_empty(linear.bias) for linear in (layer.q, layer.k, layer.v)),
        (layer.q.weight.num_outputs, layer.k.weight.num_outputs),
        tuple(layer.output.weight),
        _or_empty(layer.output.bias),
        tuple(gate_up),
        tuple(_or_empty(linear.bias) for linear in (layer.gate, layer.up)),
        layer.gate.weight.num_outputs,
        tuple(layer.down.weight),
        _or_empty(layer.down.bias),
    )

    def forward(x, angles, batch, kv_cache, index):
        return _layer(
            x,
            *angles,
            kv_cache.keys,
            kv_cache.values,
            index,
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.block_tables,
            *weights,
        )

    return forward


def _or_empty(bias: np.ndarray | None) -> np.ndarray:
    return NO_BIAS if bias is None else bias


# Plain arguments and tuples, in the order `fuse` gathers them: Numba takes 2 us to receive these, 8 for named tuples.
@compiled
def _layer(
    x,
    cosines,
    sines,
    key_blocks,
    value_blocks,
    index,
    positions,
    slots,
    query_starts,
    block_tables,
    eps,
    attention_norm,
    mlp_norm,
    qkv,
    qkv_biases,
    qkv_sizes,
    output,
    output_bias,
    gate_up,
    gate_up_biases,
    gate_size,
    down,
    down_bias,
):
    """[T, D] -> [T, D]."""
    head_dim = key_blocks.shape[3]
    q_size, k_size = qkv_sizes
    product = multiply(rms_norm(x, attention_norm, eps), qkv, NO_BIAS)
    k_start = _whole_tiles(q_size)
    q = _heads(_columns(product, 0, q_size, qkv_biases[0]), head_dim)
    k = _heads(_columns(product, k_start, k_size, qkv_biases[1]), head_dim)
    v = _heads(_columns(product, k_start + _whole_tiles(k_size), k_size, qkv_biases[2]), head_dim)
    write_kv(rotate(k, cosines, sines), v, key_blocks, value_blocks, index, slots)
    q = rotate(q, cosines, sines)
    gathered = attention(q, key_blocks, value_blocks, index, positions, query_starts, block_tables)
    x = x + multiply(gathered.reshape(len(x), q_size), output, output_bias)
    product = multiply(rms_norm(x, mlp_norm, eps), gate_up, NO_BIAS)
    gate = _columns(product, 0, gate_size, gate_up_biases[0])
    up = _columns(product, _whole_tiles(gate_size), gate_size, gate_up_biases[1])
    return x + multiply(swiglu(gate, up), down, down_bias)


@compiled
def _whole_tiles(outputs):
    return -(-outputs // LANES) * LANES


@compiled
def _columns(product, start, size, bias):
    """One matrix's outputs out of several's, and its bias."""
    columns = np.empty((len(product), size), np.float32)
    for row in range(len(product)):
        for i in range(size):
            columns[row, i] = product[row, start + i]
        for i in range(len(bias)):
            columns[row, i] += bias[i]
    return columns


@compiled
def _heads(x, head_dim):
    """[T, heads * K] -> [T, heads, K]."""
    return x.reshape(len(x), x.shape[1] // head_dim, head_dim)
