"""Lesson 10's exercises. `pytest lessons/10_debugging` tells you whether they are right."""

from collections.abc import Mapping, Sequence

import numpy as np

ANSWERS = {
    "score": "minillm.ops.reference.score",
    "first_difference": "minillm.model.probe.first_difference",
    "induction": "minillm.model.probe.induction",
}


def score(queries: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """How well each key answers each query, query . key / sqrt(K), and -infinity where a query may not look: [H, n, m].

    queries: [n, H, K], of the tokens at `positions` [n] (which need not start at 0, nor be all of the sequence).
    keys: [G, m, K], of positions 0 to m - 1. A query sees its own position and those before it.
    Query heads 0 .. H/G - 1 use key head 0, the next H/G use head 1, and so on.
    """
    raise NotImplementedError("your turn")


def first_difference(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: float = 0.0
) -> str | None:
    """Where two passes part: the first name, in the order of `ours`, whose arrays differ too much; None if none does.

    Two arrays differ too much if the largest difference of two numbers is more than `tolerance` times the largest
    finite number, by magnitude, in the array of `theirs`. Equal infinities do not differ (scores are full of them), and
    neither do two NaNs; but an infinity or NaN in one array only is always too much. Passes that did not show the same
    names in the same order, or arrays of different shapes under one name, are a ValueError.
    """
    raise NotImplementedError("your turn")


def induction(weights: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """How much each head looks at what came next last time: [H], from 0 to 1.

    weights: [T, H, T]; `weights[t, h, p]` is how much token t looks at position p, in head h. token_ids: [T].
    Where a token has stood before, at p, it is the weight of position p + 1. If it has stood there several times, add
    those weights up. A place whose next is the token itself (in "a a") does not count. The result is the mean over all
    tokens with such a place before them; with no such token it is 0.
    """
    raise NotImplementedError("your turn")
