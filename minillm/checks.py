"""Numbers from outside: in range and of their type, or an error that names them."""

from __future__ import annotations

import math
import numbers

from minillm.errors import RequestError


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as a plain int, if it is a whole number from `low` to `high` (None: any above).

    Raises
    ------
    RequestError
        It is out of range, or no whole number: True, 2.0 and "2" are none.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        wanted = f"{low} or more" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number, {wanted}")
    return int(value)


def check_number(
    name: str, value: object, wanted: str, low: float, high: float, excluded: float | None = None
) -> float:
    """`value` as a plain float, if it is a finite number from `low` to `high` and not `excluded`.

    Raises
    ------
    RequestError
        It is none; the message says that it must be `wanted`.
    """
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int too large for a float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or number == excluded:
        raise RequestError(f"{name} is {value!r:.40}; it must be a finite number, {wanted}")
    return number


def check_flag(name: str, value: object) -> bool:
    """`value`, if it is True or False.

    Raises
    ------
    RequestError
        It is something else, be it 0 or 1.
    """
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be True or False")
    return value
