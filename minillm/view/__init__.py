"""What people look at: a run in a terminal, as plain lines, as a page or for a viewer of traces; a head's attention.

It reads records and plain numbers, and touches nothing.
"""

from minillm.view.browser import write_page
from minillm.view.console import ConsoleView
from minillm.view.heatmap import HeatMap
from minillm.view.heatpage import heat_page
from minillm.view.keyboard import Keyboard
from minillm.view.perfetto import perfetto_events, write_perfetto
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, Row, State, Timeline

__all__ = [
    "Cell",
    "ConsoleView",
    "HeatMap",
    "Keyboard",
    "Row",
    "State",
    "Timeline",
    "heat_page",
    "perfetto_events",
    "plain_line",
    "write_page",
    "write_perfetto",
]
