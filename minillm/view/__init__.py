"""What people look at: a run's records drawn in a terminal, as plain lines, or as a file for a viewer of traces.

It reads records and touches nothing.
"""

from minillm.view.console import ConsoleView
from minillm.view.keyboard import Keyboard
from minillm.view.perfetto import perfetto_events, write_perfetto
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, Row, State, Timeline

__all__ = [
    "Cell",
    "ConsoleView",
    "Keyboard",
    "Row",
    "State",
    "Timeline",
    "perfetto_events",
    "plain_line",
    "write_perfetto",
]
