"""Views of a run: in a terminal, as plain lines, as an HTML page, and for trace viewers; and heat maps of attention.

Views read step records and plain numbers. They never change the engine.
"""

from minillm.view.browser import write_page
from minillm.view.console import ConsoleView
from minillm.view.heatmap import HeatMap
from minillm.view.heatpage import heat_page
from minillm.view.keyboard import Keyboard
from minillm.view.perfetto import perfetto_events, write_perfetto
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, State, Timeline, Track

__all__ = [
    "Cell",
    "ConsoleView",
    "HeatMap",
    "Keyboard",
    "State",
    "Timeline",
    "Track",
    "heat_page",
    "perfetto_events",
    "plain_line",
    "write_page",
    "write_perfetto",
]
