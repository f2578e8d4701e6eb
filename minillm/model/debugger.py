"""Detect an attached debugger, so that the forward pass can run in a form that a debugger can step through."""

from __future__ import annotations

import sys


def debugger_attached() -> bool:
    """Return whether a debugger is attached: to this thread (`sys.settrace`), or to the interpreter (`sys.monitoring`).

    Tools that use `sys.settrace` for something else, such as coverage, count as well.
    """
    if sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
