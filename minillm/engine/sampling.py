"""One token out of a vocabulary's scores: what a request may ask for, and how the choice is made.

The model gives every token of the vocabulary a score (a *logit*). Sampling turns scores into probabilities, cuts away
what is too unlikely, and draws. Each step is a function of its own, in the order they are applied:

    penalise repeats -> temperature -> top-k -> top-p -> min-p -> draw
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

NEAR = (4, 6, 8, 10, 12, 16)  # how far below the best score top-p looks for what it keeps, before it sorts all
ROUNDING = 1e-9  # more than the rounding in a sum of a million probabilities


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen, and when to stop. Checked when made.

    Attributes
    ----------
    max_tokens : at most so many new tokens.
    temperature : scores are divided by it. Under 1 sharpens, over 1 flattens; 0 takes the best token always (greedy).
    top_k : choose among the k best tokens; 0 among all.
    top_p : choose among the fewest tokens whose probabilities reach this sum (Holtzman et al. 2019); 1 among all.
    min_p : drop tokens less likely than this share of the likeliest one's probability (Nguyen et al. 2024).
    repetition_penalty : over 1 makes tokens that stand in the prompt or answer less likely (Keskar et al. 2019).
    seed : the same seed gives the same tokens, whatever else runs; None draws a new one for the request.
    stop : strings that end the answer; they are not part of it.
    stop_token_ids : token ids that end the answer, besides the model's own end tokens.
    ignore_eos : go on past the model's end tokens, up to `max_tokens`.
    logprobs : also return the natural log of each chosen token's probability under the model itself.
    skip_special_tokens : leave special tokens out of the text.
    n : completions of the one prompt, each drawn from a stream of random numbers of its own.

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

    def __post_init__(self):
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
            object.__setattr__(self, name, value)  # how a frozen dataclass tidies its own fields

    @property
    def changed(self) -> dict[str, Any]:
        """The values that are not the default ones, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __repr__(self):
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"


def _items(name: str, values: Iterable) -> Iterable:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; it takes a list")
    return values


def _check_stop(text: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"stop holds {text!r}; it takes strings of at least one character")
    return text


@dataclass(frozen=True)
class Sample:
    """A chosen token and its log-probability under the model itself: before penalty, temperature and cuts."""

    token_id: int
    logprob: float | None


def sample(logits: np.ndarray, params: SamplingParams, seed: int, index: int, context: SequenceOf[int] = ()) -> Sample:
    """Choose one token.

    Parameters
    ----------
    logits : float32 [V]
    params : SamplingParams
    seed, index : the request's seed and how many tokens it has drawn before. The draw is a function of these two
        alone, so that batching, preemption or a rerun cannot change it.
    context : the token ids so far, prompt and answer; read only if there is a repetition penalty.

    Raises
    ------
    NumericError
        The scores hold NaN or infinity, so no choice among them means anything.
    """
    best = int(np.argmax(logits))  # NaN counts as the largest
    if not math.isfinite(logits[best]):
        raise NumericError(
            "the model's scores hold NaN or infinity: are its weights damaged, or keys and values beyond float16?"
        )
    if params.temperature == 0 and params.repetition_penalty == 1:
        token_id = best
    else:
        scores = penalise_repeats(np.asarray(logits, np.float64), params.repetition_penalty, context)
        if params.temperature == 0:
            token_id = int(scores.argmax())
        else:
            token_ids, scores = candidates(scores, params)
            token_id = int(token_ids[draw(softmax(scores), uniform(seed, index))])
    if not params.logprobs:
        return Sample(token_id, None)
    return Sample(token_id, float(log_softmax(np.asarray(logits, np.float64))[token_id]))


def candidates(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The n tokens that can be drawn, in order, and their scores: temperature, then the cuts.

    After each cut, what it has cut away is left behind, so that what follows deals with few numbers instead of [V].

    Parameters
    ----------
    scores : float64 [V]
    params : SamplingParams; the temperature is over 0

    Returns
    -------
    int [n], float64 [n]
    """
    token_ids, scores = np.arange(len(scores)), apply_temperature(scores, params.temperature)
    for keep, limit in (keep_top_k, params.top_k), (keep_top_p, params.top_p), (keep_min_p, params.min_p):
        cut = keep(scores, limit)
        if cut is not scores:
            kept = np.flatnonzero(cut > -np.inf)
            token_ids, scores = token_ids[kept], scores[kept]
    return token_ids, scores


def distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities [V] that `sample` draws from: zero for all but the candidates."""
    token_ids, kept = candidates(scores, params)
    probabilities = np.zeros(len(scores))
    probabilities[token_ids] = softmax(kept)
    return probabilities


def penalise_repeats(scores: np.ndarray, penalty: float, context: SequenceOf[int]) -> np.ndarray:
    """Lower the score of every token in `context`: divide it by `penalty` if positive, else multiply (CTRL, 2019)."""
    if penalty == 1 or len(context) == 0:
        return scores
    seen = np.unique(np.asarray(context, np.int64))
    scores = scores.copy()
    with np.errstate(over="ignore"):
        penalised = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    largest = np.finfo(scores.dtype).max
    scores[seen] = np.clip(penalised, -largest, largest)  # a wild penalty must not make infinities
    return scores


def apply_temperature(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Divide by `temperature`. The maximum is taken off first, so that no temperature, however small, overflows."""
    with np.errstate(over="ignore"):  # far below the best token, -infinity is the right score
        return (scores - scores.max()) / temperature


def keep_top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Set all but the `k` best scores to -infinity; tokens that tie with the k-th stay. 0 keeps all."""
    if k == 0 or k >= len(scores):
        return scores
    worst_kept = np.partition(scores, -k)[-k]
    return np.where(scores >= worst_kept, scores, -np.inf)


def keep_top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Keep the likeliest tokens until their probabilities reach `p`; the rest gets -infinity. 1 keeps all.

    Of tokens with the same score, those of lower ids come first.
    """
    if p == 1:
        return scores
    probabilities = softmax(scores)
    near = near_the_best(scores, probabilities, p)  # the only ones worth sorting
    best_first = near[np.argsort(-scores[near])]
    reached = np.cumsum(probabilities[best_first])
    count = min(np.searchsorted(reached, p) + 1, len(near))  # the token that crosses the line is in
    worst = scores[best_first[count - 1]]
    better = scores > worst
    kept = np.where(better, scores, -np.inf)
    room = count - np.count_nonzero(better)  # for tokens that tie with the worst
    kept[np.flatnonzero(scores == worst)[:room]] = worst
    return kept


def near_the_best(scores: np.ndarray, probabilities: np.ndarray, p: float) -> np.ndarray:
    """Ids of tokens that reach `p` together, and of all with scores as good: mostly a few hundred, so quick to sort."""
    for distance in NEAR:
        near = np.flatnonzero(scores >= scores.max() - distance)
        if probabilities[near].sum() >= p + ROUNDING:
            return near
    return np.arange(len(scores))


def keep_min_p(scores: np.ndarray, min_p: float) -> np.ndarray:
    """Set tokens less likely than `min_p` times the likeliest to -infinity. 0 keeps all."""
    if min_p == 0:
        return scores
    return np.where(scores >= scores.max() + math.log(min_p), scores, -np.inf)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Scores [..., V] -> probabilities [..., V]."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """The natural logarithm of `softmax`, without passing through numbers too small to hold."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The token at which the running sum of probabilities passes `uniform`, a number from 0 up to but not 1."""
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def uniform(seed: int, index: int) -> float:
    """The `index`-th random number of the stream `seed`, in [0, 1).

    Philox (Salmon et al. 2011) is a function from (key, counter) to random bits: any number of a stream can be had
    without those before it, so no generator's state has to travel with a request.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
