"""The waiting queue against a sorted list."""

from hypothesis import example, given
from hypothesis import strategies as st

from minillm.engine.sequence import Sequence
from minillm.engine.waiting_queue import ADMISSIONS, WaitingQueue


@given(
    st.sampled_from(ADMISSIONS),
    st.lists(st.tuples(st.sampled_from(["push", "pop", "discard", "return"]), st.integers(0, 5), st.integers(1, 5))),
)
@example("fcfs", [("push", 0, 1)] * 30 + [("discard", n % 6, 1) for n in range(28)])
def test_a_queue_behaves_as_a_sorted_list(admission, operations):
    """The queue returns the same order and length as a list that is sorted after each operation."""
    queue, expected, ranks = WaitingQueue(admission), [], iter(range(1000))
    for number, (operation, value, size) in enumerate(operations):
        if operation == "push":
            sequence = Sequence.from_prompt(str(number), [0] * size, 1, priority=value)
            order = {"fcfs": 0, "priority": value, "shortest": size}[admission]
            expected.append(((1, order, number), sequence))
            queue.push(sequence)
        elif operation == "return":
            sequence = Sequence.from_prompt(str(number), [0] * size, 1)
            sequence.rank = (next(ranks), 0)
            expected.append(((0, *sequence.rank), sequence))
            queue.push(sequence)
        elif expected and operation == "discard":
            _, sequence = expected.pop(value % len(expected))
            queue.discard(sequence)
            queue.discard(sequence)  # has no effect: the sequence is no longer in the queue
            assert sequence not in queue
        elif expected:
            assert queue.pop() is expected.pop(0)[1]
        expected.sort(key=lambda entry: entry[0])
        order = [sequence for _, sequence in expected]
        assert queue.first(100) == order
        assert queue.first(3) == order[:3]
        assert len(queue) == len(order)
        assert len(queue._heap) <= 2 * len(order) + 9
        assert f"{len(order)} waiting" in repr(queue)
        if order:
            assert queue.peek() is order[0]


def test_a_queue_does_not_keep_thousands_of_discarded_sequences():
    queue = WaitingQueue("shortest")
    sequences = [Sequence.from_prompt(str(n), [0] * (1 + n), 1) for n in range(2000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        queue.discard(sequence)
    assert len(queue._heap) < 12
