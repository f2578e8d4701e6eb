"""Who may use the engine: one call at a time, one thread at a time, and no Ctrl-C in the middle of a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minillm.errors import BusyError, RequestError


class ExclusiveAccess:
    """Guards an object whose parts must change together, as scheduler, block pool and detokenizers do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock and defer Ctrl-C during the `with` block.

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


class ThreadReservation:
    """Reserves an object for one thread for as long as any of that thread's `with` blocks is open. `LLM` uses it.

    Calls of the same thread can be nested. A process created by `os.fork` after the object may not use it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread, self._num_calls = 0, 0
        self._process = os.getpid()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Reserve the object for the duration of the `with` block.

        Raises
        ------
        RequestError
            This process was created by `os.fork` after the object.
        BusyError
            Another thread has reserved the object.
        """
        if os.getpid() != self._process:
            raise RequestError(
                "this LLM was created before a fork(), and OpenMP's threads do not survive one: start processes with "
                'multiprocessing.get_context("spawn"), and create the LLM in the new process'
            )
        with self._lock:
            if self._num_calls and self._thread != threading.get_ident():
                raise BusyError(
                    "another thread's request is running; finish its loop, or close() its stream, before the next"
                )
            self._thread, self._num_calls = threading.get_ident(), self._num_calls + 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1


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
