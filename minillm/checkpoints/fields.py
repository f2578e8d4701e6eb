"""Fields: the numbers and words of a file's header, each checked for its kind before anybody relies on it."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from minillm.errors import CheckpointError

LARGEST_INTEGER = 2**31 - 1  # no size of a real model comes near
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32, in which models compute
_REQUIRED: Any = object()


class Fields:
    """A mapping read from a file, with accessors that raise CheckpointError unless a field is what it must be.

    A field that is absent, or JSON's null, takes the accessor's default; without a default it is required.

    Parameters
    ----------
    values : what the file said
    where : how messages call the file
    prefix : put before every name, in the mapping and in messages, such as `"llama."`
    aliases : what this file calls a field, where it is not the name that is asked for
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, prefix: str = "", aliases: Mapping[str, str] | None = None
    ):
        self.values = values
        self.where = where
        self.prefix = prefix
        self.aliases = aliases or {}

    def key(self, name: str) -> str:
        """What the file calls a field."""
        return self.prefix + self.aliases.get(name, name)

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The field as the file has it."""
        value = self.values.get(self.key(name))
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: field {self.key(name)!r} is missing")
        return default

    def over(self, defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Fields:
        """The same fields, and values for absent ones. Null is not absent here: it may say "none" of what is usual."""
        return Fields({**defaults, **self.values}, self.where, self.prefix, aliases)

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A whole number, 1 to 2^31 - 1; or the default, whatever that is."""
        value = self.get(name, default)
        if value is default or (_is_whole(value) and 1 <= value <= LARGEST_INTEGER):
            return value
        raise self.wrong(name, value, f"an integer from 1 to {LARGEST_INTEGER:,}")

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive number, as a float, that float32 can hold; or the default, whatever that is."""
        value = self.get(name, default)
        if value is default:
            return value
        if (_is_whole(value) or isinstance(value, float)) and SMALLEST_FLOAT <= value <= LARGEST_FLOAT:
            return float(value)
        raise self.wrong(name, value, "a positive finite number")

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self.get(name, default)
        if isinstance(value, bool):
            return value
        raise self.wrong(name, value, "true or false")

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self.get(name, default)
        if isinstance(value, str):
            return value
        raise self.wrong(name, value, "a string")

    def section(self, name: str) -> Fields:
        """A mapping of further fields; an empty one when absent."""
        value = self.get(name, {})
        if isinstance(value, dict):
            return Fields(value, f"{self.where}, {name!r}")
        raise self.wrong(name, value, "an object of fields")

    def wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        """The error to raise for a field that is not `wanted`."""
        found = f"{reprlib.repr(value)} ({type(value).__name__})"
        return CheckpointError(f"{self.where}: field {self.key(name)!r} is {found}, wanted {wanted}")


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Decode a JSON object whose keys are distinct; CheckpointError says where it is not one."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start:,}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested deeper than {sys.getrecursionlimit():,} levels") from None
    except ValueError as error:  # a JSONDecodeError, a duplicate, or an integer of thousands of digits
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, wanted an object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} appears twice in one object")
    return fields


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
