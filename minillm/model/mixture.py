"""Mixture of experts: each token passes through a few of a layer's MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # an array of the backend's library


def mixture(x: Array, chosen: np.ndarray, weights: Array, run_expert: Callable[[int, Array], Array], xp: Any) -> Array:
    """Return the weighted sum of each token's chosen experts: [T, D] -> [T, D].

    Every expert runs once, on the rows of all tokens routed to it. A token's sum then starts with its most likely
    expert, so its bits do not depend on the choices of other tokens.

    Parameters
    ----------
    x : [T, D]
    chosen : int [T, experts per token], most likely first
    weights : [T, experts per token]
    run_expert : returns an expert's output [n, D] for its number and n rows of `x`
    xp : the array library of `x`
    """
    outputs = []
    for expert in np.unique(chosen):
        tokens, _ = np.nonzero(chosen == expert)
        outputs.append(run_expert(int(expert), xp.take(x, xp.asarray(tokens), axis=0)))
    results = xp.concat(outputs)  # one row per choice, sorted by expert and then by token
    # The inner argsort sorts the choices as `results` is sorted; the outer one inverts it: the row of each choice.
    rows = np.argsort(np.argsort(chosen, axis=None, stable=True)).reshape(chosen.shape)
    total = xp.zeros_like(x)
    for rank in range(chosen.shape[1]):
        total = total + weights[:, rank, None] * xp.take(results, xp.asarray(rows[:, rank]), axis=0)
    return total
