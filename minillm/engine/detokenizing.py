"""IncrementalDetokenizer: turns one completion's tokens into text as they arrive, and detects its end."""

from __future__ import annotations

from minillm.engine.sampling import SamplingParams
from minillm.engine.stopping import StopMatcher
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.detokenizer import StreamingDecoder


class IncrementalDetokenizer:
    """Turns token ids into text that can be shown: whole characters only, and no part of a stop string.

    Parameters
    ----------
    tokenizer : the model's tokenizer; None if it has none, in which case there is no text and no end token.
    params : SamplingParams of the request.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._decoder: StreamingDecoder | None = None
        if tokenizer is not None:
            self._decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._end_token_ids = set(params.stop_token_ids)
        if tokenizer is not None:
            if not params.ignore_eos:
                self._end_token_ids.update(tokenizer.eos_token_ids)
            # A special token adds no text, so a stop string that names one is matched by its id.
            named = map(tokenizer.special_token_id, params.stop)
            self._end_token_ids.update(token_id for token_id in named if token_id is not None)
        self._num_left = params.max_tokens

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take the next token.

        Returns
        -------
        text : text that can be shown now.
        finish_reason : "stop" or "length" if the completion ends with this token, else None.
        """
        self._num_left -= 1
        reason = "stop" if token_id in self._end_token_ids else "length" if self._num_left == 0 else None
        if self._decoder is None:
            return "", reason
        text = self._matcher.push(self._decoder.push(token_id))
        if reason:
            text += self._matcher.push(self._decoder.finish()) + self._matcher.finish()
        return text, "stop" if self._matcher.matched is not None else reason

    def __repr__(self) -> str:
        return f"IncrementalDetokenizer(at most {self._num_left} more tokens)"
