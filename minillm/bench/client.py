"""Worker: an engine in a process of its own, called as if it were here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minillm.errors import BenchmarkError

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 900.0  # seconds before an engine that does not answer is given up


class NotInstalled(BenchmarkError):
    """The engine's package is not installed for the Python that was to run it."""


class Worker:
    """Runs the engine that `engine_file` defines (see `worker`) until closed.

    Parameters
    ----------
    engine_file : defines a class `Engine`.
    python : the interpreter that runs it.
    environment : variables set for it, over those of this process.
    patience : seconds before an engine that does not answer is ended.

    Raises
    ------
    NotInstalled
        The engine's package cannot be imported.
    BenchmarkError
        The process does not start.
    """

    def __init__(
        self,
        engine_file: Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ):
        self._patience = patience
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._timed_out = False
        try:
            self._process = subprocess.Popen(
                [python, "-P", WORKER, engine_file],  # -P: its own folder is not a place to import from
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=os.environ | dict(environment or {}),
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._complaints.close()
            raise BenchmarkError(f"{python}: cannot be started as a Python ({error.strerror})") from error
        try:
            self._read_reply()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, **arguments: Any) -> Any:
        """What the engine's method `name` returns.

        Raises
        ------
        BenchmarkError
            It raised an exception, its process died, or it did not answer in time.
        """
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed before
            raise BenchmarkError(self._obituary()) from error
        return self._read_reply()

    @property
    def is_alive(self) -> bool:
        """Whether it can be called."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was still to be written has nobody to read it
                stream.close()
        try:
            self._process.wait(timeout=5)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _read_reply(self) -> Any:
        timer = threading.Timer(self._patience, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            message = json.loads(line)
        except ValueError as error:
            raise BenchmarkError(self._obituary()) from error
        if "missing" in message:
            raise NotInstalled(message["error"])
        if "error" in message:
            raise BenchmarkError(message["error"])
        return message["result"]

    def _give_up(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _obituary(self) -> str:
        """How the process ended, and the last thing it said."""
        if self._timed_out:
            return f"the engine did not answer within {self._patience:.0f} s and was ended"
        try:
            status = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:  # alive, and talking nonsense
            self._process.kill()
            status = self._process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines()
        return f"the engine's process ended with status {status}" + (f"; it last said: {said[-1]}" if said else "")
