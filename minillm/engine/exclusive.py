"""ExclusiveAccess: one call at a time, and no Ctrl-C in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minillm.errors import BusyError


class ExclusiveAccess:
    """Guards an object whose parts must change together: scheduler, allocator and answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock and defer Ctrl-C for the length of the `with` block.

        Raises
        ------
        BusyError
            Another call is under way: from another thread, or further up on this thread's stack.
        """
        with interrupts_deferred():
            if not self._lock.acquire(blocking=False):
                raise BusyError(
                    "the engine is inside another call: use it from one thread at a time, and not from inside a step"
                )
            try:
                yield
            finally:
                self._lock.release()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver Ctrl-C only after the `with` block.

    This takes effect in the main thread, which is the one that receives it, and only if Ctrl-C is handled in Python, as
    it is by default.
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
