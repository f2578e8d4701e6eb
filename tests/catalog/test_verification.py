"""Catalog models that changed on disk after they were downloaded."""

import os

import pytest
from support.wheels import PAYLOAD

from minillm.catalog import cache_folder, resolve, verification, verify
from minillm.cli import main
from minillm.errors import CatalogError


def damage(path, keep_time):
    """Write zeros into the middle of a file; with `keep_time`, restore its modification time."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(1_000_000)
        file.write(bytes(100_000))
    times = (status.st_atime_ns, status.st_mtime_ns + (0 if keep_time else 10**9))
    os.utime(path, ns=times)


def test_a_cached_file_with_other_bytes_is_downloaded_again(wheel, capsys):
    path = resolve("tiny")
    damage(path, keep_time=False)
    assert resolve("tiny") == path
    assert path.read_bytes() == PAYLOAD
    assert f"{path} has changed since it was downloaded" in capsys.readouterr().err


def test_a_file_is_hashed_again_only_if_it_may_have_changed(wheel, monkeypatch):
    path, hashed = resolve("tiny"), []
    has_published_bytes = verification.has_published_bytes
    monkeypatch.setattr(
        verification, "has_published_bytes", lambda *arguments: hashed.append(1) or has_published_bytes(*arguments)
    )
    resolve("tiny")
    assert hashed == []
    os.utime(path)
    resolve("tiny")
    resolve("tiny")
    assert hashed == [1]
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)  # another inode
    resolve("tiny")
    assert hashed == [1, 1]


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_note_is_ignored(wheel, note):
    path = resolve("tiny")
    (cache_folder() / "tiny.verified.json").write_bytes(note)
    assert resolve("tiny") == path


def test_verify_finds_a_change_that_left_size_and_time(wheel, capsys):
    path = resolve("tiny")
    assert verify("tiny") == [(path, True)]
    assert main(["verify", "tiny"]) == 0
    damage(path, keep_time=True)
    assert verify("tiny") == [(path, False)]
    assert main(["verify", "tiny"]) == 2
    out, err = capsys.readouterr()
    assert f"{path}: intact" in out
    assert f"{path}: DAMAGED" in out
    assert "delete it, and the next command that needs it downloads it again" in err


def test_only_catalog_models_on_this_machine_can_be_verified(links):
    with pytest.raises(CatalogError, match="only catalog models can be verified"):
        verify("owner/name")
    with pytest.raises(CatalogError, match="no file of tiny is on this machine"):
        verify("tiny")
