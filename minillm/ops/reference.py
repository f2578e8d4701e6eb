"""What each operation computes, in a few lines, for any array library that follows the array API standard.

These are the definitions: the compiled kernels are tested against them, and they against PyTorch. They run on
NumPy as they stand (`backend="numpy"`), where a debugger steps into every line; and the GPU's backend, on CuPy's
arrays, takes what it has no kernel for from here.

Shapes: `T` tokens in the step, `S` sequences, `V` vocabulary, `D` hidden, `F` feed-forward, `H` query heads, `G`
key/value heads, `K` head_dim, `B` block size, `N` blocks. A matrix turns `I` inputs into `O` outputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from minillm.quantization import QuantizedMatrix

Array = Any  # an array of whichever library the caller uses


def namespace(array: Array) -> ModuleType:
    """The module with the functions of an array's library, `xp` by custom: NumPy for a NumPy array.

    The array API standard lets one ask the array; CuPy's, which keep to it otherwise, have to be looked up.
    """
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def array_library() -> ModuleType:
    """Where arrays for this backend are made."""
    return np


def as_indices(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers that say where things are, such as positions, where this backend reads them: as they are."""
    return numbers


def as_vector(values: np.ndarray, xp=np) -> Array:
    """A norm's weights or a layer's bias as a float32 array of the library `xp`."""
    return xp.asarray(np.asarray(values, np.float32))


def as_matrix(weights: np.ndarray | QuantizedMatrix, xp=np) -> Array:
    """A weight matrix as a plain float32 array [O, I] of the library `xp`; quantized weights are widened."""
    if isinstance(weights, QuantizedMatrix):
        weights = weights.dequantize()
    # A file's own pages are copied: if the file were cut short while in use, reading them would kill the process.
    return xp.asarray(np.require(weights, np.float32, ["C", "W"]))


def as_matrices(weights: Iterable[np.ndarray | QuantizedMatrix], xp=np) -> list[Array]:
    """`as_matrix` of several."""
    return [as_matrix(matrix, xp) for matrix in weights]


def num_bytes(matrix: Array) -> int:
    """Bytes that reading the whole matrix moves."""
    return matrix.nbytes


def to_numpy(array: Array) -> np.ndarray:
    """The same numbers as a NumPy array."""
    return np.asarray(array)


def embed(token_ids: np.ndarray, matrix: Array) -> Array:
    """Row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]."""
    xp = namespace(matrix)
    return xp.take(matrix, xp.asarray(token_ids), axis=0)


def linear(x: Array, matrix: Array, bias: Array | None = None) -> Array:
    """`x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]."""
    product = x @ matrix.T
    return product if bias is None else product + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale every row of [T, D] to a root mean square of one, then by `weight` (Zhang & Sennrich 2019)."""
    xp = namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Shift and scale every row of [T, D] to a mean of zero and a variance of one; then times `weight`, plus `bias`.

    Ba, Kiros and Hinton 2016.
    """
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias


def softmax(x: Array) -> Array:
    """Numbers -> probabilities along the last axis; the maximum is taken off first so that exp cannot overflow."""
    xp = namespace(x)
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def silu(x: Array) -> Array:
    """`x * sigmoid(x)` (Hendrycks & Gimpel 2016)."""
    xp = namespace(x)
    e = xp.exp(-xp.abs(x))  # at most 1: exp of a large number would overflow
    return x * xp.where(x >= 0, xp.ones_like(e), e) / (1 + e)


def swiglu(gate: Array, up: Array) -> Array:
    """The gated activation of the feed-forward layer, `silu(gate) * up` (Shazeer 2020): [T, F] twice -> [T, F]."""
    return silu(gate) * up


def gelu(x: Array) -> Array:
    """`x` times a bell curve's share below `x`, nearly, by the tanh that most models use (Hendrycks & Gimpel 2016)."""
    xp = namespace(x)
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def geglu(gate: Array, up: Array) -> Array:
    """`swiglu` with the other curve, `gelu(gate) * up` (Shazeer 2020): [T, F] twice -> [T, F]."""
    return gelu(gate) * up


def apply_soft_cap(x: Array, cap: float) -> Array:
    """Squeeze numbers smoothly between -cap and cap; small ones stay what they are (Gemma 2, 2024)."""
    xp = namespace(x)
    return cap * xp.tanh(x / cap)


def route(scores: Array, count: int, normalize: bool) -> tuple[np.ndarray, Array]:
    """A router's choice for every token: its `count` likeliest experts, and the share that each has in the output.

    Parameters
    ----------
    scores : [T, E]
    count : how many of E experts a token takes
    normalize : whether the routing_weights, which are softmax's of all E, are made to sum to one

    Returns
    -------
    experts, int [T, count] as a NumPy array, likeliest first; routing_weights [T, count]
    """
    xp = namespace(scores)
    probabilities = softmax(scores)
    chosen = xp.argsort(-probabilities, axis=-1, stable=True)[:, :count]
    routing_weights = xp.take_along_axis(probabilities, chosen, axis=-1)
    if normalize:
        routing_weights = routing_weights / xp.sum(routing_weights, axis=-1, keepdims=True)
    return to_numpy(chosen), routing_weights


def rotary_angles(positions: np.ndarray, frequencies: Array, attention_factor: float = 1.0) -> tuple[Array, Array]:
    """Cosines and sines [T, R/2] of the angles `position * frequency` that rotary embedding turns by.

    Both are multiplied by `attention_factor`: what is turned by them grows so much, as some ways of scaling want it.
    """
    xp = namespace(frequencies)
    angles = xp.astype(xp.asarray(positions), xp.float32)[:, None] * frequencies[None, :]
    return xp.cos(angles) * attention_factor, xp.sin(angles) * attention_factor


def rotate(heads: Array, cosines: Array, sines: Array) -> Array:
    """Rotary position embedding: turn pair (i, i + R/2) of every head by its angle (Su et al. 2021).

    Parameters
    ----------
    heads : [T, H, K], queries or keys
    cosines, sines : [T, R/2], from `rotary_angles`; R is K, or less: then what is past R is left as it is
    """
    xp = namespace(heads)
    half = cosines.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    return xp.concat([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def write_kv(keys: Array, values: Array, key_blocks: Array, value_blocks: Array, layer: int, slots: np.ndarray) -> None:
    """Store each token's key and value where later tokens will find them.

    Parameters
    ----------
    keys, values : [T, G, K]
    key_blocks : [N, L, G, K, B], the cache, written in place, float32 or float16; positions lie innermost
    value_blocks : [N, L, G, B, K]
    layer : which of the L layers that a block holds
    slots : int [T], `block * B + offset within the block`
    """
    xp = namespace(keys)
    block_size = value_blocks.shape[3]
    for token, slot in enumerate(slots):
        block, offset = divmod(int(slot), block_size)
        key_blocks[block, layer, :, :, offset] = xp.astype(keys[token, ...], key_blocks.dtype)
        value_blocks[block, layer, :, offset, :] = xp.astype(values[token, ...], value_blocks.dtype)


def attention(
    queries: Array,
    key_blocks: Array,
    value_blocks: Array,
    layer: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Causal attention of every token over its own sequence's keys, found through its block table.

    Parameters
    ----------
    queries : [T, H, K]
    key_blocks, value_blocks : [N, L, G, K, B] and [N, L, G, B, K], the cache; the step's own keys are in it
    layer : which of the L layers that a block holds
    positions : int [T]; those of one sequence follow each other
    query_starts : int [S + 1]; sequence `s` owns tokens `query_starts[s]` to `query_starts[s + 1]`
    block_tables : int [S, most blocks a sequence]; row `s` names the blocks that hold positions 0, B, 2B, ...; those
        that lie wholly behind the window of its sequence's first query are not looked at
    scale, window, soft_cap : see `attend`

    Returns
    -------
    [T, H, K]
    """
    xp = namespace(queries)
    attended = []
    for sequence, table in enumerate(block_tables):
        own = slice(int(query_starts[sequence]), int(query_starts[sequence + 1]))
        seen = reached(positions[own], window)
        keys = in_one_piece(positions_first(key_blocks), layer, table, seen, queries.dtype)
        values = in_one_piece(value_blocks, layer, table, seen, queries.dtype)
        places = xp.asarray(positions[own] - seen.start)
        attended.append(attend(queries[own, ...], keys, values, places, scale, window, soft_cap))
    return xp.concat(attended, axis=0)


def attention_scores(
    queries: Array,
    key_blocks: Array,
    layer: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """What `attention` takes the softmax of, for those who want to look: no backend's `attention` need ever hold it.

    Parameters are those of `attention`.

    Returns
    -------
    [T, H, M], M the length of the longest sequence so far: a score for each position, and -infinity for those that the
    query does not see, or its sequence does not have. `softmax` makes of that the weights, 0 where nothing is seen.
    """
    xp = namespace(queries)
    longest, scores = int(np.max(positions)) + 1, []
    for sequence, table in enumerate(block_tables):
        own = slice(int(query_starts[sequence]), int(query_starts[sequence + 1]))
        seen = reached(positions[own], window)
        keys = in_one_piece(positions_first(key_blocks), layer, table, seen, queries.dtype)
        scored = score(queries[own, ...], keys, xp.asarray(positions[own] - seen.start), scale, window, soft_cap)
        scored = xp.permute_dims(scored, (1, 0, 2))
        before, beyond = (
            xp.full((*scored.shape[:2], unseen), -math.inf, dtype=scored.dtype)
            for unseen in (seen.start, longest - seen.stop)
        )
        scores.append(xp.concat([before, scored, beyond], axis=2))
    return xp.concat(scores, axis=0)


def positions_first(key_blocks: Array) -> Array:
    """Cached keys [N, L, G, K, B] in the order in which values lie, [N, L, G, B, K]: a view."""
    return namespace(key_blocks).permute_dims(key_blocks, (0, 1, 2, 4, 3))


def reached(positions: np.ndarray, window: int | None = None) -> slice:
    """The positions that queries at `positions`, which follow each other, can see: the first's window to the last."""
    return slice(0 if window is None else max(0, int(positions[0]) - window + 1), int(positions[-1]) + 1)


def in_one_piece(blocks: Array, layer: int, table: np.ndarray, seen: slice, dtype: Any) -> Array:
    """One sequence's keys or values in a layer, of the positions `seen`, as if never cut into blocks.

    [N, L, G, B, K] -> [G, positions, K]
    """
    xp = namespace(blocks)
    heads, block_size, head_dim = blocks.shape[2:]
    first = seen.start // block_size
    taken = xp.take(blocks[:, layer, ...], xp.asarray(table[first : math.ceil(seen.stop / block_size)]), axis=0)
    whole = xp.reshape(xp.permute_dims(taken, (1, 0, 2, 3)), (heads, -1, head_dim))
    start = first * block_size
    return xp.astype(whole[:, seen.start - start : seen.stop - start, :], dtype)  # of a float16 cache


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Grouped-query attention within one sequence (Vaswani et al. 2017; Ainslie et al. 2023).

    Parameters
    ----------
    queries : [n, H, K], of the tokens at `positions`
    keys, values : [G, m, K], of positions 0 to m - 1
    positions : int [n]; all positions may be counted from any one on, as long as the first query sees none before it
    scale : what a score is multiplied by; None for 1 / sqrt(K)
    window : how many keys a query sees, the last of them its own (Beltagy et al. 2020); None for all there are
    soft_cap : what scores are squeezed below, see `apply_soft_cap`; None for none

    Returns
    -------
    [n, H, K]: for every query the mean of the values it may see, weighted by softmax(query . key * scale)
    """
    xp = namespace(queries)
    values = xp.repeat(values, queries.shape[1] // values.shape[0], axis=0)
    weights = softmax(score(queries, keys, positions, scale, window, soft_cap))  # [H, n, m]
    return xp.permute_dims(weights @ values, (1, 0, 2))


def score(
    queries: Array,
    keys: Array,
    positions: Array,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """How well each key answers each query, query . key / sqrt(K), and -infinity where a query may not look.

    Parameters and shapes are those of `attend`: [n, H, K] and [G, m, K] -> [H, n, m].
    """
    xp = namespace(queries)
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    keys = xp.repeat(keys, num_heads // keys.shape[0], axis=0)  # query heads that share one key/value head
    scores = xp.permute_dims(queries, (1, 0, 2)) @ xp.permute_dims(keys, (0, 2, 1))
    scores = scores / math.sqrt(head_dim) if scale is None else scores * scale
    if soft_cap is not None:
        scores = apply_soft_cap(scores, soft_cap)
    seen = visible(positions, keys.shape[1], window)
    return xp.where(seen, scores, xp.asarray(-math.inf, dtype=scores.dtype))


def visible(positions: Array, num_keys: int, window: int | None = None) -> Array:
    """Which keys, of positions 0 to `num_keys` - 1, each query may see: bool [n, num_keys].

    Itself and what came before; with a window, only so many, the last of them its own (Beltagy et al. 2020).
    """
    xp = namespace(positions)
    distances = positions[:, None] - xp.arange(num_keys)[None, :]
    return (distances >= 0) if window is None else (distances >= 0) & (distances < window)


def fuse(layers: Sequence[Any], config: Any) -> None:
    """No faster way through the layers than operation by operation."""


def set_num_threads(threads: int | None) -> None:
    """Only None, "as many as the array library likes", can be had here: its threads are its own affair.

    Raises
    ------
    ValueError
        A number was given.
    """
    if threads is not None:
        raise ValueError(
            f"threads is {threads}, but backend 'numpy' leaves threads to NumPy's BLAS: "
            "set OMP_NUM_THREADS before starting Python, or use backend 'numba'"
        )


def check_threads() -> None:
    """Whatever threads the array library has, this project knows nothing against them."""


def announcing_compilation(announce: Callable[[str], None]) -> AbstractContextManager[None]:
    """Nothing is compiled here, so there is never anything to say."""
    return nullcontext()
