"""Report: show the progress of a download to the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

OnBytes = Callable[[int, int], None]  # called with the bytes done and the total, which is 0 while unknown


class Report:
    """Show the progress of a download on stderr: a progress bar on a terminal, plain lines otherwise.

    To show progress elsewhere, or to hide it, pass an object with the same two methods to `resolve`.
    """

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, text: str) -> Iterator[OnBytes]:
        """Show a progress bar during the `with` block, which receives a function to call as bytes arrive."""
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
        # Imported here, because a cached model prints nothing and should not spend time on importing rich.
        from rich.console import Console

        return Console(stderr=True, force_terminal=sys.stderr.isatty())
