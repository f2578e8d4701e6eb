"""Answer: one completion as text, and when it ends."""

from __future__ import annotations

from minillm.engine.sampling import SamplingParams
from minillm.engine.stopping import StopMatcher
from minillm.tokenizer import Tokenizer


class Answer:
    """Token ids in; text that may be shown out, whole characters only and nothing of a stop string; and the end.

    Parameters
    ----------
    tokenizer : of the model, or None if it came without one: then there is no text, and no end token.
    params : of the request.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._decoder = tokenizer and tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._ends = set(params.stop_token_ids)
        if tokenizer is not None and not params.ignore_eos:
            self._ends.update(tokenizer.eos_token_ids)
        self._left = params.max_tokens

    def push(self, token_id: int) -> tuple[str, str | None]:
        """What can be shown now that `token_id` has come, and "stop" or "length" if the answer ends with it."""
        self._left -= 1
        ends = "stop" if token_id in self._ends else "length" if self._left == 0 else None
        if self._decoder is None:
            return "", ends
        shown = self._matcher.push(self._decoder.push(token_id))
        if ends:
            shown += self._matcher.push(self._decoder.finish()) + self._matcher.finish()
        return shown, "stop" if self._matcher.matched is not None else ends

    def __repr__(self):
        return f"Answer(at most {self._left} more tokens)"
