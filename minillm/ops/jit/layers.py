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
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from minillm.ops.jit.attention import NO_WINDOW, attend, keep_kv, scoring
from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.float16 import stored
from minillm.ops.jit.pointwise import GELU, SILU, gated_joined, rms_norm, rotate
from minillm.ops.jit.products import NO_BIAS, add_bias, multiply
from minillm.ops.jit.tiles import TiledMatrix, joined, whole
from minillm.ops.jit.weight_formats import LANES


def fuse(layers: Sequence[Any], config: Any) -> Callable | None:
    """The compiled pass through all layers (each a `minillm.model.weights.Layer`): `(x, angles, batch, kv_cache) -> x`.

    Queries, keys and values come out of one product, and so do gate and up: fewer, larger pieces of work to share
    among the threads. Files may keep more bits of some: where values differ from queries and keys, they have a product
    of their own, and from layer to layer a projection may be of two kinds. None where matrices differ otherwise; for
    models with layer norm, learned positions, an MLP without a gate, or experts; and with the compiler off, where the
    readable pass is as fast and can be stepped through. `config` is a ModelConfig.
    """
    if numba.config.DISABLE_JIT or not _serves(config):
        return None
    qkv, own_v = [], []
    for layer in layers:
        together = joined([layer.q.weight, layer.k.weight, layer.v.weight])
        qkv.append(together or joined([layer.q.weight, layer.k.weight]))
        own_v.append(None if together else layer.v.weight)
    gate_up = [joined([layer.mlp.gate.weight, layer.mlp.up.weight]) for layer in layers]
    if None in qkv or None in gate_up:
        return None
    output, down = [layer.output.weight for layer in layers], [layer.mlp.down.weight for layer in layers]
    stacks = [_stacked(matrices) for matrices in (qkv, own_v if any(own_v) else qkv, output, gate_up, down)]
    if None in stacks:
        return None
    if not any(own_v):
        stacks[1] = *stacks[0][:2], np.zeros_like(stacks[0][2])
    first = layers[0]
    weights = (
        np.float32(config.norm_eps),
        np.array([config.window(index) or NO_WINDOW for index in range(len(layers))], np.int64),
        scoring(config.head_dim, config.query_scale, None, config.attention_soft_cap),
        int(GELU if config.activation == "gelu" else SILU),  # plain: Numba takes longer to receive the other
        tuple(_norms(layers, name) for name in ("attention_norm", "q_norm", "k_norm", "post_attention_norm")),
        tuple(_norms(layers, name) for name in ("mlp_norm", "post_mlp_norm")),
        *stacks,
        (first.q.weight.num_outputs, first.k.weight.num_outputs, first.mlp.gate.weight.num_outputs),
        tuple(_biases([getattr(layer, name) for layer in layers]) for name in "qkv"),
        (
            _biases([layer.output for layer in layers]),
            *(_biases([getattr(layer.mlp, name) for layer in layers]) for name in ("gate", "up", "down")),
        ),
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
            kv_cache.layer_slots,
            *weights,
        )

    return forward


def _serves(config: Any) -> bool:
    return config.norm == "rms" and config.gated and not config.learned_positions and not config.num_experts


def _norms(layers: Sequence[Any], name: str) -> np.ndarray:
    """The weights of one norm in all layers, [L, D], or [L, 0] where there is none."""
    norms = [getattr(layer, name) for layer in layers]
    return np.stack([NO_BIAS if norm is None else norm.weight for norm in norms])


# One projection of all layers: the matrices of one kind end to end, those of another (or the first again), and which of
# the two each layer's lies in, from which tile on, how many, and how many outputs it has: int64 [L, 4].
Stack = tuple[tuple, tuple, np.ndarray]


def _stacked(matrices: Sequence[TiledMatrix | None]) -> Stack | None:
    """Every layer's matrix of one projection, None where a layer has none; None if they are of more than two kinds."""
    kinds: dict[int, TiledMatrix] = {}
    places = np.zeros((len(matrices), 4), np.int64)
    for place, matrix in zip(places, matrices, strict=True):
        if matrix is None:
            continue
        laid_in, start = whole(matrix)
        kinds.setdefault(id(laid_in.codes), laid_in)
        place[:] = list(kinds).index(id(laid_in.codes)), start, len(matrix.codes), matrix.num_outputs
    if len(kinds) > 2:
        return None
    first, *others = kinds.values()
    return tuple(first), tuple(others[0] if others else first), places


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
    cache_places,
    eps,
    windows,
    how,
    activation,
    attention_norms,
    mlp_norms,
    qkv,
    own_v,
    output,
    gate_up,
    down,
    sizes,
    qkv_biases,
    other_biases,
):
    """[T, D] -> [T, D]."""
    head_dim = key_blocks.shape[3]
    norms, q_norms, k_norms, post_attention_norms = attention_norms
    norms_of_mlp, post_mlp_norms = mlp_norms
    q_size, k_size, gate_size = sizes
    q_biases, k_biases, v_biases = qkv_biases
    output_biases, gate_biases, up_biases, down_biases = other_biases
    k_start = _whole_tiles(q_size)
    v_start, up_start = k_start + _whole_tiles(k_size), _whole_tiles(gate_size)
    no_bias = np.empty(0, np.float32)  # of a bias's type, where the constant NO_BIAS would be compiled for anew
    for layer in range(len(windows)):
        normed = rms_norm(x, norms[layer], eps)
        product = _multiply(normed, qkv, layer, no_bias)
        add_bias(product, 0, q_biases[layer])
        add_bias(product, k_start, k_biases[layer])
        q = _heads(product, 0, q_size, head_dim)
        k = _heads(product, k_start, k_size, head_dim)
        start_of_v = v_start
        if _has(own_v, layer):
            product, start_of_v = _multiply(normed, own_v, layer, no_bias), 0
        add_bias(product, start_of_v, v_biases[layer])
        v = _heads(product, start_of_v, k_size, head_dim)
        q, k = _norm_heads(q, q_norms[layer], eps), _norm_heads(k, k_norms[layer], eps)
        cosines, sines = window_angles if windows[layer] < NO_WINDOW else angles
        group, place = cache_places[layer]
        keep_kv(rotate(k, cosines, sines), v, key_blocks, value_blocks, place, slots[group])
        q = rotate(q, cosines, sines)
        here = how[0], windows[layer], how[2]
        tables = block_tables[group]
        gathered = attend(q, key_blocks, value_blocks, place, positions, query_starts, tables, here)
        gathered = _multiply(gathered.reshape(len(x), q_size), output, layer, output_biases[layer])
        x = x + _norm(gathered, post_attention_norms[layer], eps)
        product = _multiply(rms_norm(x, norms_of_mlp[layer], eps), gate_up, layer, no_bias)
        add_bias(product, 0, gate_biases[layer])
        add_bias(product, up_start, up_biases[layer])
        gated = gated_joined(product, up_start, gate_size, activation)
        x = x + _norm(_multiply(gated, down, layer, down_biases[layer]), post_mlp_norms[layer], eps)
    return x


@compiled
def _has(stack, layer):
    """Whether a layer has this projection."""
    return stack[2][layer, 2] > 0


def _multiply(x, stack, layer, bias):
    """The product with a layer's matrix of one projection. Only compiled code calls it."""


@overload(_multiply)
def _compiled_multiply(x, stack, layer, bias):
    def of_one_kind(x, stack, layer, bias):
        matrices, _, places = stack
        _, start, tiles, outputs = places[layer]
        return multiply(x, _part(matrices, start, tiles, outputs), bias)

    def of_two_kinds(x, stack, layer, bias):
        first, second, places = stack
        which, start, tiles, outputs = places[layer]
        if which == 0:
            return multiply(x, _part(first, start, tiles, outputs), bias)
        return multiply(x, _part(second, start, tiles, outputs), bias)

    return of_one_kind if stack[0] == stack[1] else of_two_kinds  # of their types: each call takes its time to compile


@compiled
def _part(matrix, start, tiles, outputs):
    """One matrix of those that lie end to end."""
    codes, scales, minimums, shared, zero, block_size, _, inputs = matrix
    part = slice(start, start + tiles)
    return codes[part], scales[part], minimums[part], shared[part], zero, block_size, outputs, inputs


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
