"""LLM.stream: deltas, several streams at once, closed streams, and calls from several threads."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from support.llm_cases import answer_of, sampling_params, token_ids

from minillm import SamplingParams


@settings(max_examples=30)
@given(prompt=token_ids, params=sampling_params)
def test_the_deltas_of_a_stream_are_the_answer_in_pieces(llm, prompt, params):
    deltas = list(llm.stream(prompt, params))
    output = llm.generate([prompt], params)[0]
    assert "".join(delta.text for delta in deltas) == output.text
    assert [delta.token_id for delta in deltas] == output.token_ids
    assert [delta.logprob for delta in deltas] == output.logprobs
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == output.finish_reason
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_each_delta_keeps_its_own_metrics(llm):
    deltas = list(llm.stream("hello", SamplingParams(max_tokens=5, ignore_eos=True)))
    assert [delta.metrics.num_generated_tokens for delta in deltas] == [1, 2, 3, 4, 5]


def test_a_stream_ends_when_its_request_is_aborted(llm):
    stream = llm.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True, n=2))
    next(stream)
    (request_id,) = {sequence.request_id for sequence in llm.engine.scheduler.running}
    llm.engine.abort(request_id)
    deltas = list(stream)
    assert len(deltas) < 5
    assert [(delta.completion, delta.token_id, delta.text, delta.finish_reason) for delta in deltas[-2:]] == [
        (0, None, "", "abort"),
        (1, None, "", "abort"),
    ]
    assert llm.engine.scheduler.blocks.num_held == 0


def test_a_stream_gets_the_tokens_of_steps_run_outside_it(llm):
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    first = next(stream)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [first.token_id, *(delta.token_id for delta in stream)] == llm.generate([[1, 2]], params)[0].token_ids


def test_streams_share_the_engine(llm):
    """Reading one stream advances all of them, and the others keep their deltas until they are read."""
    params = SamplingParams(max_tokens=12, temperature=1, seed=5, logprobs=True, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 9, [5]]
    expected = [answer_of(llm.generate([prompt], params)[0]) for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    received = [[next(stream)] for stream in streams]
    between = answer_of(llm.generate([prompts[1]], params)[0])
    llm.logits([1, 2])
    for stream, deltas in reversed(list(zip(streams, received, strict=True))):
        deltas += stream
    for deltas, (answer, logprobs, text, finish_reason) in zip(received, expected, strict=True):
        assert [delta.token_id for delta in deltas] == answer
        assert [delta.logprob for delta in deltas] == logprobs
        assert "".join(delta.text for delta in deltas) == text
        assert deltas[-1].finish_reason == finish_reason
    assert between == expected[1]


def test_closing_or_dropping_a_stream_frees_its_blocks_at_once(llm):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream = llm.stream([1, 2, 3], params)
        next(stream)
        assert llm.engine.scheduler.blocks.num_held == 1
        leave(stream)
        del stream
        gc.collect()
        assert llm.engine.scheduler.blocks.num_held == 0
        assert not llm.engine.has_unfinished
    unread = llm.stream([1, 2, 3], params)
    assert not llm.engine.has_unfinished
    del unread


def test_a_stream_closed_during_a_step_ends_before_the_next_step(llm):
    """The garbage collector may close a stream at any time."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    forward = llm.transformer.forward

    def forward_and_close(*args, **kwargs):
        stream.close()
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.transformer, "forward", forward_and_close)
        other = llm.stream([4], params)
        next(other)
    assert llm.engine.has_unfinished
    assert len(list(other)) == 2
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.blocks.num_held == 0


def test_calls_of_several_threads_are_served_in_the_same_batches(llm):
    params = SamplingParams(max_tokens=8, temperature=1, seed=3, ignore_eos=True)
    prompts = [[n, n + 1, n + 2] for n in range(4)]
    expected = [answer_of(llm.generate([prompt], params)[0]) for prompt in prompts]
    answers, batch_sizes = [[] for _ in prompts], []
    llm.engine.listeners.append(lambda record: batch_sizes.append(len(record.chunks)))

    def generate(n):
        for _ in range(10):
            answers[n].append(answer_of(llm.generate([prompts[n]], params)[0]))

    def stream(n):
        for _ in range(10):
            deltas = list(llm.stream(prompts[n], params))
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            text = "".join(delta.text for delta in deltas)
            logprobs = [delta.logprob for delta in deltas] if params.logprobs else None
            answers[n].append(([delta.token_id for delta in deltas], logprobs, text, deltas[-1].finish_reason))

    threads = [threading.Thread(target=stream if n % 2 else generate, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.engine.listeners.pop()
    assert answers == [[answer] * 10 for answer in expected]
    assert max(batch_sizes) > 1
    assert not llm.engine.has_unfinished


def test_coroutines_can_generate_at_once(llm):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[n, n + 1, n + 2] for n in range(4)]

    async def generate_all():
        return await asyncio.gather(*(asyncio.to_thread(llm.generate, prompt, params) for prompt in prompts))

    with ThreadPoolExecutor(1) as executor:  # in a thread without an event loop, which another test may have left here
        outputs = [output for (output,) in executor.submit(asyncio.run, generate_all()).result()]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in llm.generate(prompts, params)]
