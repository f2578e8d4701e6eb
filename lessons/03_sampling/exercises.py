"""Lesson 3's exercises. `pytest lessons/03_sampling` tells you whether they are right."""

import numpy as np

ANSWERS = {
    "log_softmax": "minillm.engine.sampling.log_softmax",
    "keep_top_p": "minillm.engine.sampling.keep_top_p",
    "draw": "minillm.engine.sampling.draw",
}


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """The natural logarithm of softmax(scores), for scores [V] of any size.

    `np.log(softmax(scores))` is not good enough: a probability of e^-2000 is zero to a computer, but its logarithm is
    an ordinary number, -2000. A score of -infinity (a token that was cut) has the log-probability -infinity.
    """
    raise NotImplementedError("your turn")


def keep_top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Keep the fewest likeliest tokens whose probabilities reach `p`; set the scores of the others to -infinity.

    Scores that are kept stay as they are, in their places; `scores` itself is not changed. The token with which the sum
    reaches `p` is kept, so at least one always is. A `p` of 1 keeps all.
    """
    raise NotImplementedError("your turn")


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The token at which the running sum of probabilities passes `uniform`, a number from 0 up to but not 1.

    A token of probability 0 is never drawn. Ten times 0.1 is not quite 1 to a computer, so take care that the last
    stretch of the line belongs to a token as well.
    """
    raise NotImplementedError("your turn")
