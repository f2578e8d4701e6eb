"""All layers in one call: what `Transformer._layer` says, again and again, compiled into one piece.

At four thousandths of a second a token, Python's share counts: sixteen calls a layer, a microsecond or two each, come
to a fifth of a decode step, and one call a layer still to a tenth, so many arrays has Numba to receive. The kernels
are the very same, so are the bits; `Transformer._layer` remains the definition, and runs whenever somebody watches
with a probe.

What models differ in is in the arguments: norms that a model lacks are of no length, layers without a window have one
that no text fills. So there is one compiled pass for all that this one serves; the others go operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numba
import numpy as np

from minillm.ops.jit.attention import NO_WINDOW, attend, keep_kv, scoring
from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.halves import stored
from minillm.ops.jit.pointwise import GELU, SILU, gated_joined, rms_norm, rotate
from minillm.ops.jit.products import NO_BIAS, add_bias, multiply
from minillm.ops.jit.tiles import LANES, TiledMatrix, joined


def fuse(layers: Sequence[Any], config: Any) -> Callable | None:
    """The compiled pass through all layers (each a `minillm.weights.Layer`): `(x, angles, batch, kv_cache) -> x`.

    Queries, keys and values come out of one product, and so do gate and up: fewer, larger pieces of work to share
    among the threads. Files may keep more bits of some: where values differ from queries and keys, they have a product
    of their own; where layers differ, a call goes as far as they are alike. None where the matrices of a layer differ
    otherwise; for models with layer norm, learned positions, an MLP without a gate, or experts; and with the compiler
    off, where the readable pass is as fast and can be stepped through. `config` is a ModelConfig.
    """
    if numba.config.DISABLE_JIT or not _serves(config):
        return None
    passes, start = [], 0
    for _, run in groupby(layers, _arrays):
        of_run = list(run)
        passes.append(_fuse_run(of_run, start, config))
        start += len(of_run)
    if None in passes:
        return None
    if len(passes) == 1:
        return passes[0]

    def forward(x, angles, batch, kv_cache):
        for run in passes:
            x = run(x, angles, batch, kv_cache)
        return x

    return forward


def _arrays(layer: Any) -> list[int]:
    """Which arrays a layer's matrices lie in: of neighbours in the same ones, all are of the same kinds."""
    names = ("q", "k", "v", "output", "gate", "up", "down")
    return [id(getattr(layer, name).weight.codes.base) for name in names]


def _fuse_run(layers: Sequence[Any], start: int, config: Any) -> Callable | None:
    """`fuse` for neighbours, the first of them layer number `start`, whose weights are of one kind."""
    qkv, qk, v, output, gate_up, down = (
        _stacked([[getattr(layer, name).weight for name in names] for layer in layers])
        for names in (["q", "k", "v"], ["q", "k"], ["v"], ["output"], ["gate", "up"], ["down"])
    )
    if qkv:
        v = qkv._replace(codes=qkv.codes[:0])  # is part of it
    else:
        qkv = qk
    if None in (qkv, v, output, gate_up, down):
        return None
    first = layers[0]
    weights = (
        np.float32(config.norm_eps),
        start,
        np.array([config.window(start + index) or NO_WINDOW for index in range(len(layers))], np.int64),
        scoring(config.head_dim, config.query_scale, None, config.attention_soft_cap),
        GELU if config.activation == "gelu" else SILU,
        tuple(_norms(layers, name) for name in ("attention_norm", "q_norm", "k_norm", "post_attention_norm")),
        tuple(_norms(layers, name) for name in ("mlp_norm", "post_mlp_norm")),
        tuple(qkv),
        tuple(v),
        tuple(_biases([getattr(layer, name) for layer in layers]) for name in "qkv"),
        (first.q.weight.num_outputs, first.k.weight.num_outputs),
        tuple(output),
        _biases([layer.output for layer in layers]),
        tuple(gate_up),
        tuple(_biases([getattr(layer, name) for layer in layers]) for name in ("gate", "up")),
        first.gate.weight.num_outputs,
        tuple(down),
        _biases([layer.down for layer in layers]),
    )

    def forward(x, angles, batch, kv_cache):
        return _layers(
            x,
            angles[None],
            angles.get(config.sliding_window, angles[None]),
            stored(kv_cache.keys),
            stored(kv_cache.values),
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.block_tables,
            *weights,
        )

    return forward


def _serves(config: Any) -> bool:
    return config.norm == "rms" and config.gated and not config.learned_positions and not config.num_experts


def _norms(layers: Sequence[Any], name: str) -> np.ndarray:
    """The weights of one norm in all layers, [L, D], or [L, 0] where there is none."""
    norms = [getattr(layer, name) for layer in layers]
    return np.stack([NO_BIAS if norm is None else norm.weight for norm in norms])


def _stacked(matrices: Sequence[Sequence[TiledMatrix]]) -> TiledMatrix | None:
    """Every layer's matrices end to end, each layer's joined to one, whose outputs `num_outputs` counts."""
    stack = joined([matrix for of_layer in matrices for matrix in of_layer])
    of_layer = joined(matrices[0]) if len(matrices[0]) > 1 else matrices[0][0]
    return stack and stack._replace(num_outputs=of_layer.num_outputs)


def _biases(linears: Sequence[Any]) -> np.ndarray:
    """The biases of all layers, [L, O], or [L, 0] where there are none."""
    return np.stack([NO_BIAS if linear.bias is None else linear.bias for linear in linears])


# Plain arguments and tuples, in the order `fuse` gathers them: Numba takes 2 us to receive these, 8 for named tuples.
@compiled
def _layers(
    x,
    angles,
    window_angles,
    key_blocks,
    value_blocks,
    positions,
    slots,
    query_starts,
    block_tables,
    eps,
    first_layer,
    windows,
    how,
    activation,
    attention_norms,
    mlp_norms,
    qkv,
    own_v,
    qkv_biases,
    qkv_sizes,
    output,
    output_biases,
    gate_up,
    gate_up_biases,
    gate_size,
    down,
    down_biases,
):
    """[T, D] -> [T, D]."""
    head_dim, count = key_blocks.shape[3], len(windows)
    norms, q_norms, k_norms, post_attention_norms = attention_norms
    norms_of_mlp, post_mlp_norms = mlp_norms
    q_size, k_size = qkv_sizes
    k_start = _whole_tiles(q_size)
    v_start, up_start = k_start + _whole_tiles(k_size), _whole_tiles(gate_size)
    no_bias = np.empty(0, np.float32)  # of a bias's type, where the constant NO_BIAS would be compiled for anew
    for index in range(count):
        layer = first_layer + index
        normed = rms_norm(x, norms[index], eps)
        product = multiply(normed, _of_layer(qkv, index, count), no_bias)
        add_bias(product, 0, qkv_biases[0][index])
        add_bias(product, k_start, qkv_biases[1][index])
        q = _heads(product, 0, q_size, head_dim)
        k = _heads(product, k_start, k_size, head_dim)
        start_of_v = v_start
        if len(own_v[0]):
            product, start_of_v = multiply(normed, _of_layer(own_v, index, count), no_bias), 0
        add_bias(product, start_of_v, qkv_biases[2][index])
        v = _heads(product, start_of_v, k_size, head_dim)
        q, k = _norm_heads(q, q_norms[index], eps), _norm_heads(k, k_norms[index], eps)
        cosines, sines = window_angles if windows[index] < NO_WINDOW else angles
        keep_kv(rotate(k, cosines, sines), v, key_blocks, value_blocks, layer, slots)
        q = rotate(q, cosines, sines)
        here = how[0], windows[index], how[2]
        gathered = attend(q, key_blocks, value_blocks, layer, positions, query_starts, block_tables, here)
        gathered = gathered.reshape(len(x), q_size)
        gathered = multiply(gathered, _of_layer(output, index, count), output_biases[index])
        x = x + _norm(gathered, post_attention_norms[index], eps)
        product = multiply(rms_norm(x, norms_of_mlp[index], eps), _of_layer(gate_up, index, count), no_bias)
        add_bias(product, 0, gate_up_biases[0][index])
        add_bias(product, up_start, gate_up_biases[1][index])
        gated = gated_joined(product, up_start, gate_size, activation)
        product = multiply(gated, _of_layer(down, index, count), down_biases[index])
        x = x + _norm(product, post_mlp_norms[index], eps)
    return x


@compiled
def _norm(x, weight, eps):
    """The norm of [T, D], if there is one."""
    return rms_norm(x, weight, eps) if len(weight) else x


@compiled
def _norm_heads(heads, weight, eps):
    """The norm of every head of [T, H, K], if there is one."""
    tokens, count, head_dim = heads.shape
    return _norm(heads.reshape(tokens * count, head_dim), weight, eps).reshape(tokens, count, head_dim)


@compiled
def _of_layer(matrix, index, count):
    """One layer's share of the matrices that `count` layers have end to end."""
    codes, scales, minimums, zero, block_size, outputs, inputs = matrix
    tiles = len(codes) // count
    part = slice(index * tiles, (index + 1) * tiles)
    return codes[part], scales[part], minimums[part], zero, block_size, outputs, inputs


@compiled
def _whole_tiles(outputs):
    return -(-outputs // LANES) * LANES


@compiled
def _heads(product, start, size, head_dim):
    """One matrix's outputs out of several's, by heads: [T, heads, K]."""
    heads = np.empty((len(product), size), np.float32)
    for row in range(len(product)):
        for i in range(size):
            heads[row, i] = product[row, start + i]
    return heads.reshape(len(product), size // head_dim, head_dim)
