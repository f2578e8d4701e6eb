"""Map files into memory: the operating system reads only the pages that are used."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from minillm.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only into memory. The operating system reads a page from disk on first access.

    The mapping lives as long as an array that views it. The file must not be truncated during that time.

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


def release_pages(data: np.ndarray) -> None:
    """Release the memory pages that hold these mapped bytes. A later access reads them from the file again.

    Without this, a model takes twice the memory while it loads: once as file pages, once as converted weights.
    """
    mapped = data.base if isinstance(data.base, mmap.mmap) else getattr(data.base, "obj", None)
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
