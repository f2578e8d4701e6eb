"""StopMatcher: ends an answer at a stop string, without ever showing a part of one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class StopMatcher:
    """Lets text through until a stop string is complete.

    A stop string may straddle tokens. So text that could be the beginning of one is held back until what follows
    decides: of "...\\nUser" with stop "\\nUser:" the last five characters wait.
    """

    def __init__(self, stop: SequenceOf[str]):
        self.stop = tuple(stop)
        self.matched: str | None = None  # the stop string that ended the text
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece of text; return what may be shown now. Nothing comes after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.index(stop), stop) for stop in self.stop if stop in text]
        if found:
            start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text ends here: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
