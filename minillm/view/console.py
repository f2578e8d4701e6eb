"""ConsoleView: a run in a terminal, redrawn with every step; or plain lines where no terminal is."""

from __future__ import annotations

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from minillm.trace import RunFacts, StepRecord
from minillm.view.frame import frame
from minillm.view.look import ASCII, UNICODE
from minillm.view.plain import plain_header, plain_line
from minillm.view.timeline import Timeline


class ConsoleView:
    """Shows a run while it goes on. A context manager: at its end the last picture stays, and the terminal is itself.

    Use: `with ConsoleView(engine.facts) as view: engine.listeners.append(view.push)`, and step the engine.

    Parameters
    ----------
    facts : RunFacts of the run.
    console : where to; None for standard output.
    hint : what keys do, shown in the last line.

    Attributes
    ----------
    is_live : whether there is a terminal to draw in.
    timeline : Timeline of what was shown.
    """

    def __init__(self, facts: RunFacts, console: Console | None = None, hint: str = ""):
        self.console = console or Console(highlight=False)
        self.timeline = Timeline(facts)
        self.hint = hint
        # Not `console.is_terminal`: FORCE_COLOR, which sets that, wants colours, not moving pictures in a file.
        self.is_live = self.console.file.isatty() and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, screen=True, auto_refresh=False)
        self._drawn_size: ConsoleDimensions | None = None

    def __enter__(self) -> ConsoleView:
        if self.is_live:
            self._live.start()
        else:
            self._print(plain_header(self.timeline.facts))
        return self

    def __exit__(self, *_) -> None:
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
        """Draw the newest step again, if the terminal has another size than before."""
        if self.is_live and self.timeline.record and self.console.size != self._drawn_size:
            self._draw()

    def picture(self, hint: str = "") -> Group:
        """The newest step and those before it, for the console's size."""
        width, height = self.console.size
        look = ASCII if self.console.options.ascii_only else UNICODE
        return Group(*frame(self.timeline, width, height, look, hint))

    def _draw(self) -> None:
        self._drawn_size = self.console.size
        self._live.update(self.picture(hint=self.hint), refresh=True)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
