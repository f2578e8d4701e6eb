"""What a path, a catalog name or a hub id resolves to."""

import sys
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wheels import MEMBER, PAYLOAD, make_wheel

from minillm.catalog import cache_folder, lookup, resolve
from minillm.errors import CatalogError

# ---- paths and names


@pytest.fixture
def here(links, tmp_path, monkeypatch):
    """A working folder with a model of each kind, a folder without a model, and a file that is not a model."""
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
def test_paths_are_returned_unchanged(here, text):
    assert resolve(text) == Path(text)
    assert resolve(Path(text)) == Path(text)
    assert resolve(f"~/{text}") == here / text


@pytest.mark.parametrize(
    ("model", "message"),
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
def test_other_files_and_names_are_refused(here, model, message):
    with pytest.raises(CatalogError, match=message):
        resolve(model)


def test_only_a_model_hides_a_catalog_name(here, wheel):
    (here / "tiny").mkdir()
    assert resolve("tiny") == cache_folder() / "tiny.gguf"
    (here / "tiny/config.json").write_text("{}")
    assert resolve("tiny") == Path("tiny")


@given(text=st.text(max_size=40) | st.text(alphabet="ab./\\~-\0", max_size=12))
def test_any_text_is_resolved_or_refused(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "CATALOG", {})
        patch.setitem(sys.modules, "huggingface_hub", None)
        try:
            found = resolve(text)
        except CatalogError:
            return
        assert found.exists()


# ---- the cache folder and installed packages


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
def test_the_cache_folder_follows_the_platform(monkeypatch, platform, variables, expected):
    for name in ("MINILLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)


def test_an_installed_package_comes_first_and_is_not_imported(links, tmp_path, monkeypatch):
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(PAYLOAD)
    monkeypatch.syspath_prepend(package.parent)
    assert resolve("tiny") == package / "tiny.gguf"
    assert "tiny_model" not in sys.modules
    assert [path.name for path in cache_folder().iterdir()] == ["tiny.verified.json"]

    (package / "tiny.gguf").write_bytes(PAYLOAD[:-1] + b"?")
    with pytest.raises(CatalogError, match=r"installed package tiny-model==1\.0 is damaged, although"):
        resolve("tiny")

    (package / "tiny.gguf").write_bytes(b"another model of another version")
    make_wheel(links, {MEMBER: PAYLOAD})
    assert resolve("tiny") == cache_folder() / "tiny.gguf"


# ---- hub ids


def test_a_hub_id_is_downloaded(here, monkeypatch):
    downloaded = []

    def download(hub_id, *, allow_patterns, ignore_patterns):
        files = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
        others = ["pytorch_model.bin", "onnx/model.onnx", "original/a.safetensors", "README.md", "x.gguf"]
        filtered = huggingface_hub.utils.filter_repo_objects(
            files + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(filtered) == files
        downloaded.append(hub_id)
        return str(here / "owner/model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("Some-Owner/a.Model_1") == here / "owner/model"
    assert downloaded == ["Some-Owner/a.Model_1"]
    assert resolve("owner/model") == Path("owner/model")  # a local folder takes precedence over the hub
    assert len(downloaded) == 1


def test_a_hub_repository_without_a_config_is_refused(here, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **kwargs: str(here / "owner/empty"))
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
def test_hub_errors_suggest_what_to_do(here, monkeypatch, kind, advice):
    class Failure(getattr(huggingface_hub.errors, kind)):
        def __init__(self):
            Exception.__init__(self, "what the hub said")

        def __str__(self):
            return "what the hub said"

    def download(*args, **kwargs):
        raise Failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CatalogError, match=rf"what the hub said\).*{advice}"):
        resolve("some/model")


def test_a_hub_id_needs_the_hub_library(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CatalogError, match=r'pip install -e ".*\[hub\]"'):
        resolve("some/model")
