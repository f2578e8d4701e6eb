"""Probe: the intermediate results of a forward pass by name, and the first difference between two passes.

`Transformer.forward(..., probe=show)` calls `show(name, array)` for each of these, in this order:

    embedding                    [T, D]     embeddings of the tokens
    layers.N.attention_norm      [T, D]     input of attention
    layers.N.attention.q         [T, H, K]  queries, rotated by their positions in Llama
    layers.N.attention.k         [T, G, K]  keys, rotated by their positions in Llama
    layers.N.attention.v         [T, G, K]  values
    layers.N.attention.scores    [T, H, M]  query . key / sqrt(K), in Llama; -infinity at positions that are not read
    layers.N.attention.weights   [T, H, M]  softmax of the scores
    layers.N.attention.gathered  [T, H, K]  sum of the values, each times its weight
    layers.N.attention.output    [T, D]     result of attention
    layers.N.mlp_norm            [T, D]     input of the feed-forward layer
    layers.N.mlp.gated           [T, F]     silu(gate) * up, in Llama
    layers.N.mlp.output          [T, D]     result of the feed-forward layer
    layers.N                     [T, D]     the stream after the layer
    final_norm                   [S, D]     the normalized stream of each chunk's last token
    logits                       [S, V]     scores for the next token of each

In a mixture of experts, `layers.N.mlp.chosen` [T, experts per token] takes the place of the two `mlp` results. Then
follow `layers.N.mlp.experts.X.gated` and `.output` of each chosen expert X, for the tokens routed to it.

The model adds the results of attention and of the feed-forward layer to the stream; Gemma first normalizes them. With
`every_token`, `final_norm` and `logits` have T rows. `transformer.py` defines the letters.

Each array is a NumPy copy, so keeping or changing it does not affect the computation. The compiled backend's attention
never stores scores and weights. They are computed again from the same queries and keys, and agree with the ones used up
to rounding. `seen = {}` and `forward(..., probe=seen.__setitem__)` keep everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Probe = Callable[[str, Any], None]


def no_probe(name: str, value: Any) -> None:
    """Ignore an intermediate result. This is the default probe."""


def with_copies(probe: Probe, to_numpy: Callable[[Any], np.ndarray]) -> Probe:
    """Return a probe that passes NumPy copies on to `probe`. `to_numpy` converts a backend's array."""
    return lambda name, value: probe(name, np.array(to_numpy(value)))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference between two arrays, as a share of the largest number in `theirs`.

    Equal numbers do not differ, finite or not, and neither do two NaNs. The share is infinite where only one of the two
    is infinite or NaN, and where `theirs` are all zero.

    Raises
    ------
    ValueError
        Their shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"arrays of shapes {list(ours.shape)} and {list(theirs.shape)} cannot be compared")
    differ = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    if not differ.any():
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = np.abs(ours[differ].astype(np.float64) - theirs[differ]).max()
        share = largest / np.abs(theirs[np.isfinite(theirs)]).max(initial=0)
    return float(share) if np.isfinite(share) else np.inf


def first_difference(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: float = 0.0
) -> str | None:
    """Return the first name whose arrays differ by more than `tolerance` between two passes; None if there is none.

    Parameters
    ----------
    ours, theirs : the intermediate results of each pass by name, in the order of computation.
    tolerance : maximum difference, as a share of the largest number; see `difference`. 0 finds a single bit.

    Raises
    ------
    ValueError
        The names or the shapes differ: the passes were not over the same tokens.
    """
    if list(ours) != list(theirs):
        odd = next(iter(ours.keys() ^ theirs.keys()), "their order")
        raise ValueError(f"two passes with different intermediate results cannot be compared: see {odd!r}")
    return next((name for name in ours if not difference(ours[name], theirs[name]) <= tolerance), None)


def previous_token(weights: np.ndarray) -> np.ndarray:
    """Return each head's mean attention weight on the previous token, over all tokens but the first.

    Parameters
    ----------
    weights : float32 [T, H, T], `layers.N.attention.weights` of a pass over one whole sequence

    Returns
    -------
    [H], from 0 to 1; 0 for a single token
    """
    before = weights.diagonal(offset=-1, axis1=0, axis2=2)  # [H, T - 1]
    return before.sum(axis=1) / max(1, before.shape[1])


def induction(weights: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return how much each head attends to the token that followed last time (Olsson et al. 2022, arXiv:2209.11895).

    For a token that has occurred before, an induction head attends to the token after the earlier occurrence: in
    "Zorbin met Kelda. Zorbin", the second "Zorbin" attends to " met". The result is the mean over all tokens that have
    occurred before. All earlier occurrences count, except one whose next token is the current token itself.

    Parameters
    ----------
    weights : float32 [T, H, T], as for `previous_token`
    token_ids : int [T]

    Returns
    -------
    [H], from 0 to 1; 0 if no token has occurred before
    """
    ids = np.asarray(token_ids)
    positions = np.arange(len(ids))
    earlier = (ids[:, None] == ids[None, :]) & (positions[None, :] + 1 < positions[:, None])  # [T, earlier position]
    followed = np.roll(earlier, 1, axis=1)
    attention = (weights * followed[:, None, :]).sum(axis=2)  # [T, H]
    return attention[earlier.any(axis=1)].sum(axis=0) / max(1, np.count_nonzero(earlier.any(axis=1)))
