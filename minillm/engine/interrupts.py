"""Ctrl-C comes at any moment, and a step is not to be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the `with` block is over: scheduler, allocator and answers change together or not at all.

    Where Ctrl-C is handled in Python, as it is unless somebody changed that, and in the main thread, which gets it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *event: pressed.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])
