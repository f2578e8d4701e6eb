"""Failures in a step: of one request, of the whole step or of a listener, and Ctrl-C."""

import signal
import sys

import numpy as np
import pytest
from support.engine_cases import PARAMS, RecordedAnswers, finish_all

from minillm import Engine, EngineConfig, NumericError, RequestError, SamplingParams
from minillm.engine import stream_seed
from minillm.engine.sampling import sample


@pytest.mark.parametrize("failing_call", ["sample", "push"])
def test_a_failure_of_one_request_ends_only_that_request(models, monkeypatch, failing_call):
    """Sampling or detokenizing fails for the third token of the second completion."""
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    bad = SamplingParams(max_tokens=12, temperature=1, seed=77, n=2, ignore_eos=True)
    for request_id, params in (("good", PARAMS), ("bad", bad), ("other", PARAMS)):
        engine.add_request([3, 4, 5], params, request_id=request_id)
    detokenizers = engine._requests["bad"].detokenizers

    def failing_sample(logits, params, seed, index, context):
        if params is bad and seed == stream_seed(77, 1) and index == 2:
            raise ZeroDivisionError("a logits processor's mistake")
        return sample(logits, params, seed, index, context)

    push, tokens = detokenizers[1].push, iter(range(99))

    def failing_push(token_id):
        if next(tokens) == 2:
            raise ZeroDivisionError("a logits processor's mistake")
        return push(token_id)

    if failing_call == "sample":
        monkeypatch.setattr("minillm.engine.engine.sample", failing_sample)
    else:
        detokenizers[1].push = failing_push
    answers = finish_all(engine)
    for request_id in ("good", "other"):
        assert answers.of(request_id, 0) == model.expected_answer([3, 4, 5], PARAMS)
    for completion in (0, 1):
        assert answers.reasons["bad", completion] == "error"
        assert isinstance(answers.exceptions["bad", completion], ZeroDivisionError)
    assert len(answers.tokens["bad", 1]) == 2
    assert engine.scheduler.blocks.num_held == 0


def test_a_token_without_text_ends_only_its_request(models, monkeypatch):
    """The text of the third token fails, after the detokenizer has received the token."""
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    engine.add_request([3, 4, 5], PARAMS, request_id="bad")
    token_text, calls = engine.tokenizer.token_text, iter(range(99))

    def failing_token_text(token_id):
        if next(calls) == 2:
            raise ZeroDivisionError("a tokenizer's mistake")
        return token_text(token_id)

    monkeypatch.setattr(engine.tokenizer, "token_text", failing_token_text)
    answers = finish_all(engine)
    assert answers.reasons["bad", 0] == "error"
    assert isinstance(answers.exceptions["bad", 0], ZeroDivisionError)
    assert answers.tokens["bad", 0] == model.expected_answer([3, 4, 5], PARAMS)[0][:2]
    assert engine.scheduler.blocks.num_held == 0
    engine.add_request([3, 4, 5], PARAMS, request_id="good")
    assert finish_all(engine).of("good", 0) == model.expected_answer([3, 4, 5], PARAMS)


@pytest.mark.parametrize("context_length", [0, -1, 10**6, 1.5])
def test_a_context_that_the_model_does_not_have_is_refused(models, context_length):
    engine = models[0].engine(EngineConfig(num_blocks=4, block_size=4))
    with pytest.raises(RequestError, match=f"context_length is {context_length}"):
        Engine(engine.transformer, engine.kv_cache, engine.scheduler, context_length=context_length)


def test_logits_that_are_not_finite_end_only_their_request(models, monkeypatch):
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    engine.add_request([3], PARAMS, request_id="good")
    engine.add_request([4], PARAMS, request_id="bad")
    forward = model.transformer.forward

    def forward_with_nan(batch, cache, **options):
        logits = forward(batch, cache)
        logits[batch.token_ids[batch.query_starts[1:] - 1] == 4] = np.nan
        return logits

    monkeypatch.setattr(model.transformer, "forward", forward_with_nan)
    answers = finish_all(engine)
    assert isinstance(answers.exceptions["bad", 0], NumericError)
    monkeypatch.undo()
    assert answers.of("good", 0) == model.expected_answer([3], PARAMS)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failed_step_can_be_repeated(models, monkeypatch, error):
    """The step fails after part of it was computed, and before or after shared blocks were copied."""
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    requests = {"a": PARAMS, "b": SamplingParams(max_tokens=9, temperature=1, seed=2, n=3, logprobs=True)}
    for request_id, params in requests.items():
        engine.add_request([3, 4, 5], params, request_id=request_id)
    forward, copy_block, answers = model.transformer.forward, engine.kv_cache.copy_block, RecordedAnswers()
    engine.listeners.append(answers.push)

    def failing_forward(batch, cache, **options):
        forward(batch, cache)
        cache.keys[batch.slots // 4, ..., batch.slots % 4] = 1e9
        raise error

    def failing_copy(source, target):
        monkeypatch.setattr(engine.kv_cache, "copy_block", copy_block)
        raise error

    monkeypatch.setattr(engine.kv_cache, "copy_block", failing_copy)
    num_calls = num_failures = 0
    while engine.has_unfinished:
        monkeypatch.setattr(model.transformer, "forward", failing_forward if num_calls % 3 == 2 else forward)
        try:
            engine.step()
        except error:
            num_failures += 1
        num_calls += 1
    for request_id, params in requests.items():
        for completion in range(params.n):
            assert answers.of(request_id, completion) == model.expected_answer([3, 4, 5], params, completion)
    assert num_failures > 3
    assert engine.scheduler.blocks.num_held == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator closed by the collector
def test_ctrl_c_anywhere_in_a_step_keeps_the_answer(models):
    """A step that Ctrl-C interrupts is undone or completed, so the next steps give the same bits."""
    params, prompt = SamplingParams(max_tokens=6, temperature=0, seed=0, logprobs=True, ignore_eos=True), [3, 4, 5]
    expected = models[0].expected_answer(prompt, params)
    for press_at in range(0, 2000, 37):  # the number of calls and returns before Ctrl-C is pressed; 0 for never
        engine, records, calls_left = models[0].engine(EngineConfig(num_blocks=4, block_size=4)), [], [press_at]
        engine.listeners.append(records.append)

        def press(frame, event, argument, calls_left=calls_left):
            calls_left[0] -= 1
            if calls_left[0] == 0:
                signal.raise_signal(signal.SIGINT)

        engine.add_request(prompt, params, request_id="0")
        num_interrupts = 0
        while engine.has_unfinished:
            try:
                sys.setprofile(press)
                engine.step()
                sys.setprofile(None)  # the last call that `press` counts; a press here is caught too
            except (KeyboardInterrupt, SystemError):  # Numba raises the latter if a profile function raises
                num_interrupts += 1
            finally:
                sys.setprofile(None)
        assert num_interrupts == (calls_left[0] <= 0 < press_at)
        engine.step()  # delivers the record whose delivery was interrupted
        answers = RecordedAnswers()
        for record in records:
            answers.push(record)
        assert answers.of("0", 0) == expected
        assert engine.scheduler.blocks.num_held == 0


def test_a_listener_that_raises_does_not_keep_the_record_from_others(models):
    engine, records = models[0].engine(EngineConfig(num_blocks=8, block_size=4)), []

    def refuse(record):
        raise OSError("the disk is full")

    engine.listeners += [refuse, records.append]
    engine.add_request([3], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    while engine.has_unfinished:
        with pytest.raises(OSError, match="the disk is full"):
            engine.step()
    assert [record.step for record in records] == [0, 1]
    assert len(records[-1].finished) == 1


def test_a_listener_that_starts_the_next_step_does_not_change_what_step_returns(models):
    engine, records = models[0].engine(EngineConfig(num_blocks=40, block_size=4)), []

    def listener(record):
        records.append(record)
        if len(records) == 1:
            assert engine.step().step == 1

    engine.listeners.append(listener)
    engine.add_request([3, 4, 5], PARAMS)
    assert engine.step().step == 0
    assert [record.step for record in records] == [0, 1]
