"""Errors of the `tokenizers` library as `TokenizerError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minillm.errors import TokenizerError


@contextmanager
def backend_errors(source: str) -> Iterator[None]:
    """Convert the errors of the `tokenizers` library to `TokenizerError`. `source` names the data.

    The library raises a plain `Exception` for bad data. If its Rust code panics, it raises a `PanicException`, which
    does not derive from `Exception`, so `except Exception` would not catch it.
    """
    try:
        yield
    except BaseException as problem:
        if type(problem).__module__ == "pyo3_runtime" or type(problem) in (Exception, TypeError, ValueError):
            raise TokenizerError(f"{source}: the tokenizers library rejects the data: {problem}") from problem
        raise
