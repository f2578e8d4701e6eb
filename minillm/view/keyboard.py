"""Keyboard: read single keys from a terminal, and restore the terminal afterwards."""

from __future__ import annotations

import os
import select
import sys
from types import ModuleType
from typing import TextIO

termios: ModuleType | None
tty: ModuleType | None
try:
    import termios
    import tty
except ImportError:  # not a POSIX system
    termios = tty = None


class Keyboard:
    """Read single keys without echo. A context manager: on exit it restores the terminal's settings.

    Ctrl-C still interrupts the program.

    Parameters
    ----------
    file : the terminal; None for standard input.

    Raises
    ------
    ValueError
        The file is not a POSIX terminal.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        file = sys.stdin if file is None else file
        if termios is None or tty is None or file is None or not file.isatty():
            raise ValueError("single keys can be read only from a POSIX terminal, and standard input is not one")
        self._termios, self._tty = termios, tty
        self._descriptor = file.fileno()

    def __enter__(self) -> Keyboard:
        self._settings = self._termios.tcgetattr(self._descriptor)
        self._tty.setcbreak(self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        # TCSAFLUSH discards keys that were pressed but not read, so that the shell does not receive them.
        self._termios.tcsetattr(self._descriptor, self._termios.TCSAFLUSH, self._settings)

    def read(self, timeout: float | None = None) -> str | None:
        """Return the next key as one character.

        Returns None if no key was pressed within `timeout` seconds, and "" if the terminal has been closed.
        """
        # Set the mode before each read: a shell may have changed it while the program was stopped with Ctrl-Z.
        self._tty.setcbreak(self._descriptor, self._termios.TCSANOW)
        ready, _, _ = select.select([self._descriptor], [], [], timeout)
        if not ready:
            return None
        try:
            return os.read(self._descriptor, 1).decode("latin-1")
        except OSError:  # the other end closed it
            return ""
