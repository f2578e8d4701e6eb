"""What people look at: a run's records drawn in a terminal, or as plain lines. It reads records and touches nothing."""

from minillm.view.console import ConsoleView
from minillm.view.keyboard import Keyboard
from minillm.view.plain import plain_line
from minillm.view.timeline import Cell, Row, State, Timeline

__all__ = ["Cell", "ConsoleView", "Keyboard", "Row", "State", "Timeline", "plain_line"]
