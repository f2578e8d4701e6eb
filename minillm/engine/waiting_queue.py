"""WaitingQueue: sequences in the order in which they are to be admitted, in integers only.

A heap, so that neither a step nor an arrival costs more the more there are waiting: the next is at hand, and pushing
and popping take the logarithm of the queue's length.
"""

from __future__ import annotations

import heapq
from itertools import count

from minillm.engine.sequence import Sequence

ADMISSIONS = ("fcfs", "priority", "shortest")

Key = tuple[int, ...]


class WaitingQueue:
    """Sequences, next first: those that were preempted, in the order they were first admitted; then new ones.

    Parameters
    ----------
    admission : among new ones, "fcfs" takes the first come; "priority" the smallest `priority`, "shortest" the shortest
        prompt, and among equals the first come. The last two can keep a sequence waiting for as long as better ones
        keep coming.
    """

    def __init__(self, admission: str = "fcfs"):
        if admission not in ADMISSIONS:
            raise ValueError(f"admission is {admission!r}; it can be {', '.join(ADMISSIONS)}")
        self.admission = admission
        self._heap: list[tuple[Key, Sequence]] = []
        self._keys: dict[Sequence, Key] = {}  # of those that wait; the heap may still hold some that left
        self._arrivals = count()

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait its turn."""
        key = self._key(sequence)
        self._keys[sequence] = key
        heapq.heappush(self._heap, (key, sequence))

    def peek(self) -> Sequence:
        """The next one. IndexError if nobody waits."""
        while self._has_left(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Sequence:
        """Take the next one out. IndexError if nobody waits."""
        sequence = self.peek()
        heapq.heappop(self._heap)
        del self._keys[sequence]
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Let `sequence` leave, wherever in the queue it stands, if it does."""
        if self._keys.pop(sequence, None) is not None and len(self._heap) > 2 * len(self._keys) + 8:
            # Whoever left is only skipped when reached. Before most of the heap is such, it is built anew.
            self._heap = [entry for entry in self._heap if not self._has_left(entry)]
            heapq.heapify(self._heap)

    def first(self, number: int) -> list[Sequence]:
        """The next `number` of them, or all if fewer wait, next first. Costs nothing for those behind."""
        found: list[Sequence] = []
        frontier = [(self._heap[0], 0)] if self._heap else []  # in a heap, a node's two children come after it
        while frontier and len(found) < number:
            entry, node = heapq.heappop(frontier)
            if not self._has_left(entry):
                found.append(entry[1])
            for child in (2 * node + 1, 2 * node + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
        return found

    def _key(self, sequence: Sequence) -> Key:
        if sequence.rank is not None:
            return (0, *sequence.rank)
        order = {"fcfs": 0, "priority": sequence.priority, "shortest": sequence.num_prompt_tokens}[self.admission]
        return (1, order, next(self._arrivals))

    def _has_left(self, entry: tuple[Key, Sequence]) -> bool:
        key, sequence = entry
        return self._keys.get(sequence) is not key

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self):
        return f"WaitingQueue({len(self)} waiting, {self.admission}: {' '.join(s.name for s in self.first(8))})"
