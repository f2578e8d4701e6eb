"""Records to JSON and back. Reading is driven by the records' own type annotations, and trusts nothing in the input.

A reader function is built once per type. It checks every value against the type and names the location of a value that
does not fit.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from minillm.errors import TraceError

MAX_INTEGER = 2**53 - 1  # the largest integer that all JSON readers represent exactly (RFC 8259, section 6)
MAX_DEPTH = 20  # levels of nesting in a field of any type, so that recursive functions can process it

Location = str | tuple[Any, str]  # a line of a file, or a location and the name of a field or key in it
Reader = Callable[[Any, Location], Any]


def to_json(record: Any) -> dict[str, Any]:
    """Return a record as a JSON object with one key per field, without fields whose metadata has `in_file=False`."""
    return {
        f.name: _json_value(getattr(record, f.name)) for f in fields(record) if f.metadata.get("in_file", True)
    }  # `dataclasses.asdict` would also copy the fields that are left out, such as exceptions


def _json_value(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [to_json(item) for item in value]
    return value


def from_json(record_type: type, value: Any, location: str) -> Any:
    """Return the record that a JSON value describes.

    Parameters
    ----------
    record_type : the dataclass of the record.
    location : where the value comes from, for error messages.

    Raises
    ------
    TraceError
        A field is missing, unknown, or not of the declared type.
    """
    return _reader(record_type)(value, location)


def parse_object(line: bytes, location: str) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises
    ------
    TraceError
        The line has no end, which means that the file is truncated; or it is not a JSON object in UTF-8.
    """
    if not line.endswith(b"\n"):
        raise TraceError(f"{location} has no line end: the file is truncated, and its last {len(line)} bytes are lost")
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{location} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{location}: expected a JSON object, got a {type(value).__name__}")
    return value


@cache
def _reader(annotation: Any) -> Reader:
    """Return the function that converts a JSON value to the annotated type."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _record_reader(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return _list_reader(arguments[0])
    if origin is dict:
        return _dict_reader(_reader(arguments[1]))
    if origin is types.UnionType:
        (inner,) = [_reader(argument) for argument in arguments if argument is not type(None)]
        return lambda value, location: None if value is None else inner(value, location)
    if annotation is Any:
        return _read_any
    return _scalar_reader(annotation)


def _read_any(value: Any, location: Location) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container)]
    if level:
        raise TraceError(f"{_text(location)} is nested more than {MAX_DEPTH} levels deep")
    return value


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _scalar_reader(scalar: type) -> Reader:
    expected = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}[scalar]

    def read(value: Any, location: Location) -> Any:
        # The types are compared because isinstance(True, int) is true.
        has_type = type(value) is scalar or (scalar is float and type(value) is int)
        if not has_type or (scalar is float and not abs(value) <= sys.float_info.max):
            raise _unexpected(value, location, expected)
        if scalar is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise _unexpected(value, location, "an integer of magnitude at most 2^53 - 1")
        return scalar(value)

    return read


def _list_reader(item_type: Any) -> Reader:
    read_item = _reader(item_type)

    def read(value: Any, location: Location) -> Any:
        if not isinstance(value, list):
            raise _unexpected(value, location, "a list")
        # Lists of integers are checked as a whole: block tables and reference counts are most of a file.
        if item_type is int and set(map(type, value)) == {int} and max(max(value), -min(value)) <= MAX_INTEGER:
            return value
        return [read_item(item, location) for item in value]

    return read


def _dict_reader(read_item: Reader) -> Reader:
    def read(value: Any, location: Location) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(value, location, "an object")
        return {key: read_item(item, (location, key)) for key, item in value.items()}

    return read


def _record_reader(record_type: type) -> Reader:
    hints = typing.get_type_hints(record_type)
    readers = {f.name: _reader(hints[f.name]) for f in fields(record_type) if f.metadata.get("in_file", True)}

    def read(value: Any, location: Location) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(value, location, f"an object with {', '.join(readers)}")
        if value.keys() != readers.keys():
            missing, unknown = sorted(readers.keys() - value.keys()), sorted(value.keys() - readers.keys())
            raise TraceError(
                f"{_text(location)} is not a {record_type.__name__}: missing fields {missing}, unknown fields {unknown}"
            )
        return record_type(*[reader(value[name], (location, name)) for name, reader in readers.items()])

    return read


def _unexpected(value: Any, location: Location, expected: str) -> TraceError:
    return TraceError(f"{_text(location)} is {value!r:.40}; expected {expected}")


def _text(location: Location) -> str:
    """Return a location as text. Only errors need it: a file has millions of values."""
    return location if isinstance(location, str) else f"{_text(location[0])}, {location[1]}"
