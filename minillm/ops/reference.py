"""The definition of each operation, in a few lines, for any array library that follows the array API standard.

The compiled kernels are tested against these definitions, and the definitions against PyTorch. They run on NumPy
(`backend="numpy"`), where a debugger can step into every line. The GPU backend runs them on CuPy arrays for the
operations that it has no kernel for.

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

FLOAT16_LIMIT = np.float32(65520)  # halfway from the largest float16, 65504, to 2^16: from here on, infinity

Array = Any  # an array of the caller's library


def namespace(array: Array) -> ModuleType:
    """Return the module of an array's library, which is called `xp` by convention: NumPy for a NumPy array.

    In the array API standard, the array provides it. CuPy's arrays do not, so their module is looked up by name.
    """
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def array_library() -> ModuleType:
    """Return the library that creates the arrays of this backend."""
    return np


def as_indices(numbers: np.ndarray) -> np.ndarray:
    """Return integers such as positions in the form that this backend reads: unchanged."""
    return numbers


def as_vector(values: np.ndarray, xp: Any = np) -> Array:
    """Return the weight of a norm, or a bias, as a float32 array of the library `xp`."""
    return xp.asarray(np.asarray(values, np.float32))


def as_matrix(weights: np.ndarray | QuantizedMatrix, xp: Any = np) -> Array:
    """Return a weight matrix as a float32 array [O, I] of the library `xp`. Quantized weights are dequantized."""
    if isinstance(weights, QuantizedMatrix):
        weights = weights.dequantize()
    # Memory-mapped pages are copied: if the file were truncated while in use, reading them would kill the process.
    return xp.asarray(np.require(weights, np.float32, ["C", "W"]))


def as_matrices(weights: Iterable[np.ndarray | QuantizedMatrix], xp: Any = np) -> list[Array]:
    """Apply `as_matrix` to several matrices."""
    return [as_matrix(matrix, xp) for matrix in weights]


def num_bytes(matrix: Array) -> int:
    """Return the bytes read when the whole matrix is read."""
    return matrix.nbytes


def to_numpy(array: Array) -> np.ndarray:
    """Return the same numbers as a NumPy array."""
    return np.asarray(array)


def embed(token_ids: np.ndarray, matrix: Array) -> Array:
    """Return row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]."""
    xp = namespace(matrix)
    return xp.take(matrix, xp.asarray(token_ids), axis=0)


def linear(x: Array, matrix: Array, bias: Array | None = None) -> Array:
    """Compute `x @ matrix.T + bias`: [T, I] by [O, I] -> [T, O]."""
    product = x @ matrix.T
    return product if bias is None else product + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale every row of [T, D] to a root mean square of one, then multiply by `weight` (Zhang & Sennrich 2019)."""
    xp = namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Normalize every row of [T, D] to mean zero and variance one, then multiply by `weight` and add `bias`.

    Source: Ba, Kiros and Hinton 2016.
    """
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias


def softmax(x: Array) -> Array:
    """Turn scores into probabilities along the last axis. Subtracting the maximum keeps exp from overflowing."""
    xp = namespace(x)
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def silu(x: Array) -> Array:
    """Compute `x * sigmoid(x)` (Hendrycks & Gimpel 2016)."""
    xp = namespace(x)
    e = xp.exp(-xp.abs(x))  # at most 1: exp of a large number would overflow
    return x * xp.where(x >= 0, xp.ones_like(e), e) / (1 + e)


def swiglu(gate: Array, up: Array) -> Array:
    """Compute the gated activation `silu(gate) * up` (Shazeer 2020): two [T, F] -> [T, F]."""
    return silu(gate) * up


def gelu(x: Array) -> Array:
    """Compute the tanh approximation of `x` times the normal CDF of `x` (Hendrycks & Gimpel 2016)."""
    xp = namespace(x)
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def geglu(gate: Array, up: Array) -> Array:
    """Compute the gated activation `gelu(gate) * up` (Shazeer 2020): two [T, F] -> [T, F]."""
    return gelu(gate) * up


def apply_soft_cap(x: Array, cap: float) -> Array:
    """Limit numbers smoothly to between -cap and cap; small ones hardly change (Gemma 2, 2024)."""
    xp = namespace(x)
    return cap * xp.tanh(x / cap)


def route(scores: Array, count: int, normalize: bool) -> tuple[np.ndarray, Array]:
    """Choose the `count` most likely experts of every token, and the weight of each in the token's output.

    Parameters
    ----------
    scores : [T, E]
    count : experts per token
    normalize : whether to scale a token's weights, which are softmax probabilities over all E, to sum to one

    Returns
    -------
    experts : int [T, count] as a NumPy array, most likely first
    routing_weights : [T, count]
    """
    xp = namespace(scores)
    probabilities = softmax(scores)
    chosen = xp.argsort(-probabilities, axis=-1, stable=True)[:, :count]
    routing_weights = xp.take_along_axis(probabilities, chosen, axis=-1)
    if normalize:
        routing_weights = routing_weights / xp.sum(routing_weights, axis=-1, keepdims=True)
    return to_numpy(chosen), routing_weights


def rotary_angles(positions: np.ndarray, frequencies: Array, attention_factor: float = 1.0) -> tuple[Array, Array]:
    """Compute the cosines and sines [T, R/2] of the angles `position * frequency` of rotary embedding.

    Both are multiplied by `attention_factor`, which scales the rotated vectors, as YaRN and LongRoPE require.
    """
    xp = namespace(frequencies)
    angles = xp.astype(xp.asarray(positions), xp.float32)[:, None] * frequencies[None, :]
    return xp.cos(angles) * attention_factor, xp.sin(angles) * attention_factor


def rotate(heads: Array, cosines: Array, sines: Array) -> Array:
    """Apply rotary position embedding: rotate pair (i, i + R/2) of every head by its angle (Su et al. 2021).

    Parameters
    ----------
    heads : [T, H, K], queries or keys
    cosines, sines : [T, R/2], from `rotary_angles`. If R is less than K, the numbers from R on do not change.
    """
    xp = namespace(heads)
    half = cosines.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    return xp.concat([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def write_kv(
    keys: Array, values: Array, key_blocks: Array, value_blocks: Array, layer_in_block: int, slots: np.ndarray
) -> None:
    """Write each token's key and value to the KV cache.

    Parameters
    ----------
    keys, values : [T, G, K]
    key_blocks : [N, layers per block, G, K, B], the cache in float32 or float16, changed in place
    value_blocks : [N, layers per block, G, B, K]
    layer_in_block : index of the layer within the blocks of its KV-cache group
    slots : int [T], `block * B + offset within the block`

    Notes
    -----
    In float16, a key beyond 65,504 would be infinite, and the softmax could then silently ignore it. Such a key is
    stored as NaN (the compiled backends store its value as NaN), so that every query that reads it fails.
    """
    xp = namespace(keys)
    block_size = value_blocks.shape[3]
    keys = xp.where(overflows_cache(keys, key_blocks.dtype), xp.asarray(np.nan, dtype=keys.dtype), keys)
    for token, slot in enumerate(slots):
        block, offset = divmod(int(slot), block_size)
        key_blocks[block, layer_in_block, :, :, offset] = xp.astype(keys[token, ...], key_blocks.dtype)
        value_blocks[block, layer_in_block, :, offset, :] = xp.astype(values[token, ...], value_blocks.dtype)


def overflows_cache(keys: Array, dtype: np.dtype) -> Array:
    """Return whether each key [T, G, K] has a number that is infinite in the type of the cache: [T, G, 1]."""
    xp = namespace(keys)
    return xp.any(xp.abs(keys) >= (FLOAT16_LIMIT if str(dtype) == "float16" else np.inf), axis=2, keepdims=True)


def attention(
    queries: Array,
    key_blocks: Array,
    value_blocks: Array,
    layer_in_block: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Compute causal attention of every token over the keys of its own sequence, found through the block table.

    Parameters
    ----------
    queries : [T, H, K]
    key_blocks, value_blocks : the KV cache, as in `write_kv`; the keys and values of this step are already in it
    layer_in_block : index of the layer within the blocks of its KV-cache group
    positions : int [T]; consecutive within a sequence
    query_starts : int [S + 1]; sequence `s` owns tokens `query_starts[s]` to `query_starts[s + 1]`
    block_tables : int [S, maximum blocks per sequence]; row `s` lists the blocks that hold positions 0, B, 2B, ...
        Blocks before the window of the sequence's first query are not read.
    scale, window, soft_cap : see `attend`

    Returns
    -------
    [T, H, K]
    """
    xp = namespace(queries)
    attended = []
    for sequence, table in enumerate(block_tables):
        own = slice(int(query_starts[sequence]), int(query_starts[sequence + 1]))
        readable = readable_positions(positions[own], window)
        keys = contiguous(positions_first(key_blocks), layer_in_block, table, readable, queries.dtype)
        values = contiguous(value_blocks, layer_in_block, table, readable, queries.dtype)
        relative = xp.asarray(positions[own] - readable.start)
        attended.append(attend(queries[own, ...], keys, values, relative, scale, window, soft_cap))
    return xp.concat(attended, axis=0)


def attention_scores(
    queries: Array,
    key_blocks: Array,
    layer_in_block: int,
    positions: np.ndarray,
    query_starts: np.ndarray,
    block_tables: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Compute the scores to which `attention` applies softmax, for inspection: `attention` need not store them.

    The parameters are the same as for `attention`.

    Returns
    -------
    [T, H, M], where M is the length of the longest sequence so far: one score per position, and -infinity for positions
    that the query does not read or that its sequence does not have. `softmax` turns these scores into weights.
    """
    xp = namespace(queries)
    longest, scores = int(np.max(positions)) + 1, []
    for sequence, table in enumerate(block_tables):
        own = slice(int(query_starts[sequence]), int(query_starts[sequence + 1]))
        readable = readable_positions(positions[own], window)
        keys = contiguous(positions_first(key_blocks), layer_in_block, table, readable, queries.dtype)
        scored = score(queries[own, ...], keys, xp.asarray(positions[own] - readable.start), scale, window, soft_cap)
        scored = xp.permute_dims(scored, (1, 0, 2))
        before, beyond = (
            xp.full((*scored.shape[:2], num_masked), -math.inf, dtype=scored.dtype)
            for num_masked in (readable.start, longest - readable.stop)
        )
        scores.append(xp.concat([before, scored, beyond], axis=2))
    return xp.concat(scores, axis=0)


def positions_first(key_blocks: Array) -> Array:
    """Return a view of cached keys, whose positions are innermost, in the axis order of values."""
    return namespace(key_blocks).permute_dims(key_blocks, (0, 1, 2, 4, 3))


def readable_positions(positions: np.ndarray, window: int | None = None) -> slice:
    """Return the range of positions that queries at consecutive `positions` can read."""
    return slice(0 if window is None else max(0, int(positions[0]) - window + 1), int(positions[-1]) + 1)


def contiguous(blocks: Array, layer_in_block: int, table: np.ndarray, readable: slice, dtype: Any) -> Array:
    """Gather one sequence's keys or values in one layer, at the positions `readable`, into one contiguous array.

    [N, layers per block, G, B, K] -> [G, positions, K]
    """
    xp = namespace(blocks)
    heads, block_size, head_dim = blocks.shape[2:]
    first = readable.start // block_size
    last = math.ceil(readable.stop / block_size)
    taken = xp.take(blocks[:, layer_in_block, ...], xp.asarray(table[first:last]), axis=0)
    whole = xp.reshape(xp.permute_dims(taken, (1, 0, 2, 3)), (heads, -1, head_dim))
    start = first * block_size
    return xp.astype(whole[:, readable.start - start : readable.stop - start, :], dtype)  # widens a float16 cache


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Compute grouped-query attention within one sequence (Vaswani et al. 2017; Ainslie et al. 2023).

    Parameters
    ----------
    queries : [n, H, K], of the tokens at `positions`
    keys, values : [G, m, K], of positions 0 to m - 1
    positions : int [n]; position 0 can be any position of the sequence, if no query reads an earlier one
    scale : factor of the scores; None for 1 / sqrt(K)
    window : number of keys that a query reads, counting its own (Beltagy et al. 2020); None for all earlier ones
    soft_cap : limit of the scores, see `apply_soft_cap`; None for no limit

    Returns
    -------
    [n, H, K]: for every query, the sum of the values it can read, weighted by softmax(query . key * scale)
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
    """Compute the scores query . key / sqrt(K); -infinity where the query may not read the key.

    The parameters are the same as for `attend`: [n, H, K] and [G, m, K] -> [H, n, m].
    """
    xp = namespace(queries)
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    keys = xp.repeat(keys, num_heads // keys.shape[0], axis=0)  # several query heads share one key/value head
    scores = xp.permute_dims(queries, (1, 0, 2)) @ xp.permute_dims(keys, (0, 2, 1))
    scores = scores / math.sqrt(head_dim) if scale is None else scores * scale
    if soft_cap is not None:
        scores = apply_soft_cap(scores, soft_cap)
    mask = attention_mask(positions, keys.shape[1], window)
    return xp.where(mask, scores, xp.asarray(-math.inf, dtype=scores.dtype))


def attention_mask(positions: Array, num_keys: int, window: int | None = None) -> Array:
    """Return which of the keys at positions 0 to `num_keys` - 1 each query may read: bool [n, num_keys].

    A query reads its own position and all earlier ones or, with a window, the last `window` of these.
    """
    xp = namespace(positions)
    distances = positions[:, None] - xp.arange(num_keys)[None, :]
    return (distances >= 0) if window is None else (distances >= 0) & (distances < window)


def fuse(layers: Sequence[Any], config: Any) -> None:
    """Return None: this backend has no fused pass, so the layers run operation by operation."""


def set_num_threads(threads: int | None) -> None:
    """Accept only None: NumPy's BLAS chooses its own number of threads.

    Raises
    ------
    ValueError
        `threads` is a number.
    """
    if threads is not None:
        raise ValueError(
            f"threads is {threads}, but backend 'numpy' leaves threads to NumPy's BLAS: "
            "set OMP_NUM_THREADS before starting Python, or use backend 'numba'"
        )


def check_threads() -> None:
    """Do nothing: this check is about Numba's threads."""


def announcing_compilation(announce: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return an empty context: this backend compiles nothing."""
    return nullcontext()
