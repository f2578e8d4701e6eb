"""What people look at: a run's records, or a head's attention, drawn in a terminal, as plain lines or as a page.

It reads records and plain numbers, and touches nothing.
"""

from minillm.view.console import ConsoleView
from minillm.view.heatmap import HeatMap
from minillm.view.heatpage import heat_page
from minillm.view.keyboard import Keyboard
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, Row, State, Timeline

__all__ = ["Cell", "ConsoleView", "HeatMap", "Keyboard", "Row", "State", "Timeline", "heat_page", "plain_line"]
