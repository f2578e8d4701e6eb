"""Request: what the engine keeps of an unfinished request besides its sequences."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from minillm.checks import check_integer
from minillm.engine.detokenizing import IncrementalDetokenizer
from minillm.engine.sampling import SamplingParams
from minillm.engine.sequence import Sequence
from minillm.errors import RequestError
from minillm.tokenizer import Tokenizer


@dataclass
class Request:
    """An unfinished request. Its tokens are in the scheduler's sequences.

    Attributes
    ----------
    params : SamplingParams.
    seed : seed of its random numbers.
    detokenizers : one IncrementalDetokenizer per completion.
    """

    params: SamplingParams
    seed: int
    detokenizers: list[IncrementalDetokenizer]

    @classmethod
    def new(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Request:
        """Return a request with nothing generated. A seed is drawn if the parameters have none."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return cls(params, seed, [IncrementalDetokenizer(tokenizer, params) for _ in range(params.n)])

    def detokenize_again(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        """Replace the detokenizers of a sequence's completions by ones that have received exactly its tokens."""
        for completion in sequence.completions:
            detokenizer = IncrementalDetokenizer(tokenizer, self.params)
            for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
                detokenizer.push(token_id)
            self.detokenizers[completion] = detokenizer


def stream_seed(seed: int, completion: int) -> int:
    """Return the seed of the random numbers for one completion.

    Completion i uses `seed + i * 2**64`. The seeds of requests are below 2**64, so no two completions of any requests
    with different seeds use the same numbers.
    """
    return seed + (completion << 64)


def check_token_ids(prompt: SequenceOf[int], vocab_size: int) -> list[int]:
    """Return the prompt as a list of plain ints.

    Raises
    ------
    RequestError
        The prompt is empty, or not a sequence of ids from 0 to `vocab_size` - 1.
    """
    if not isinstance(prompt, list | tuple | np.ndarray):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    if len(prompt) == 0:
        raise RequestError("the prompt is empty; the model continues a text, so give it at least one token")
    return [check_integer(f"prompt token {n}", token_id, 0, vocab_size - 1) for n, token_id in enumerate(prompt)]


def check_stop_strings(stop: SequenceOf[str], tokenizer: Tokenizer) -> None:
    """Check that every stop string can occur in a text without special tokens, or names one of them.

    Raises
    ------
    RequestError
        A stop string spells a special token among other text.
    """
    for text in stop:
        if tokenizer.contains_special_token(text) and tokenizer.special_token_id(text) is None:
            raise RequestError(
                f"the stop string {text!r} contains a special token, which is left out of the answer's text: give the "
                "special token alone, or its id in stop_token_ids, or set skip_special_tokens=False"
            )
