"""All layers in one call: the code of `Transformer._layer`, repeated for every layer and compiled into one function.

A token takes about four milliseconds, so the calls from Python matter: sixteen calls per layer, of one or two
microseconds each, take a fifth of a decode step. One call per layer would still take a tenth, because Numba has to
receive dozens of arrays. The kernels are the same as in separate calls, so the bits are too. `Transformer._layer`
remains the definition, and runs when a probe is set or a debugger is attached.

Differences between models are in the arguments: a norm that a model lacks has length zero, and a layer without a window
gets one that is longer than any sequence. One compiled function therefore serves many models. The others run operation
by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from minillm.ops.jit.attention import NO_WINDOW, attend, scoring_of, write_to_cache
from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.float16 import as_stored
from minillm.ops.jit.pointwise import GELU, SILU, gated_joined, rms_norm, rotate
from minillm.ops.jit.products import NO_BIAS, add_bias, multiply
from minillm.ops.jit.tiles import TiledMatrix, joined, whole
from minillm.ops.jit.weight_formats import LANES


def fuse(layers: Sequence[Any], config: Any) -> Callable | None:
    """Return the compiled pass through all layers, `(x, angles, batch, kv_cache) -> x`, or None if there is none.

    Parameters
    ----------
    layers : each a `minillm.model.weights.Layer`
    config : a ModelConfig

    Notes
    -----
    Queries, keys and values come from one product, and so do gate and up: larger pieces of work are easier to share
    among the threads. Files may store some matrices with more bits: if the values' matrix differs from the queries' and
    keys', it is multiplied in a separate product; and a projection may have one format in some layers and a second
    format in the others.

    There is no compiled pass for matrices that differ in other ways; for models with layer norm, learned positions, an
    MLP without a gate, or experts; and with the compiler off, where the readable pass is as fast and can be debugged.
    """
    if numba.config.DISABLE_JIT or not _is_supported(config):
        return None
    qkv: list[TiledMatrix | None] = []
    own_v: list[TiledMatrix | None] = []
    for layer in layers:
        qkv_joined = joined([layer.q.weight, layer.k.weight, layer.v.weight])
        qkv.append(qkv_joined or joined([layer.q.weight, layer.k.weight]))
        own_v.append(None if qkv_joined else layer.v.weight)
    gate_up = [joined([layer.mlp.gate.weight, layer.mlp.up.weight]) for layer in layers]
    if None in qkv or None in gate_up:
        return None
    output, down = [layer.output.weight for layer in layers], [layer.mlp.down.weight for layer in layers]
    projections = qkv, own_v if any(own_v) else qkv, output, gate_up, down
    stacks = [stack for stack in map(_stacked, projections) if stack is not None]
    if len(stacks) < len(projections):
        return None
    if not any(own_v):
        stacks[1] = *stacks[0][:2], np.zeros_like(stacks[0][2])
    first = layers[0]
    options = (
        np.float32(config.norm_eps),
        np.array([config.window(index) or NO_WINDOW for index in range(len(layers))], np.int64),
        scoring_of(config.head_dim, config.attention_scale, None, config.attention_soft_cap),
        int(GELU if config.activation == "gelu" else SILU),  # a plain int: Numba takes longer to receive an np.int64
        (first.q.weight.num_outputs, first.k.weight.num_outputs, first.mlp.gate.weight.num_outputs),
    )
    vectors = (
        tuple(_norms(layers, name) for name in ("attention_norm", "q_norm", "k_norm", "post_attention_norm")),
        tuple(_norms(layers, name) for name in ("mlp_norm", "post_mlp_norm")),
        tuple(_biases([getattr(layer, name) for layer in layers]) for name in "qkv"),
        (
            _biases([layer.output for layer in layers]),
            *(_biases([getattr(layer.mlp, name) for layer in layers]) for name in ("gate", "up", "down")),
        ),
    )
    matrices = tuple(stacks)

    def forward(x: np.ndarray, angles: Any, batch: Any, kv_cache: Any) -> np.ndarray:
        return _layers(
            x,
            (angles[None], angles.get(config.sliding_window, angles[None])),
            (batch.positions, batch.slots, batch.query_starts, batch.block_tables),
            (as_stored(kv_cache.keys), as_stored(kv_cache.values), kv_cache.layer_places),
            (options, vectors, matrices),
        )

    return forward


def _is_supported(config: Any) -> bool:
    return config.norm == "rms" and config.gated and not config.learned_positions and not config.num_experts


def _norms(layers: Sequence[Any], name: str) -> np.ndarray:
    """Return the weights of one norm in all layers, [L, D], or [L, 0] if the model lacks it."""
    norms = [getattr(layer, name) for layer in layers]
    return np.stack([NO_BIAS if norm is None else norm.weight for norm in norms])


# One projection of all layers, as three items: the concatenated matrices of one format; those of a second format (or
# the first item again, if all layers have the same format); and int64 [L, 4], which holds for each layer the format (0
# or 1), the first tile, the number of tiles and the number of outputs.
Stack = tuple[tuple, tuple, np.ndarray]


def _stacked(matrices: Sequence[TiledMatrix | None]) -> Stack | None:
    """Stack every layer's matrix of one projection (None where it has none); return None for more than two formats."""
    formats: dict[int, TiledMatrix] = {}
    index = np.zeros((len(matrices), 4), np.int64)
    for entry, matrix in zip(index, matrices, strict=True):
        if matrix is None:
            continue
        array, start = whole(matrix)
        formats.setdefault(id(array.codes), array)
        entry[:] = list(formats).index(id(array.codes)), start, len(matrix.codes), matrix.num_outputs
    if len(formats) > 2:
        return None
    first, *others = formats.values()
    return tuple(first), tuple(others[0] if others else first), index


def _biases(linears: Sequence[Any]) -> np.ndarray:
    """Return the biases of one projection in all layers, [L, O], or [L, 0] if there are none."""
    return np.stack([NO_BIAS if linear.bias is None else linear.bias for linear in linears])


@compiled
def _layers(x, angles, batch, cache, weights):
    """Run the tokens through all layers, [T, D] -> [T, D].

    The arguments are plain tuples, which Numba receives in 2 us; named tuples take 8. Four tuples are as fast as 23
    plain arguments: measured on two cores, decode at 64 tokens of context took 3.14 to 3.30 ms with tuples and 3.20 to
    3.36 ms without (three alternating rounds), and prefill of 512 tokens 479 to 493 ms and 492 to 671 ms.
    """
    angles, window_angles = angles
    positions, slots, query_starts, block_tables = batch
    key_blocks, value_blocks, layer_places = cache
    options, vectors, matrices = weights
    eps, windows, scoring, activation, sizes = options
    attention_norms, mlp_norms, qkv_biases, other_biases = vectors
    qkv, own_v, output, gate_up, down = matrices
    norms, q_norms, k_norms, post_attention_norms = attention_norms
    norms_of_mlp, post_mlp_norms = mlp_norms
    q_biases, k_biases, v_biases = qkv_biases
    output_biases, gate_biases, up_biases, down_biases = other_biases
    q_size, k_size, gate_size = sizes
    head_dim = key_blocks.shape[3]
    k_start = _whole_tiles(q_size)
    v_start, up_start = k_start + _whole_tiles(k_size), _whole_tiles(gate_size)
    no_bias = np.empty(0, np.float32)  # of a bias's type; for the constant NO_BIAS, a second version would be compiled
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
        group, layer_in_block = layer_places[layer]
        layer_cache = key_blocks, value_blocks, layer_in_block
        write_to_cache(rotate(k, cosines, sines), v, layer_cache, slots[group])
        q = rotate(q, cosines, sines)
        queries = positions, query_starts, block_tables[group]
        gathered = attend(q, layer_cache, queries, (scoring[0], windows[layer], scoring[2]))
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
    """Return whether a layer has this projection."""
    return stack[2][layer, 2] > 0


def _multiply(x, stack, layer, bias):
    """Multiply with a layer's matrix of one projection. Only compiled code calls this."""


@overload(_multiply)
def _compiled_multiply(x, stack, layer, bias):
    def one_format(x, stack, layer, bias):
        matrices, _, index = stack
        _, start, tiles, outputs = index[layer]
        return multiply(x, _part(matrices, start, tiles, outputs), bias)

    def two_formats(x, stack, layer, bias):
        first, second, index = stack
        matrix_format, start, tiles, outputs = index[layer]
        if matrix_format == 0:
            return multiply(x, _part(first, start, tiles, outputs), bias)
        return multiply(x, _part(second, start, tiles, outputs), bias)

    return one_format if stack[0] == stack[1] else two_formats  # of their types; each call costs compile time


@compiled
def _part(matrix, start, tiles, outputs):
    """Return one of the matrices that are stored end to end."""
    codes, scales, minimums, shared, zero, block_size, _, inputs = matrix
    part = slice(start, start + tiles)
    return codes[part], scales[part], minimums[part], shared[part], zero, block_size, outputs, inputs


@compiled
def _norm(x, weight, eps):
    """Normalize [T, D], if the model has this norm."""
    return rms_norm(x, weight, eps) if len(weight) else x


@compiled
def _norm_heads(heads, weight, eps):
    """Normalize every head of [T, H, K], if the model has this norm."""
    tokens, count, head_dim = heads.shape
    return _norm(heads.reshape(tokens * count, head_dim), weight, eps).reshape(tokens, count, head_dim)


@compiled
def _whole_tiles(outputs):
    return -(-outputs // LANES) * LANES


@compiled
def _heads(product, start, size, head_dim):
    """Return the outputs of one of several joined matrices, by heads: [T, heads, K]."""
    heads = np.empty((len(product), size), np.float32)
    for row in range(len(product)):
        for i in range(size):
            heads[row, i] = product[row, start + i]
    return heads.reshape(len(product), size // head_dim, head_dim)
