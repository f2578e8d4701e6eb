"""StopMatcher: ends an answer at a stop string without showing any part of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class StopMatcher:
    """Passes text on until a stop string is complete.

    A stop string can span several tokens. Text that could be the beginning of one is therefore held back until the text
    after it decides: with the stop string "\\nUser:", the last five characters of "...\\nUser" are held back.

    Parameters
    ----------
    stop : the stop strings.

    Attributes
    ----------
    matched : the stop string that ended the text, or None.
    """

    def __init__(self, stop: SequenceOf[str]):
        self.stop = tuple(stop)
        self.matched: str | None = None
        self._held_back = ""

    def push(self, text: str) -> str:
        """Take the next piece of text; return the text that can be shown now, which is none after a match."""
        if self.matched is not None:
            return ""
        text = self._held_back + text
        matches = [(text.index(stop), stop) for stop in self.stop if stop in text]
        if matches:
            start, self.matched = min(matches)
            self._held_back = ""
            return text[:start]
        length = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held_back = text[len(text) - length :]
        return text[: len(text) - length]

    def finish(self) -> str:
        """End the text; return what was held back, because no stop string was completed."""
        text, self._held_back = self._held_back, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
