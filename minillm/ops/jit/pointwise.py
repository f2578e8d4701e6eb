"""Operations on single rows or numbers: embedding, norms, rotary embedding, activations."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from minillm.ops.jit.compiling import compiled, compiled_parallel, inlined
from minillm.ops.jit.scales import minimum, scale, scale_group
from minillm.ops.jit.weight_formats import LANES, weight

EXP_LANES = 64  # numbers per `exp` loop; a loop of fixed length becomes SIMD without a remainder

# exp(x) = 2^n * exp(r) with r = x - n * log(2) between -0.35 and 0.35, where a polynomial of degree 6 is exact to the
# last bit or two of a float32 (Cephes' expf, Moshier 1992). log(2) is subtracted in two parts; the first has so few
# bits that its product with n is exact.
LOG2_E = np.float32(1.44269504)
LOG_2_HIGH, LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@inlined
def exp(x):
    """Compute e^x for x <= 0; 0 below -87, where e^x is 1e-38. Runs in SIMD, 2.5 times as fast as the C library."""
    x = max(x, np.float32(-87))
    n = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - n * LOG_2_HIGH
    r = r - n * LOG_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r
    p = p + np.float32(1)
    return np.float32(0) if x <= -87 else p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


# tanh(x) for |x| below 0.625: x plus x^3 times a polynomial in x^2 (Cephes' tanhf). Above, it is computed from exp.
TANH = tuple(
    map(np.float32, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1))
)


@inlined
def tanh(x):
    """Compute the hyperbolic tangent. Unlike the C library's, this becomes SIMD."""
    e = exp(np.float32(-2) * abs(x))
    far = (np.float32(1) - e) / (np.float32(1) + e)
    z = x * x
    p = TANH[0]
    p = p * z + TANH[1]
    p = p * z + TANH[2]
    p = p * z + TANH[3]
    p = p * z + TANH[4]
    return x + x * z * p if abs(x) < np.float32(0.625) else (far if x > 0 else -far)


@inlined
def soft_capped(x, cap):
    """Limit `x` smoothly to between -cap and cap."""
    return cap * tanh(x / cap)


@compiled
def apply_soft_cap(x, cap):
    """Soft-cap every number of [T, V]: cap * tanh(x / cap)."""
    numbers = np.empty_like(x)
    cap = np.float32(cap)
    for row in range(len(x)):
        for i in range(x.shape[1]):
            numbers[row, i] = soft_capped(x[row, i], cap)
    return numbers


@compiled
def embed(token_ids, matrix):
    """Return row `token_ids[t]` of the embedding matrix [V, D] for every token: [T, D]. A row is one lane of a tile."""
    rows = np.empty((len(token_ids), matrix.num_inputs), np.float32)
    for t in range(rows.shape[0]):
        tile, lane = divmod(token_ids[t], LANES)
        for i in range(rows.shape[1]):
            block, k = divmod(i, matrix.block_size)
            value = weight(matrix.codes, matrix.zero, tile, block, k // 8, k % 8, lane)
            group = scale_group(matrix.scales, matrix.shared, block)
            if len(matrix.scales):
                value *= scale(matrix.scales, matrix.shared, tile, block, group, lane)
            if len(matrix.minimums):
                value += minimum(matrix.minimums, matrix.shared, tile, block, group, lane)
            rows[t, i] = value
    return rows


@inlined
def sum_of_lanes(lanes):
    """Sum LANES numbers by repeatedly adding the upper half to the lower, always in this order."""
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inlined
def largest_of_lanes(lanes):
    """Return the largest of LANES numbers."""
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] = lanes[lane] if lanes[lane] > lanes[lane + width] else lanes[lane + width]
        width //= 2
    return lanes[0]


@compiled
def rms_norm(x, weight, eps):
    """Scale every row of [T, D] to a root mean square of one, then multiply by `weight`."""
    normed = np.empty_like(x)
    rows, hidden = x.shape
    lanes = np.empty(LANES, np.float32)
    whole = hidden - hidden % LANES
    for row in range(rows):
        lanes[:] = 0
        for first in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] += x[row, first + lane] * x[row, first + lane]
        for i in range(whole, hidden):
            lanes[i - whole] += x[row, i] * x[row, i]
        squares = sum_of_lanes(lanes)
        scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(hidden) + np.float32(eps)))
        for i in range(hidden):
            normed[row, i] = x[row, i] * scale * weight[i]
    return normed


@compiled
def layer_norm(x, weight, bias, eps):
    """Normalize every row of [T, D] to mean zero and variance one, then multiply by `weight` and add `bias`."""
    normed = np.empty_like(x)
    rows, hidden = x.shape
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        mean = _sum_of_row(x, row, np.float32(0), lanes, False) / np.float32(hidden)
        variance = _sum_of_row(x, row, mean, lanes, True) / np.float32(hidden)
        scale = np.float32(1) / np.float32(math.sqrt(variance + np.float32(eps)))
        for i in range(hidden):
            normed[row, i] = (x[row, i] - mean) * scale * weight[i] + bias[i]
    return normed


@compiled
def _sum_of_row(x, row, mean, lanes, squared):
    """Sum a row's differences from `mean`, or their squares, in an order that depends only on the row's length."""
    hidden = x.shape[1]
    lanes[:] = 0
    for first in range(0, hidden, LANES):
        for lane in range(min(LANES, hidden - first)):
            difference = x[row, first + lane] - mean
            lanes[lane] += difference * difference if squared else difference
    return sum_of_lanes(lanes)


@compiled
def rotary_angles(positions, frequencies, attention_factor=1.0):
    """Compute cosines and sines [T, R/2] of the angles `position * frequency`, times `attention_factor`."""
    cosines = np.empty((len(positions), len(frequencies)), np.float32)
    sines = np.empty_like(cosines)
    for t in range(len(positions)):
        for i in range(len(frequencies)):
            angle = np.float32(positions[t]) * frequencies[i]
            cosines[t, i] = np.float32(math.cos(angle)) * np.float32(attention_factor)
            sines[t, i] = np.float32(math.sin(angle)) * np.float32(attention_factor)
    return cosines, sines


@compiled
def rotate(heads, cosines, sines):
    """Apply rotary embedding: rotate pair (i, i + R/2) of every head [T, H, K] by its angle; see `reference`."""
    rotated = np.empty_like(heads)
    tokens, num_heads, head_dim = heads.shape
    half = cosines.shape[1]
    for t in range(tokens):
        for h in range(num_heads):
            for i in range(half):
                first, second = heads[t, h, i], heads[t, h, i + half]
                rotated[t, h, i] = first * cosines[t, i] - second * sines[t, i]
                rotated[t, h, i + half] = second * cosines[t, i] + first * sines[t, i]
            for i in range(2 * half, head_dim):
                rotated[t, h, i] = heads[t, h, i]
    return rotated


# These have the type that kernels get at run time. For a literal 0 or 1 in a call, Numba compiles a second version.
ZERO = np.int64(0)
SILU, GELU = np.int64(0), np.int64(1)  # the activation of a gated layer


@compiled
def swiglu(gate, up):
    """Compute the gated activation `silu(gate) * up`: two [T, F] -> [T, F]."""
    gated = np.empty_like(gate)
    _gate(gate, up, ZERO, gated, SILU)
    return gated


@compiled
def geglu(gate, up):
    """Compute the gated activation `gelu(gate) * up`: two [T, F] -> [T, F]."""
    gated = np.empty_like(gate)
    _gate(gate, up, ZERO, gated, GELU)
    return gated


@compiled
def gelu(x):
    """Compute the activation of a feed-forward layer without a gate: [T, F] -> [T, F]."""
    return geglu(x, np.ones_like(x))


@compiled
def gated_joined(product, up_start, features, activation):
    """Compute the gated activation from one matrix: F columns of gates, and F columns of `up` from `up_start` on."""
    gated = np.empty((len(product), features), np.float32)
    _gate(product, product, up_start, gated, activation)
    return gated


@compiled
def _gate(gate, up, up_start, gated, activation):
    if len(gate) == 1:  # too little work to wake a thread for
        _gate_row(gate, up, up_start, gated, ZERO, activation)
    else:
        _gate_rows(gate, up, up_start, gated, activation)


@compiled_parallel
def _gate_rows(gate, up, up_start, gated, activation):
    for row in prange(len(gate)):
        _gate_row(gate, up, up_start, gated, np.int64(row), activation)  # the loop index is unsigned


@compiled
def _gate_row(gate, up, up_start, gated, row, activation):
    if activation == SILU:
        _swiglu_row(gate, up, up_start, gated, row)
    else:
        _geglu_row(gate, up, up_start, gated, row)


@compiled
def _swiglu_row(gate, up, up_start, gated, row):
    features = gated.shape[1]
    whole = features - features % EXP_LANES
    for first in range(0, whole, EXP_LANES):
        for lane in range(EXP_LANES):
            i = first + lane
            gated[row, i] = _silu(gate[row, i]) * up[row, up_start + i]
    for i in range(whole, features):
        gated[row, i] = _silu(gate[row, i]) * up[row, up_start + i]


@compiled
def _geglu_row(gate, up, up_start, gated, row):
    features = gated.shape[1]
    whole = features - features % EXP_LANES
    for first in range(0, whole, EXP_LANES):
        for lane in range(EXP_LANES):
            i = first + lane
            gated[row, i] = _gelu(gate[row, i]) * up[row, up_start + i]
    for i in range(whole, features):
        gated[row, i] = _gelu(gate[row, i]) * up[row, up_start + i]


@inlined
def _silu(x):
    return _times_sigmoid(x, x)


@inlined
def _gelu(x):
    """Compute 0.5 * x * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 * x^3), which equals x * sigmoid(2u)."""
    return _times_sigmoid(x, np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x))


@inlined
def _times_sigmoid(x, y):
    e = exp(-abs(y))  # at most 1; exp of a large positive number would overflow
    return x * (np.float32(1) if y >= 0 else e) / (np.float32(1) + e)
