"""Fixtures for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import write_hf_folder


@pytest.fixture
def hf_folder(tmp_path) -> Path:
    """A tiny random Llama in Hugging Face format."""
    return write_hf_folder(tmp_path / "m")[0]
