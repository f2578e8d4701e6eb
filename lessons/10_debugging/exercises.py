"""The exercises of lesson 10. Run `pytest lessons/10_debugging` to test your solutions."""

from collections.abc import Mapping, Sequence

import numpy as np

ANSWERS = {
    "score": "minillm.ops.reference.score",
    "first_difference": "minillm.model.probe.first_difference",
    "induction": "minillm.model.probe.induction",
}


def score(queries: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the score of each key for each query: query . key / sqrt(K), or -infinity if the mask hides the key.

    A query at position p attends to the keys at positions 0 to p. Query heads 0 .. H/G - 1 use key head 0, the next
    H/G query heads use key head 1, and so on.

    Parameters
    ----------
    queries : [n, H, K]
    keys : [G, m, K], of positions 0 to m - 1
    positions : int [n], the positions of the queries. They need not start at 0, nor be consecutive.

    Returns
    -------
    [H, n, m]
    """
    raise NotImplementedError("your turn")


def first_difference(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: float = 0.0
) -> str | None:
    """Return the first name, in the order of `ours`, whose arrays differ by more than `tolerance`; None if none does.

    The difference between two arrays is the largest absolute difference of their numbers, divided by the largest finite
    absolute value in `theirs`. Equal infinities do not differ (scores contain many), and neither do two NaNs. An
    infinity or NaN in only one of the two arrays exceeds any tolerance.

    Raises
    ------
    ValueError
        The two passes have different names, the same names in a different order, or arrays of different shapes under
        the same name.
    """
    raise NotImplementedError("your turn")


def induction(weights: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return how much each head attends to the token that followed an earlier occurrence of the current token.

    If the current token also occurred at an earlier position p, take its weight on position p + 1. If there are
    several such positions, add the weights. Ignore an earlier position p whose next position p + 1 is the current token
    itself, as in "a a". The result is the mean over all tokens that have such an earlier position.

    Parameters
    ----------
    weights : [T, H, T]; `weights[t, h, p]` is the weight of token t on position p in head h.
    token_ids : int [T]

    Returns
    -------
    [H], from 0 to 1; 0 if no token has such an earlier position.
    """
    raise NotImplementedError("your turn")
