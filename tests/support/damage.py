"""Shared by tests that damage checkpoints: unusual values, and the outcome and memory of opening a checkpoint."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from minillm.checkpoints import open_checkpoint
from minillm.errors import MinillmError

OPENED, REFUSED = "opened", "refused"

EDGE_NUMBERS = [0, 1, 2, 7, 8, 9, 31, 33, 255, 2**16]
EDGE_NUMBERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

# Any value that JSON can represent, with numbers of any size, and the NaN and infinities that Python's parser accepts.
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from(EDGE_NUMBERS) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def open_and_read(path: Path) -> str:
    """Open a checkpoint and read all its tensors and its tokenizer; return OPENED, or REFUSED for a MinillmError.

    The message of the error must contain the name of the checkpoint.
    """
    try:
        checkpoint = open_checkpoint(path)
        with np.errstate(all="ignore"):
            for name, tensor in checkpoint.tensors.items():
                assert tensor.read().shape == checkpoint.config.tensor_shapes()[name]
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hello"))
        return OPENED
    except MinillmError as error:
        message = str(error)
    assert path.name in message
    return REFUSED


def peak_bytes(path: Path) -> int:
    """Return the peak of Python's memory while `open_and_read` runs."""
    tracemalloc.start()
    try:
        open_and_read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def allowed_bytes(file_bytes: int) -> int:
    """Return the memory that a checkpoint may take. A small string or number is a larger object in Python."""
    return 1_000_000 + 64 * file_bytes


def edit_json(path: Path, **changes) -> None:
    """Change fields of a JSON file. The value `...` removes a field."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
