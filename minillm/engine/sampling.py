"""Sampling: choose one token from the model's scores, as the request's parameters specify.

The model gives every token of the vocabulary a score (a *logit*). Sampling turns the scores into probabilities, removes
the tokens that are too unlikely, and draws one of the rest. Each stage is a separate function, applied in this order:

    penalize repeats -> temperature -> top-k -> top-p -> min-p -> draw
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minillm.checks import check_flag, check_integer, check_number
from minillm.errors import NumericError, RequestError
from minillm.trace.events import SampledToken

# Distances below the best score within which top-p looks for the tokens to keep, before it sorts the whole vocabulary.
DISTANCES = (4, 6, 8, 10, 12, 16)
ROUNDING = 1e-9  # larger than the rounding error of a sum of a million probabilities


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when to stop. The values are checked on construction.

    Attributes
    ----------
    max_tokens : maximum number of new tokens.
    temperature : scores are divided by it. Below 1 sharpens the distribution, above 1 flattens it; 0 always takes the
        best token (greedy).
    top_k : choose among the k best tokens; 0 for all.
    top_p : choose among the fewest tokens whose probabilities reach this sum (Holtzman et al. 2019); 1 for all.
    min_p : drop tokens less likely than this share of the most likely one's probability (Nguyen et al. 2024).
    repetition_penalty : above 1 makes tokens of the prompt and the answer less likely (Keskar et al. 2019).
    seed : the same seed gives the same tokens, whatever else is running; None draws a new seed for the request.
    stop : strings that end the answer and are not included in it.
    stop_token_ids : token ids that end the answer, in addition to the model's own end tokens.
    ignore_eos : continue past the model's end tokens, up to `max_tokens`.
    logprobs : also return the natural log of each chosen token's probability under the model itself.
    skip_special_tokens : leave special tokens out of the text.
    n : completions of the prompt, each with its own stream of random numbers.

    Raises
    ------
    RequestError
        A value is out of its range, not finite, or not of its type.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    skip_special_tokens: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        checked = {
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "temperature": check_number("temperature", self.temperature, "0 (greedy) or more", 0, math.inf),
            "top_k": check_integer("top_k", self.top_k, 0),
            "top_p": check_number("top_p", self.top_p, "over 0, at most 1", 0, 1, excluded=0),
            "min_p": check_number("min_p", self.min_p, "from 0 to 1", 0, 1),
            "repetition_penalty": check_number(
                "repetition_penalty", self.repetition_penalty, "over 0", 0, math.inf, excluded=0
            ),
            "seed": None if self.seed is None else check_integer("seed", self.seed, 0, 2**64 - 1),
            "stop": tuple(_check_stop(text) for text in _items("stop", stop)),
            "stop_token_ids": tuple(
                check_integer("stop_token_ids", token_id, 0)
                for token_id in _items("stop_token_ids", self.stop_token_ids)
            ),
            "n": check_integer("n", self.n, 1),
            **{
                name: check_flag(name, getattr(self, name))
                for name in ("ignore_eos", "logprobs", "skip_special_tokens")
            },
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # a frozen dataclass sets its own fields this way

    @property
    def changed(self) -> dict[str, Any]:
        """The values that differ from their defaults, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"


def _items(name: str, values: Iterable) -> Iterable:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; it must be a list")
    return values


def _check_stop(text: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"stop contains {text!r}; it must contain strings of at least one character")
    return text


def sample(
    logits: np.ndarray, params: SamplingParams, seed: int, index: int, context: SequenceOf[int] = ()
) -> SampledToken:
    """Choose one token.

    Parameters
    ----------
    logits : float32 [V]
    params : SamplingParams
    seed, index : the request's seed, and the number of tokens it has drawn before. The draw depends on these two alone,
        so batching, preemption or a rerun cannot change it.
    context : token ids of the prompt and of the answer so far. They are read only if there is a repetition penalty.

    Returns
    -------
    The token. Its log-probability, if requested, is the model's own: before penalty, temperature and cuts.

    Raises
    ------
    NumericError
        The highest score is NaN or infinite, so a choice would be meaningless.
    """
    best = int(np.argmax(logits))  # argmax treats NaN as the largest number
    if not math.isfinite(logits[best]):
        raise NumericError(
            "the model's scores contain NaN or infinity: check for damaged weights, or for keys and values beyond the "
            "range of float16"
        )
    if params.temperature == 0 and params.repetition_penalty == 1:
        token_id = best
    else:
        scores = penalize_repeats(np.asarray(logits, np.float64), params.repetition_penalty, context)
        if params.temperature == 0:
            token_id = int(scores.argmax())
        else:
            token_ids, scores = candidates(scores, params)
            token_id = int(token_ids[draw(softmax(scores), uniform(seed, index))])
    if not params.logprobs:
        return SampledToken(token_id)
    return SampledToken(token_id, float(log_softmax(np.asarray(logits, np.float64))[token_id]))


def candidates(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that can be drawn, in order of their ids, and their scores: after temperature and cuts.

    Each cut passes on only the tokens that it keeps, so that the next one handles few numbers instead of V.

    Parameters
    ----------
    scores : float64 [V]
    params : SamplingParams with a temperature above 0

    Returns
    -------
    token_ids : int [n]
    scores : float64 [n]
    """
    token_ids, scores = np.arange(len(scores)), apply_temperature(scores, params.temperature)
    cuts = (
        lambda scores: keep_top_k(scores, params.top_k),
        lambda scores: keep_top_p(scores, params.top_p),
        lambda scores: keep_min_p(scores, params.min_p),
    )
    for keep in cuts:
        cut = keep(scores)
        if cut is not scores:  # a cut that keeps all tokens returns its argument itself
            kept = np.flatnonzero(cut > -np.inf)
            token_ids, scores = token_ids[kept], scores[kept]
    return token_ids, scores


def distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the probabilities [V] that `sample` draws from: zero for all but the candidates."""
    token_ids, kept = candidates(scores, params)
    probabilities = np.zeros(len(scores))
    probabilities[token_ids] = softmax(kept)
    return probabilities


def penalize_repeats(scores: np.ndarray, penalty: float, context: SequenceOf[int]) -> np.ndarray:
    """Lower the score of every token in `context`: divide it by `penalty` if positive, else multiply it.

    Source: CTRL (Keskar et al. 2019), section 4.1.
    """
    if penalty == 1 or len(context) == 0:
        return scores
    seen = np.unique(np.asarray(context, np.int64))
    scores = scores.copy()
    with np.errstate(over="ignore"):
        penalized = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    largest = np.finfo(scores.dtype).max
    scores[seen] = np.clip(penalized, -largest, largest)  # an extreme penalty must not produce infinity
    return scores


def apply_temperature(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Divide by `temperature`. The maximum is subtracted first, so that no temperature, however small, overflows."""
    with np.errstate(over="ignore"):  # far below the best token, -infinity is the correct score
        return (scores - scores.max()) / temperature


def keep_top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Set all but the `k` best scores to -infinity. Tokens that tie with the k-th are kept. 0 keeps all."""
    if k == 0 or k >= len(scores):
        return scores
    worst_kept = np.partition(scores, -k)[-k]
    return np.where(scores >= worst_kept, scores, -np.inf)


def keep_top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Keep the most likely tokens until their probabilities reach `p`; set the rest to -infinity. 1 keeps all.

    Among tokens with the same score, lower ids come first.
    """
    if p == 1:
        return scores
    probabilities = softmax(scores)
    near = near_the_best(scores, probabilities, p)  # only these need sorting
    best_first = near[np.argsort(-scores[near])]
    reached = np.cumsum(probabilities[best_first])
    count = min(int(np.searchsorted(reached, p)) + 1, len(near))  # the token that reaches p is included
    worst = scores[best_first[count - 1]]
    better = scores > worst
    kept = np.where(better, scores, -np.inf)
    num_ties = count - np.count_nonzero(better)  # how many of the tokens tied with the worst to keep
    kept[np.flatnonzero(scores == worst)[:num_ties]] = worst
    return kept


def near_the_best(scores: np.ndarray, probabilities: np.ndarray, p: float) -> np.ndarray:
    """Return the best tokens that together reach `p`, and all that tie with them: usually a few hundred."""
    for distance in DISTANCES:
        near = np.flatnonzero(scores >= scores.max() - distance)
        if probabilities[near].sum() >= p + ROUNDING:
            return near
    return np.arange(len(scores))


def keep_min_p(scores: np.ndarray, min_p: float) -> np.ndarray:
    """Set tokens less likely than `min_p` times the most likely one to -infinity. 0 keeps all."""
    if min_p == 0:
        return scores
    return np.where(scores >= scores.max() + math.log(min_p), scores, -np.inf)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Turn scores [..., V] into probabilities [..., V]."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of `softmax`, computed without underflow."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """Return the index at which the running sum of probabilities passes `uniform`, a number in [0, 1)."""
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def uniform(seed: int, index: int) -> float:
    """Return the `index`-th random number of the stream `seed`, in [0, 1).

    Philox (Salmon et al. 2011) is a function from (key, counter) to random bits. Every number of a stream can be
    computed without the earlier ones, so a request carries no generator state.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
