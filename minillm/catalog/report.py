"""Report: how a person hears of what takes a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all (0 while that is not known)


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
