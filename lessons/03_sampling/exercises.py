"""The exercises of lesson 3. Run `pytest lessons/03_sampling` to test your solutions."""

import numpy as np

ANSWERS = {
    "log_softmax": "minillm.engine.sampling.log_softmax",
    "keep_top_p": "minillm.engine.sampling.keep_top_p",
    "draw": "minillm.engine.sampling.draw",
}


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of softmax(scores), for scores [V] of any size.

    `np.log(softmax(scores))` is not accurate enough: a probability of e^-2000 underflows to zero, but its logarithm is
    an ordinary number, -2000. A score of -infinity (a token that was cut) has the log-probability -infinity.
    """
    raise NotImplementedError("your turn")


def keep_top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Keep the fewest most likely tokens whose probabilities reach `p`; set the scores of the others to -infinity.

    Return a new array in which the kept scores are unchanged. Do not modify `scores`. The token with which the sum
    reaches `p` is kept, so at least one token always is. A `p` of 1 keeps all.
    """
    raise NotImplementedError("your turn")


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """Return the token at which the running sum of probabilities passes `uniform`, a number in [0, 1).

    A token of probability 0 is never drawn. In floating point, ten times 0.1 is not quite 1, so make sure that a point
    close to 1 also belongs to a token.
    """
    raise NotImplementedError("your turn")
