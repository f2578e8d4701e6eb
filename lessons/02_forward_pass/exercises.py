"""Lesson 2's exercises. `pytest lessons/02_forward_pass` tells you whether they are right."""

import numpy as np

ANSWERS = {
    "rms_norm": "minillm.ops.reference.rms_norm",
    "rotate": "minillm.ops.reference.rotate",
    "attend": "minillm.ops.reference.attend",
}


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale every row of x [T, D] to a root mean square of one, then component d by weight[d].

    `eps` is added to the mean of the squares, so that a row of zeros stays zeros.
    """
    raise NotImplementedError("your turn")


def rotate(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    """Rotary position embedding: turn pair (i, i + K/2) of every head of heads [T, H, K] by its token's angle.

    cosines, sines: [T, K/2]. Turning the point (a, b) by an angle gives (a cos - b sin, b cos + a sin).
    """
    raise NotImplementedError("your turn")


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """For every query the mean of the values it may see, weighted by softmax(query . key / sqrt(K)): [n, H, K].

    queries: [n, H, K], of the tokens at `positions` [n] (which need not start at 0, nor be all of the sequence).
    keys, values: [G, m, K], of positions 0 to m - 1. A query sees its own position and those before it.
    Query heads 0 .. H/G - 1 use key/value head 0, the next H/G use head 1, and so on.
    """
    raise NotImplementedError("your turn")
