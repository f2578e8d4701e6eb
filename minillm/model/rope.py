"""Rotary frequencies: the angle by which each pair of a head's numbers is rotated per position, and how it is scaled.

Rotary embedding rotates pair i of a query or key by `position * frequency[i]` (Su et al. 2021, arXiv:2104.09864). High
frequencies distinguish neighbouring positions; low frequencies distinguish distant ones. A model that was trained on
short texts has never seen the low-frequency pairs rotate far. The scalings below lower their frequencies, so that long
texts look like short ones.

Everything is computed in float32, as in the training code of these models.
"""

from __future__ import annotations

import math

import numpy as np

from minillm.model.config import RopeScaling


def rope_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Return the frequencies, float32 [R/2], in radians per position: from 1 down to nearly 1 / theta.

    Parameters
    ----------
    rotary_dim : R, the part of a head that is rotated
    theta : the base; the slowest pair makes one turn in about 2 pi theta positions
    scaling : how the frequencies are scaled; see `RopeScaling`
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if scaling is None:
        return frequencies
    return SCALINGS[scaling.kind](frequencies, theta, scaling)


def _linear(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / np.float32(scaling.factor)


def _llama3(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Keep pairs that make many turns over the original context, divide pairs that make few, blend in between."""
    turns = scaling.original_context_length * frequencies / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1).astype(np.float32)
    return _blended(frequencies, kept, scaling.factor)


def _yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Like llama3, but interpolate linearly in the index of the pair.

    The interpolation runs from the pair that makes `beta_fast` turns over the original context to the pair that makes
    `beta_slow` turns.
    """
    rotary_dim = 2 * len(frequencies)

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_context_length / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    last += 0.001 if first == last else 0  # a step, written as a very steep ramp
    slowed = np.clip((np.arange(len(frequencies), dtype=np.float32) - first) / (last - first), 0, 1)
    return _blended(frequencies, 1 - slowed.astype(np.float32), scaling.factor)


def _per_frequency(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / np.asarray(scaling.factors, np.float32)


def _blended(frequencies: np.ndarray, kept: np.ndarray, factor: float) -> np.ndarray:
    return kept * frequencies + (1 - kept) * frequencies / np.float32(factor)


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "per_frequency": _per_frequency}


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Return the factor by which YaRN multiplies rotated queries and keys (Peng et al. 2023, section 3.4).

    Longer texts have more keys to choose from, so their scores must differ more. Some models call `weight` `mscale`.
    """
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_context_length: int) -> float:
    """Return LongRoPE's factor for a context `factor` times the original (Ding et al. 2024, section 3.3)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length)) if factor > 1 else 1.0
