"""WaitingQueue: waiting sequences in the order of admission. Integers only.

The queue is a heap. The next sequence is found in constant time; a push or a pop takes time logarithmic in the queue's
length, so a long queue slows down neither steps nor arrivals noticeably.
"""

from __future__ import annotations

import heapq
from itertools import count

from minillm.engine.sequence import Sequence

ADMISSIONS = ("fcfs", "priority", "shortest")

Key = tuple[int, ...]


class WaitingQueue:
    """Waiting sequences, next first: preempted ones in the order of their first admission, then new ones.

    Parameters
    ----------
    admission : order of the new sequences. "fcfs" takes the first to arrive; "priority" the smallest `priority`;
        "shortest" the shortest prompt. Ties are broken by arrival. Under the last two, a sequence waits for as long as
        sequences that precede it in this order keep arriving.

    Raises
    ------
    ValueError
        `admission` is not one of ADMISSIONS.
    """

    def __init__(self, admission: str = "fcfs"):
        if admission not in ADMISSIONS:
            raise ValueError(f"admission is {admission!r}; it can be {', '.join(ADMISSIONS)}")
        self.admission = admission
        self._heap: list[tuple[Key, Sequence]] = []
        self._keys: dict[Sequence, Key] = {}  # of the waiting sequences; the heap can also contain removed ones
        self._arrivals = count()

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        key = self._key(sequence)
        self._keys[sequence] = key
        heapq.heappush(self._heap, (key, sequence))

    def peek(self) -> Sequence:
        """Return the next sequence. Raises IndexError if the queue is empty."""
        while self._is_removed(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Sequence:
        """Remove and return the next sequence. Raises IndexError if the queue is empty."""
        sequence = self.peek()
        heapq.heappop(self._heap)
        del self._keys[sequence]
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence from anywhere in the queue. Do nothing if the queue does not contain it."""
        if self._keys.pop(sequence, None) is not None and len(self._heap) > 2 * len(self._keys) + 8:
            # A removed entry is skipped when it is reached. Once most entries are removed ones, the heap is rebuilt.
            self._heap = [entry for entry in self._heap if not self._is_removed(entry)]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Remove all sequences."""
        self._heap, self._keys = [], {}

    def first(self, number: int) -> list[Sequence]:
        """Return the next `number` sequences, or all if there are fewer, in time independent of the queue."""
        found: list[Sequence] = []
        frontier = [(self._heap[0], 0)] if self._heap else []  # in a heap, the two children of an entry come after it
        while frontier and len(found) < number:
            entry, index = heapq.heappop(frontier)
            if not self._is_removed(entry):
                found.append(entry[1])
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
        return found

    def _key(self, sequence: Sequence) -> Key:
        if sequence.rank is not None:
            return (0, *sequence.rank)
        order = {"fcfs": 0, "priority": sequence.priority, "shortest": sequence.num_prompt_tokens}[self.admission]
        return (1, order, next(self._arrivals))

    def _is_removed(self, entry: tuple[Key, Sequence]) -> bool:
        key, sequence = entry
        return self._keys.get(sequence) is not key

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"WaitingQueue({len(self)} waiting, {self.admission}: {' '.join(s.name for s in self.first(8))})"
