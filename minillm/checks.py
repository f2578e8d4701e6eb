"""Checks of values from outside: in range and of the right type, or an error that names them."""

from __future__ import annotations

import math
import numbers

from minillm.errors import RequestError


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as a plain int, if it is an integer from `low` to `high` (None: no upper limit).

    Raises
    ------
    RequestError
        The value is out of range or not an integer. True, 2.0 and "2" are not integers.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        integer = int(value)
        if integer >= low and (high is None or integer <= high):
            return integer
    expected = f"{low} or more" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} is {value!r}; it must be a whole number, {expected}")


def check_number(
    name: str, value: object, expected: str, low: float, high: float, excluded: float | None = None
) -> float:
    """Return `value` as a plain float, if it is a finite number from `low` to `high` and not `excluded`.

    Raises
    ------
    RequestError
        The value is not such a number; the message describes the range as `expected`.
    """
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int too large for a float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or number == excluded:
        raise RequestError(f"{name} is {value!r:.40}; it must be a finite number, {expected}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return `value`, if it is True or False.

    Raises
    ------
    RequestError
        The value is anything else, even 0 or 1.
    """
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be True or False")
    return value
