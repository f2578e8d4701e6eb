"""Map files into memory: the operating system reads only the pages that are used."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from minillm.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only into memory. The operating system reads a page from disk on first access.

    The mapping lives as long as an array that views it. If the file is shortened during that time, reading the lost
    pages ends the process; `check_size` detects this before.

    Raises
    ------
    CheckpointError
        The file is missing, empty or unreadable.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: the file is empty; if a download was interrupted, download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def check_size(data: np.ndarray, source: str) -> None:
    """Check that the file of these mapped bytes still has the size with which it was mapped.

    Parameters
    ----------
    data : a view into a mapped file.
    source : the file, as error messages name it.

    Raises
    ------
    CheckpointError
        The file has another size now.
    """
    mapped = _mapping(data)
    if mapped is not None and mapped.size() != len(mapped):
        raise CheckpointError(
            f"{source}: the file had {len(mapped):,} bytes when it was opened and now has {mapped.size():,}; it was "
            "changed while the model was loading: restore it and load the model again"
        )


def _mapping(data: np.ndarray) -> mmap.mmap | None:
    """Return the mapping that an array views, or None if it views no mapped file."""
    base: object = data
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None


def release_pages(data: np.ndarray) -> None:
    """Release the memory pages that hold these mapped bytes. A later access reads them from the file again.

    Without this, a model takes twice the memory while it loads: once as file pages, once as converted weights.
    """
    mapped = _mapping(data)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
