"""Keyboard: single keys from a terminal, which is left as it was found."""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO

try:
    import termios
    import tty
except ImportError:  # a system whose terminals work otherwise
    termios = tty = None


class Keyboard:
    """Reads keys as they are pressed, unseen. A context manager: at its end the terminal is what it was before.

    Ctrl-C stays what it is, an interrupt.

    Parameters
    ----------
    file : the terminal; None for standard input.

    Raises
    ------
    ValueError
        It is no terminal, or of a kind whose keys cannot be read one by one.
    """

    def __init__(self, file: TextIO | None = None):
        file = sys.stdin if file is None else file
        if termios is None or file is None or not file.isatty():
            raise ValueError("keys are read one by one from a POSIX terminal, which standard input is not here")
        self._descriptor = file.fileno()

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(self, *_) -> None:
        # TCSAFLUSH: keys that nobody has read are not left for the shell.
        termios.tcsetattr(self._descriptor, termios.TCSAFLUSH, self._before)

    def read(self, timeout: float | None = None) -> str | None:
        """The next key, as one character; None if none came within `timeout` seconds; "" if the terminal is gone."""
        tty.setcbreak(self._descriptor, termios.TCSANOW)  # again, for a job that was stopped in between and goes on
        ready, _, _ = select.select([self._descriptor], [], [], timeout)
        if not ready:
            return None
        try:
            return os.read(self._descriptor, 1).decode("latin-1")
        except OSError:  # it was closed from the other side
            return ""
