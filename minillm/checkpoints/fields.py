"""Read the fields of a file's header, checking the type and range of each one."""

from __future__ import annotations

import json
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from minillm.errors import CheckpointError

MAX_INTEGER = 2**31 - 1  # far above any size in a real model
MIN_FLOAT, MAX_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32 numbers; models compute in float32
_REQUIRED: Any = object()


class Fields:
    """Fields read from a file. Each accessor checks its field and raises CheckpointError if the field is invalid.

    If a field is missing or null, the accessor returns its default. A field without a default is required.

    Parameters
    ----------
    values : the fields as read from the file
    source : the file, as error messages name it
    prefix : put in front of every field name, in the mapping and in messages; for example `"llama."`
    aliases : the file's names of fields that it names differently

    Attributes
    ----------
    used : names, in the file, of the fields that have been read
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, prefix: str = "", aliases: Mapping[str, str] | None = None
    ):
        self.used: set[str] = set()
        self.values = values
        self.source = source
        self.prefix = prefix
        self.aliases = aliases or {}

    def key(self, name: str) -> str:
        """Return the name of a field in the file."""
        return self.prefix + self.aliases.get(name, name)

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field's value, unchecked."""
        self.used.add(self.key(name))
        value = self.values.get(self.key(name))
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.source}: field {self.key(name)!r} is missing")
        return default

    def with_defaults(self, defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Fields:
        """Return these fields, with default values for missing ones. A null field stays null: it may mean "none"."""
        return Fields({**defaults, **self.values}, self.source, self.prefix, aliases)

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an integer from 1 to 2^31 - 1, or the default, which may be of any type."""
        value = self.get(name, default)
        if value is default or (_is_integer(value) and 1 <= value <= MAX_INTEGER):
            return value
        raise self.invalid(name, value, f"an integer from 1 to {MAX_INTEGER:,}")

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a positive number that float32 can hold, as a float, or the default, which may be of any type."""
        value = self.get(name, default)
        if value is default:
            return value
        if (_is_integer(value) or isinstance(value, float)) and MIN_FLOAT <= value <= MAX_FLOAT:
            return float(value)
        raise self.invalid(name, value, "a positive finite number")

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if isinstance(value, bool):
            return value
        raise self.invalid(name, value, "true or false")

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        value = self.get(name, default)
        if isinstance(value, str):
            return value
        raise self.invalid(name, value, "a string")

    def section(self, name: str) -> Fields:
        """Return the fields of a nested object. A missing section has no fields."""
        value = self.get(name, {})
        if isinstance(value, dict):
            return Fields(value, f"{self.source}, {name!r}")
        raise self.invalid(name, value, "an object of fields")

    def invalid(self, name: str, value: Any, expected: str) -> CheckpointError:
        """Return the error to raise for an invalid field."""
        found = f"{reprlib.repr(value)} ({type(value).__name__})"
        return CheckpointError(f"{self.source}: field {self.key(name)!r} is {found}, expected {expected}")


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """Decode a JSON object.

    Raises
    ------
    CheckpointError
        The bytes are not a JSON object, or a key appears twice in one object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source}: not UTF-8 at byte {error.start:,}") from None
    except RecursionError:
        raise CheckpointError(f"{source}: nested deeper than {sys.getrecursionlimit():,} levels") from None
    except ValueError as error:  # a JSONDecodeError, a duplicate key, or an integer of thousands of digits
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {duplicate!r} appears twice in one object")
    return fields


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
