"""Probe: what a forward pass holds on its way, by name; and how to ask where two passes part.

`Transformer.forward(..., probe=show)` calls `show(name, array)` for each of these, in this order:

    embedding                    [T, D]     the tokens' rows of the embedding matrix
    layers.N.attention_norm      [T, D]     what attention reads
    layers.N.attention.q         [T, H, K]  queries, turned by their positions
    layers.N.attention.k         [T, G, K]  keys, turned by theirs
    layers.N.attention.v         [T, G, K]  values
    layers.N.attention.scores    [T, H, M]  query . key / sqrt(K), -infinity where a query does not look
    layers.N.attention.weights   [T, H, M]  their softmax: a query's share of each position
    layers.N.attention.gathered  [T, H, K]  the mean of the values, so weighted
    layers.N.attention.output    [T, D]     what attention adds
    layers.N.mlp_norm            [T, D]     what the feed-forward layer reads
    layers.N.mlp.gated           [T, F]     silu(gate) * up
    layers.N.mlp.output          [T, D]     what it adds
    layers.N                     [T, D]     the stream after the layer
    final_norm                   [S, D]     of each chunk's last token, or with `every_token` of all
    logits                       [S, V]     the same

M is the length of the longest sequence in the batch so far. What is shown is a copy, a NumPy array that may be kept or
written to: nothing that a reader does with it reaches the computation. On the compiled backend, whose attention never
holds scores and weights, they are worked out beside it from the same queries and keys; they are within rounding of
what it weighed by. `seen = {}; forward(..., probe=seen.__setitem__)` keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Probe = Callable[[str, Any], None]


def no_probe(name: str, value: Any) -> None:
    """What is shown every intermediate when nobody wants to look."""


def with_copies(probe: Probe, to_numpy: Callable[[Any], np.ndarray]) -> Probe:
    """`probe`, but what it sees are NumPy arrays of its own. `to_numpy` turns a backend's array into one."""
    return lambda name, value: probe(name, np.array(to_numpy(value)))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """How far apart two arrays are: the largest difference, as a share of the largest number in `theirs`.

    Equal numbers do not differ, whether they are finite or not, and neither do two NaNs. Where one is infinite or NaN
    and the other something else, or `theirs` are all zero, the share is infinite.

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
    """Where two passes part: the first name whose arrays differ by more than `tolerance`; None if none does.

    Parameters
    ----------
    ours, theirs : what each pass showed, by name, in the order in which it was computed.
    tolerance : as a share of the largest number; see `difference`. With 0, a single bit is found.

    Raises
    ------
    ValueError
        The names are not the same, or the shapes under one differ: these were not passes over the same tokens.
    """
    if list(ours) != list(theirs):
        odd = next(iter(ours.keys() ^ theirs.keys()), "their order")
        raise ValueError(f"two passes that showed different things cannot be compared: see {odd!r}")
    return next((name for name in ours if not difference(ours[name], theirs[name]) <= tolerance), None)


def previous_token(weights: np.ndarray) -> np.ndarray:
    """How much each head looks at the token before: the mean of that weight, over all tokens but the first.

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
    """How much each head looks at what came next last time (Olsson et al. 2022, arXiv:2209.11895).

    Where a token has stood before, an induction head looks at the token behind the earlier place: "Zorbin met Kelda.
    Zorbin" looks at " met". The mean is over all tokens that have stood before, and counts all their earlier places,
    but not one whose next is the token itself.

    Parameters
    ----------
    weights : float32 [T, H, T], as for `previous_token`
    token_ids : int [T]

    Returns
    -------
    [H], from 0 to 1; 0 where no token has stood before
    """
    ids = np.asarray(token_ids)
    places = np.arange(len(ids))
    earlier = (ids[:, None] == ids[None, :]) & (places[None, :] + 1 < places[:, None])  # [token, place]
    behind = np.roll(earlier, 1, axis=1)
    looked = (weights * behind[:, None, :]).sum(axis=2)  # [T, H]
    return looked[earlier.any(axis=1)].sum(axis=0) / max(1, np.count_nonzero(earlier.any(axis=1)))
