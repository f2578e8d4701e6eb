"""ExclusiveAccess: one call at a time changes the engine, and what an interrupted call left is repaired.

An exception can arrive anywhere: Ctrl-C, a timeout raised by a signal handler, a MemoryError, or an exception of a
trace or profile function. It can even arrive where a `finally` block or a lock is about to clean up. What must be
cleaned up is therefore cleaned up twice here, in nested blocks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from minillm.errors import BusyError, RequestError


class Mark:
    """Whether a `with` block of `set` is under way."""

    is_set = False

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set the mark during the `with` block."""
        try:
            try:
                self.is_set = True
                yield
            finally:
                self.is_set = False
        finally:
            self.is_set = False


class Turn:
    """A lock for one thread at a time, which may take it again in a nested block."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None  # the thread whose turn it is

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep other threads out of the `with` block; wait for them to leave it first."""
        is_nested = self._thread == threading.get_ident()
        try:
            with self._lock:
                try:
                    self._thread = threading.get_ident()
                    yield
                finally:
                    if not is_nested:
                        self._thread = None
        finally:
            if not is_nested:
                with suppress(RuntimeError):  # raised if the lock has been released already, as it should have been
                    self._lock.release()


class ExclusiveAccess:
    """Guards an object whose parts must change together, as scheduler, block pool and detokenizers do.

    An exception in the middle of a change leaves the object inconsistent. It is repaired before the exception leaves
    the call or, if the repair is interrupted too, before the next change.

    Parameters
    ----------
    repair : returns the object to a consistent state, however much of a change has happened. It can be repeated.
    """

    def __init__(self, repair: Callable[[], None]) -> None:
        self._repair = repair
        self._turn = Turn()
        self._change = Mark()
        self._is_consistent = True
        self._process = os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other thread use the object during the `with` block. Blocks of the same thread can be nested.

        Raises
        ------
        RequestError
            This process was created by `os.fork` after the object.
        """
        if os.getpid() != self._process:
            raise RequestError(
                "this engine was created before a fork(), and OpenMP's threads do not survive one: start processes "
                'with multiprocessing.get_context("spawn"), and create the LLM or the engine in the new process'
            )
        with self._turn.taken():
            yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change the object during the `with` block.

        Raises
        ------
        BusyError
            A change is under way further up on this thread's stack.
        RequestError
            See `turn`.
        """
        with self.turn():
            if self._change.is_set:  # by this thread, because it is this thread's turn
                raise BusyError("the engine is inside another call: do not use it from inside a step")
            with self._change.set():
                if not self._is_consistent:
                    self._repair()
                self._is_consistent = False
                try:
                    yield
                except BaseException:
                    self._repair()
                    self._is_consistent = True
                    raise
                self._is_consistent = True
