"""The exercises of lesson 2. Run `pytest lessons/02_forward_pass` to test your solutions."""

import numpy as np

ANSWERS = {
    "rms_norm": "minillm.ops.reference.rms_norm",
    "rotate": "minillm.ops.reference.rotate",
    "attend": "minillm.ops.reference.attend",
}


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale each row of x [T, D] to a root mean square of one, then multiply component d by weight[d].

    `eps` is added to the mean of the squares, so that a row of zeros remains zero.
    """
    raise NotImplementedError("your turn")


def rotate(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    """Apply rotary position embedding: rotate pair (i, i + K/2) of every head of heads [T, H, K] by its token's angle.

    cosines, sines: [T, K/2]. Rotating the point (a, b) by an angle gives (a cos - b sin, b cos + a sin).
    """
    raise NotImplementedError("your turn")


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the mean of the values that each query can read, weighted by softmax(query . key / sqrt(K)): [n, H, K].

    queries: [n, H, K], of the tokens at `positions` [n], which can be any positions of the sequence in any order.
    keys, values: [G, m, K], of positions 0 to m - 1. A query reads its own position and all earlier ones.
    Query heads 0 to H/G - 1 use key/value head 0, the next H/G use head 1, and so on.
    """
    raise NotImplementedError("your turn")
