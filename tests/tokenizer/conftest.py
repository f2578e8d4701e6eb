"""A small tokenizer folder that tests can change."""

import pytest
from support.tokenizer_builders import byte_level_backend


@pytest.fixture
def small_folder(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
