"""The functions that templates written for transformers can call: `namespace`, `raise_exception`, `strftime_now`."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

# Characters and fields such as `%Y` or `%-d`, at most 100 of them; a field has no width.
DATE_FORMAT = re.compile(r"(?:[^%]|%-?[a-zA-Z%]){0,100}", re.DOTALL)


class CheckedNamespace(Namespace):
    """Jinja's `namespace()` without private names.

    Jinja's class accepts names such as `__class__`, and its `repr` prints everything that it contains.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # without a parameter `self`, `namespace(self=1)` is allowed
        self, *mappings = args
        attributes = dict(*mappings, **kwargs)
        for name in attributes:
            _reject_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def raise_exception(message: str) -> NoReturn:
    """Raise a `TemplateError`. Templates call this to reject a conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(format: str) -> str:
    """Return the local date and time in a `strftime` format."""
    if not DATE_FORMAT.fullmatch(format):
        raise SecurityError(
            f"the date format {format[:60]!r} has a field with a width, or more than 100 characters and fields"
        )
    return datetime.now().strftime(format)


def _reject_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not have the private attribute {name!r}")
