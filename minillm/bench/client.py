"""Worker: an engine in its own process, called like a local object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from minillm.errors import BenchmarkError

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT = 900.0  # seconds after which an engine that does not answer is killed


class NotInstalled(BenchmarkError):
    """The engine's package is not installed in the chosen Python."""


class Worker:
    """Runs the engine of a file (see `worker`) until it is closed.

    Parameters
    ----------
    engine_file : file that defines `ENGINE`, the engine's class.
    python : the interpreter that runs it.
    environment : variables to set in addition to those of this process.
    timeout : seconds after which an engine that does not answer is killed.

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
        timeout: float = TIMEOUT,
    ):
        self._patience = timeout
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._timed_out = False
        try:
            self._process = subprocess.Popen(
                [python, "-P", WORKER, engine_file],  # -P: do not import from the worker's own folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=os.environ | dict(environment or {}),
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._stderr.close()
            raise BenchmarkError(f"{python}: cannot be started as a Python interpreter ({error.strerror})") from error
        try:
            self._read_reply()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, **arguments: Any) -> Any:
        """Call the engine's method `name` and return its result.

        Raises
        ------
        BenchmarkError
            The method raised an exception, the process died, or it did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: it was closed before
            raise BenchmarkError(self._exit_message()) from error
        return self._read_reply()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's methods can be called."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # the process may have died with input unread
                if stream is not None:
                    stream.close()
        try:
            self._process.wait(timeout=5)  # it ends when its input ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_reply(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience, self._kill)
        timer.daemon = True
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            message = json.loads(line)
        except ValueError as error:
            raise BenchmarkError(self._exit_message()) from error
        if "missing" in message:
            raise NotInstalled(message["error"])
        if "error" in message:
            raise BenchmarkError(message["error"])
        return message["result"]

    def _kill(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _exit_message(self) -> str:
        """Return how the process ended, and the last line of its stderr."""
        if self._timed_out:
            return f"the engine did not answer within {self._patience:.0f} s and was killed"
        try:
            status = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:  # alive, but its reply was not JSON
            self._process.kill()
            status = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"the engine's process ended {_describe(status)}" + (
            f"; last line of stderr: {lines[-1]}" if lines else ""
        )


def _describe(status: int) -> str:
    """Return how a process ended: with a status, or by a signal, such as SIGILL for an unsupported instruction."""
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
