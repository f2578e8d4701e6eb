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
        return self._number(self._names, name, "names", lambda: shown(name))

    def request(self, request_id: str) -> int:
        """The number of a request."""
        return self._number(self._requests, request_id, "requests", lambda: shown(request_id))

    def who(self, request_id: str, completion: int) -> int:
        """The number of a completion."""
        name = sequence_name(request_id, completion)
        entry = lambda: [self.request(request_id), completion, self.name(name)]  # noqa: E731
        return self._number(self._who, (request_id, completion), "who", entry)

    def token(self, token_id: int, own_text: str | None, text: str) -> int:
        """The number of a token with its own text and the text that could be shown when it came."""
        entry = lambda: [token_id, self.string(own_text), self.string(text)]  # noqa: E731
        return self._number(self._tokens, (token_id, own_text, text), "tokens", entry)

    def tables(self) -> dict[str, list[Any]]:
        """What the numbers stand for."""
        return self._tables | {"strings": list(self._strings)}

    def _number(self, known: dict[Any, int], key: Any, table: str, entry: Any) -> int:
        number = known.get(key)
        if number is None:
            number = known[key] = len(known)
            self._tables[table].append(entry())
        return number


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
