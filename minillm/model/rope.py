"""Rotary frequencies: how fast each pair of a head's numbers turns, and the ways of stretching that.

Rotary embedding turns pair i of a query or key by `position * frequency[i]` (Su et al. 2021, arXiv:2104.09864). Fast
pairs tell neighbours apart, slow ones say where in the text a token is. A model that was trained on short texts has
never seen the slow pairs turn far; the scalings below slow them down, so that long texts look like short ones.

Everything is worked out in float32, as the training code of these models did.
"""

from __future__ import annotations

import math

import numpy as np

from minillm.model.config import RopeScaling


def rope_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position turns each of the R/2 pairs by, float32 [R/2]: from 1 down to nearly 1 / theta.

    Parameters
    ----------
    rotary_dim : R, how many of a head's numbers are turned
    theta : the base; the slowest pair turns once in about 2 pi theta positions
    scaling : how the frequencies are stretched, see `RopeScaling`
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if scaling is None:
        return frequencies
    return SCALINGS[scaling.kind](frequencies, theta, scaling)


def _linear(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / np.float32(scaling.factor)


def _llama3(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """How many turns does a pair make over the original context? Those with many stay, those with few are slowed by
    the full factor, and between the two bounds the two are mixed."""
    turns = scaling.original_context_length * frequencies / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1).astype(np.float32)
    return _mixed(frequencies, kept, scaling.factor)


def _yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """As llama3, but the mixing runs along the pairs' indices: from the pair that makes `beta_fast` turns over the
    original context to the one that makes `beta_slow`."""
    rotary_dim = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_context_length / times
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    last += 0.001 if first == last else 0  # a step is a very steep ramp
    slowed = np.clip((np.arange(len(frequencies), dtype=np.float32) - first) / (last - first), 0, 1)
    return _mixed(frequencies, 1 - slowed.astype(np.float32), scaling.factor)


def _per_frequency(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / np.asarray(scaling.factors, np.float32)


def _mixed(frequencies: np.ndarray, kept: np.ndarray, factor: float) -> np.ndarray:
    return kept * frequencies + (1 - kept) * frequencies / np.float32(factor)


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "per_frequency": _per_frequency}


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies turned queries and keys by: longer texts have more keys to choose from, so scores must
    differ more (Peng et al. 2023, section 3.4). `weight` is what some models call `mscale`."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_context_length: int) -> float:
    """The same of LongRoPE (Ding et al. 2024, section 3.3), of a context `factor` times as long as the original."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length)) if factor > 1 else 1.0
