"""Deliveries: hands the record of each step to the engine's listeners, in the order of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minillm.engine.exclusive import Mark
from minillm.trace.records import StepRecord


@dataclass
class Delivery:
    """A record, and the listeners that are still to be called with it."""

    record: StepRecord
    listeners: list[Callable[[StepRecord], None]]


class Deliveries:
    """The records that listeners have not received yet.

    Attributes
    ----------
    due : the deliveries, oldest first.
    """

    def __init__(self) -> None:
        self.due: list[Delivery] = []
        self._under_way = Mark()

    def deliver(self) -> None:
        """Call every listener with every record that is due; then raise the first of their exceptions.

        If a listener runs a step, the record of that step follows when the listener returns. A listener that was
        interrupted by KeyboardInterrupt, or by another exception that is no Exception, gets its record again.
        """
        if self._under_way.is_set:
            return
        failures: list[Exception] = []
        with self._under_way.set():
            while self.due:
                listeners = self.due[0].listeners
                while listeners:
                    try:
                        listeners[0](self.due[0].record)
                    except Exception as error:
                        failures.append(error)
                    del listeners[0]
                del self.due[0]
        if failures:
            raise failures[0]
