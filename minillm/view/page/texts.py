"""Texts and names as the page's data has them: safe to show, each written once, and numbers in their place."""

from __future__ import annotations

import math
from typing import Any

from minillm.trace import sequence_name
from minillm.view.shown import shown

MOST = 2**53 - 1  # beyond it JavaScript's numbers, which are float64, leave integers out


class Texts:
    """Numbers for all that a trace repeats: its texts, its tokens, who it speaks of.

    Two names may look the same once they are safe to show, and are still two; of two such texts one is kept.
    """

    def __init__(self):
        self._strings: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._who: dict[tuple[str, int], int] = {}
        self._tokens: dict[tuple[int, str | None, str | None], int] = {}
        self._tables: dict[str, list[Any]] = {"names": [], "requests": [], "who": [], "tokens": []}

    def string(self, text: str | None) -> int:
        """The number of a text; -1 for None."""
        return -1 if text is None else self._strings.setdefault(shown(text), len(self._strings))

    def name(self, name: str) -> int:
        """The number of a sequence's name."""
        number = self._names.get(name)
        return self._add(self._names, name, "names", shown(name)) if number is None else number

    def request(self, request_id: str) -> int:
        """The number of a request."""
        number = self._requests.get(request_id)
        return self._add(self._requests, request_id, "requests", shown(request_id)) if number is None else number

    def who(self, request_id: str, completion: int) -> int:
        """The number of a completion."""
        number = self._who.get((request_id, completion))
        if number is None:
            entry = [self.request(request_id), completion, self.name(sequence_name(request_id, completion))]
            number = self._add(self._who, (request_id, completion), "who", entry)
        return number

    def token(self, token_id: int, own_text: str | None, text: str) -> int:
        """The number of a token with its own text and the text that could be shown when it came."""
        number = self._tokens.get((token_id, own_text, text))
        if number is None:
            entry = [token_id, self.string(own_text), self.string(text)]
            number = self._add(self._tokens, (token_id, own_text, text), "tokens", entry)
        return number

    def tables(self) -> dict[str, list[Any]]:
        """What the numbers stand for."""
        return self._tables | {"strings": list(self._strings)}

    def _add(self, known: dict[Any, int], key: Any, table: str, entry: Any) -> int:
        known[key] = len(known)
        self._tables[table].append(entry)
        return known[key]


def plain(value: Any) -> Any:
    """A JSON value with its texts safe to show, and as text whatever number JavaScript would not hold exactly."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > MOST):
        return str(value)
    return value
