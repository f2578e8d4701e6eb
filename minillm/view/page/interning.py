"""Interning: the page's data stores each text, token and sequence once, and refers to it by its index."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from minillm.trace import sequence_name
from minillm.view.printable import printable

MAX_INTEGER = 2**53 - 1  # the largest integer up to which JavaScript's numbers (float64) represent every integer


class Interner:
    """Tables of everything that a trace repeats. Each method returns the index of its argument in one table.

    All texts are converted to printable characters. Two names that then look the same still have different indices; two
    equal texts share one index.
    """

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._sequences: dict[tuple[str, int], int] = {}
        self._tokens: dict[tuple[int, str | None, str], int] = {}
        self._tables: dict[str, list[Any]] = {"names": [], "requests": [], "sequences": [], "tokens": []}

    def string(self, text: str | None) -> int:
        """Return the index of a text; -1 for None."""
        return -1 if text is None else self._strings.setdefault(printable(text), len(self._strings))

    def name(self, name: str) -> int:
        """Return the index of a sequence's name."""
        index = self._names.get(name)
        return self._add(self._names, name, "names", printable(name)) if index is None else index

    def request(self, request_id: str) -> int:
        """Return the index of a request."""
        index = self._requests.get(request_id)
        return self._add(self._requests, request_id, "requests", printable(request_id)) if index is None else index

    def sequence(self, request_id: str, completion: int) -> int:
        """Return the index of a sequence: one completion of a request."""
        index = self._sequences.get((request_id, completion))
        if index is None:
            entry = [self.request(request_id), completion, self.name(sequence_name(request_id, completion))]
            index = self._add(self._sequences, (request_id, completion), "sequences", entry)
        return index

    def token(self, token_id: int, token_text: str | None, text: str) -> int:
        """Return the index of a token, its own text, and the text that it added to the answer."""
        index = self._tokens.get((token_id, token_text, text))
        if index is None:
            entry = [token_id, self.string(token_text), self.string(text)]
            index = self._add(self._tokens, (token_id, token_text, text), "tokens", entry)
        return index

    def tables(self) -> dict[str, list[Any]]:
        """Return the tables: names, requests, sequences, tokens and strings."""
        return self._tables | {"strings": list(self._strings)}

    def _add(self, indices: dict[Any, int], key: Hashable, table: str, entry: Any) -> int:
        indices[key] = len(indices)
        self._tables[table].append(entry)
        return indices[key]


def page_value(value: Any) -> Any:
    """Return a JSON value with printable texts. Numbers that JavaScript cannot represent exactly become strings."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): page_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [page_value(item) for item in value]
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        return str(value)
    return value
