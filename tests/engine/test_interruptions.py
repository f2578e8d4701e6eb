"""Exceptions that arrive at any line of the engine: afterwards every answer is right, or its request failed by name."""

import os
import sys
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.builders import random_llama, write_gguf
from support.engine_cases import RecordedAnswers

import minillm
from minillm import LLM, EngineConfig, RequestError, SamplingParams

PACKAGE = Path(minillm.__file__).parent
TRACED = [str(PACKAGE / name) for name in ("engine", "llm.py", "outputs.py")]
EVERY_VISIT = "MINILLM_EVERY_LINE" in os.environ  # interrupt each visit of each line, instead of one visit of each


class Interruption(BaseException):
    """What the tests raise. Nothing in the package catches it by name."""


class Interrupter:
    """Raises Interruption at one visit of one line in the traced files, or counts all visits.

    Parameters
    ----------
    at : the file, line and number of the visit; None to count.
    exception : raised instead of Interruption.
    """

    def __init__(self, at=None, exception=Interruption):
        self.at, self.exception, self.has_raised = at, exception, False
        self.visits = {}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        if event == "call":
            return self.trace if frame.f_code.co_filename.startswith(tuple(TRACED)) else None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            visit = self.visits[line] = self.visits.get(line, 0) + 1
            if self.at == (*line, visit):
                self.has_raised = True
                raise self.exception
        return self.trace

    def places(self):
        """Return the places at which to raise: a visit of each line, in turn the first and the last, or every visit."""
        for index, (line, number) in enumerate(self.visits.items()):
            for visit in range(1, number + 1) if EVERY_VISIT else [number if index % 2 else 1]:
                yield (*line, visit)


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", random_llama(vocab_size=262), "Q8_0")
    return LLM(path, engine=EngineConfig(block_size=4))


def attempt(call, is_done):
    """Call, and call again if the first call was interrupted before it took effect."""
    try:
        return call()
    except Interruption:
        return None if is_done() else call()


PROMPT = [3, 4, 5, 6, 7, 8]
REQUESTS = {  # the second shares its prompt with the first, and forks in the middle of a block
    "a": SamplingParams(max_tokens=9, temperature=1, seed=1, logprobs=True, ignore_eos=True),
    "b": SamplingParams(max_tokens=7, temperature=1, seed=2, logprobs=True, ignore_eos=True, n=2),
    "c": SamplingParams(max_tokens=9, temperature=1, seed=3, logprobs=True, ignore_eos=True),
}


def serve(engine, interrupter):
    """Serve REQUESTS and repeat what was interrupted; return the recorded answers. One request is aborted midway."""
    answers = RecordedAnswers()
    engine.listeners.append(answers.push)
    with interrupter:
        for request_id, params in (REQUESTS | {"aborted": REQUESTS["a"]}).items():
            attempt(
                partial(engine.add_request, PROMPT, params, request_id=request_id),
                partial(engine.scheduler.is_unfinished, request_id),
            )
        for number in count():
            attempt(engine.step, lambda: True)
            if number == 3:
                attempt(partial(engine.abort, "aborted"), lambda: not engine.scheduler.is_unfinished("aborted"))
            if not attempt(partial(getattr, engine, "has_unfinished"), lambda: False):
                break
        attempt(engine.step, lambda: True)
    engine.step()  # delivers what an interruption may have left
    return answers


def check_blocks(engine):
    blocks = engine.scheduler.blocks
    assert blocks.num_held == 0
    assert blocks.references == [0] * blocks.num_blocks
    assert sorted([*blocks._free, *blocks.cached]) == list(range(blocks.num_blocks))
    assert not engine._requests


def test_an_exception_at_any_line_of_a_step_leaves_every_answer_right(models):
    """The pool is small, so that sequences are preempted, share blocks, copy them and evict cached ones."""
    model, config = models[0], EngineConfig(num_blocks=14, block_size=4, max_batch_tokens=8, max_sequences=4)
    expected = {
        (request_id, completion): model.expected_answer(PROMPT, params, completion)
        for request_id, params in REQUESTS.items()
        for completion in range(params.n)
    }
    counting = Interrupter()
    serve(model.engine(config), counting)
    places = list(counting.places())
    assert len(places) > 300
    num_raised = 0
    for place in places:
        engine, interrupter = model.engine(config), Interrupter(place)
        answers = serve(engine, interrupter)
        num_raised += interrupter.has_raised
        for (request_id, completion), answer in expected.items():
            assert answers.of(request_id, completion) == answer, place
        assert answers.reasons["aborted", 0] == "abort", place
        check_blocks(engine)
    assert num_raised == len(places)


class Timeout(Exception):
    """An exception that callers of the package may catch with others, such as a task queue's soft limit."""


@pytest.mark.parametrize("exception", [Interruption, Timeout])
def test_an_exception_at_any_line_of_generate_leaves_no_request_behind(tiny_llm, exception):
    """Afterwards, a stream that was open before gives the right answer or fails by name, and so do new requests."""
    llm, params = tiny_llm, SamplingParams(max_tokens=4, temperature=1, seed=1, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate([[1, 2], [3], [5]], params)]

    def generate(interrupter):
        llm.reset_prefix_cache()
        stream = llm.stream([5], params)
        received = [next(stream)]
        with suppress(exception), interrupter:
            assert [output.token_ids for output in llm.generate([[1, 2], [3]], params)] == expected[:2]
        return stream, received

    counting = Interrupter()
    stream, _ = generate(counting)
    stream.close()
    num_failures = 0
    places = list(counting.places())
    for place in places:
        stream, received = generate(Interrupter(place, exception))
        error = None
        try:
            received += stream
        except (RequestError, Timeout) as raised:
            error = raised
        if error is None:
            assert [delta.token_id for delta in received] == expected[2], place
        else:  # it lost tokens, or the exception came while one of its tokens was sampled
            assert isinstance(error, exception) or "an exception interrupted the engine" in str(error)
            num_failures += 1
        assert [output.token_ids for output in llm.generate([[1, 2], [3]], params)] == expected[:2], place
        assert not llm.engine.has_unfinished, place
        assert not llm._outputs._streams, place
        check_blocks(llm.engine)
    assert num_failures < len(places) / 5
