"""What people look at: a run's records drawn in a terminal, as plain lines, or as a page for the browser.

It reads records and touches nothing.
"""

from minillm.view.browser import write_page
from minillm.view.console import ConsoleView
from minillm.view.keyboard import Keyboard
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, Row, State, Timeline

__all__ = ["Cell", "ConsoleView", "Keyboard", "Row", "State", "Timeline", "plain_line", "write_page"]
