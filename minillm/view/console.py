"""ConsoleView: a run in a terminal, redrawn after every step. Without a terminal it prints one plain line per step."""

from __future__ import annotations

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from minillm.trace import RunFacts, StepRecord
from minillm.view.frame import frame
from minillm.view.glyphs import ASCII, UNICODE
from minillm.view.plain import plain_header, plain_line
from minillm.view.timeline import Timeline


class ConsoleView:
    """Show a run while it takes place. A context manager: on exit it restores the terminal and prints the last frame.

    Usage: `with ConsoleView(engine.facts) as view: engine.listeners.append(view.push)`, then step the engine.

    Parameters
    ----------
    facts : RunFacts of the run.
    console : the output; None for standard output.
    hint : description of the keys, for the last line.

    Attributes
    ----------
    is_live : whether the output is a terminal that can be redrawn.
    timeline : Timeline of the steps so far.
    """

    def __init__(self, facts: RunFacts, console: Console | None = None, hint: str = "") -> None:
        self.console = console or Console(highlight=False)
        self.timeline = Timeline(facts)
        self.hint = hint
        # Not `console.is_terminal`: FORCE_COLOR also sets that, and it asks for colours, not for frames in a file.
        self.is_live = self.console.file.isatty() and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, screen=True, auto_refresh=False)
        self._drawn_size: ConsoleDimensions | None = None

    def __enter__(self) -> ConsoleView:
        if self.is_live:
            self._live.start()
        else:
            self._print(plain_header(self.timeline.facts))
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self._live.stop()
            if self.timeline.record:
                self.console.print(self.picture(hint=""))

    def push(self, record: StepRecord) -> None:
        """Show the next step."""
        self.timeline.push(record)
        if self.is_live:
            self._draw()
        else:
            self._print(plain_line(record))

    def resize(self) -> None:
        """Redraw the newest step if the terminal's size has changed."""
        if self.is_live and self.timeline.record and self.console.size != self._drawn_size:
            self._draw()

    def picture(self, hint: str = "") -> Group:
        """Return the frame of the newest step for the console's size."""
        width, height = self.console.size
        glyphs = ASCII if self.console.options.ascii_only else UNICODE
        return Group(*frame(self.timeline, width, height, glyphs, hint))

    def _draw(self) -> None:
        self._drawn_size = self.console.size
        self._live.update(self.picture(hint=self.hint), refresh=True)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
