"""Converts the exceptions of the `tokenizers` library to `TokenizerError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minillm.errors import TokenizerError


@contextmanager
def backend_errors(source: str) -> Iterator[None]:
    """Convert any exception of the `tokenizers` library to a `TokenizerError` that names `source`.

    The library raises a plain `Exception` for bad data. A panic of its Rust code raises `PanicException`, which is not
    a subclass of `Exception`, so `except Exception` would not catch it.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__module__ == "pyo3_runtime"
        if is_panic or type(error) is Exception or isinstance(error, TypeError | ValueError):
            raise TokenizerError(f"{source}: the tokenizers library rejects the data: {error}") from error
        raise
