"""Requests that the engine accepts or refuses, the events it records, and calls that it refuses."""

import threading

import pytest
from support.engine_cases import PARAMS, RecordedAnswers, finish_all

from minillm import BusyError, Engine, EngineConfig, RequestError, SamplingParams
from minillm.engine import stream_seed
from minillm.engine.recording import MAX_PENDING_EVENTS
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache


def test_requests_that_cannot_be_served_are_refused_on_arrival(models):
    engine = models[0].engine(EngineConfig(num_blocks=4, block_size=4, max_sequences=2))
    engine.add_request([3], PARAMS, request_id="first")
    for prompt, params, options, message in (
        ([], PARAMS, {}, "the prompt is empty"),
        ([999], PARAMS, {}, "prompt token 0 is 999; it must be a whole number, from 0 to 261"),
        ("text", PARAMS, {}, "a prompt is text or a list of token ids, not str"),
        ([3] * 60, PARAMS, {}, "prompt of 60 tokens and max_tokens of 12 need a context of 72 tokens, but it has 64"),
        ([3] * 20, PARAMS, {}, "fill 31 positions, which takes 8 blocks of 4, but the pool has 4"),
        ([3], PARAMS, {"request_id": "first"}, "request 'first' is still unfinished"),
        ([3], PARAMS, {"priority": 0.5}, "priority is 0.5"),
        ([3], SamplingParams(max_tokens=2, n=3), {}, "3 completions needs them to run at once, but max_sequences is 2"),
        ([3], SamplingParams(max_tokens=2, stop_token_ids=[262]), {}, "stop_token_ids is 262"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, params, **options)
    for n in (0, 1.5, "2"):
        with pytest.raises(RequestError, match=f"n is {n!r}; it must be a whole number, 1 or more"):
            SamplingParams(n=n)
    for request_id in ("unknown", None):
        with pytest.raises(RequestError, match=r"no unfinished request .*: it has finished, or was never added"):
            engine.abort(request_id)
    answers = finish_all(engine)
    assert answers.of("first", 0) == models[0].expected_answer([3], PARAMS)
    with pytest.raises(RequestError, match="no unfinished request 'first'"):
        engine.abort("first")
    assert "Engine(Transformer(" in repr(engine)


def test_generated_request_ids_skip_ids_in_use(models):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3], PARAMS, request_id="1")
    assert [engine.add_request([3], PARAMS) for _ in range(3)] == ["0", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": 3}, "params are int"),
        ({"request_id": 3}, "request_id is 3; it must be a string"),
        ({"text": 3}, "text is 3; it must be a string"),
        ({"priority": "high"}, "priority is 'high'"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_and_change_nothing(models, arguments, message):
    engine = models[0].engine(EngineConfig(num_blocks=40, block_size=4))
    with pytest.raises(RequestError, match=message):
        engine.add_request([3], **{"params": SamplingParams(max_tokens=1)} | arguments)
    with pytest.raises(RequestError, match=r"no unfinished request \[3\]"):
        engine.abort([3])
    assert not engine.has_unfinished
    assert engine.step().arrived == []


def test_an_empty_step_records_the_events_since_the_last_step(models):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3, 4], PARAMS, request_id="a", text="hi", priority=2)
    engine.abort("a")
    record = engine.step()
    (arrival,), (finish,) = record.arrived, record.finished
    assert (arrival.request_id, arrival.num_prompt_tokens, arrival.prompt, arrival.priority) == ("a", 2, "hi", 2)
    assert arrival.params == {"max_tokens": 12, "seed": 1, "ignore_eos": True, "logprobs": True}
    assert (record.aborted, finish.reason, record.chunks) == (["a"], "abort", [])
    assert "0 waiting; 0 of 40 blocks held" in repr(record)
    assert engine.step().arrived == []


def test_calls_from_inside_a_step_are_refused(models, monkeypatch):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3], PARAMS, request_id="a")
    forward, refused_calls = models[0].transformer.forward, []

    def forward_with_calls(batch, cache, **options):
        for call in (
            engine.step,
            lambda: engine.add_request([4], PARAMS),
            lambda: engine.abort("a"),
            engine.reset_prefix_cache,
        ):
            with pytest.raises(BusyError, match="the engine is inside another call"):
                call()
            refused_calls.append(call)
        return forward(batch, cache)

    monkeypatch.setattr(models[0].transformer, "forward", forward_with_calls)
    engine.step()
    assert len(refused_calls) == 4
    monkeypatch.undo()
    answers = finish_all(engine)
    assert answers.of("a", 0)[0] == models[0].expected_answer([3], PARAMS)[0][1:]


def test_threads_take_turns(models):
    """Four threads add requests and step one engine until theirs have finished."""
    model, engine, answers = models[0], models[0].engine(EngineConfig(num_blocks=40)), RecordedAnswers()
    engine.listeners.append(answers.push)
    prompts = {f"{thread}-{number}": [thread + 1, number + 1] for thread in range(4) for number in range(5)}

    def serve(thread):
        for request_id, prompt in prompts.items():
            if request_id.startswith(f"{thread}-"):
                engine.add_request(prompt, PARAMS, request_id=request_id)
                while engine.scheduler.is_unfinished(request_id):
                    engine.step()

    threads = [threading.Thread(target=serve, args=[thread]) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id, prompt in prompts.items():
        assert answers.of(request_id, 0) == model.expected_answer(prompt, PARAMS)


def test_events_without_steps_do_not_accumulate(models):
    """Requests are added and aborted, but no step is run. Records without a step list the events."""
    engine, records = models[0].engine(EngineConfig(num_blocks=40)), []
    engine.listeners.append(records.append)
    for _ in range(3 * MAX_PENDING_EVENTS):
        engine.abort(engine.add_request([3], PARAMS))
    pending = engine._recorder.pending
    assert len(pending.arrived) + len(pending.aborts) <= MAX_PENDING_EVENTS
    engine.step()
    assert [record.step for record in records] == list(range(len(records)))
    arrived = [arrival.request_id for record in records for arrival in record.arrived]
    assert arrived == [request_id for record in records for request_id in record.aborted]
    assert len(set(arrived)) == 3 * MAX_PENDING_EVENTS


def test_an_id_used_again_before_the_next_step_names_two_requests(models):
    engine, records = models[0].engine(EngineConfig(num_blocks=40)), []
    engine.listeners.append(records.append)
    for prompt in [3], [4, 5], [6, 7, 8]:
        engine.add_request(prompt, PARAMS, request_id="again")
        if len(prompt) < 3:
            engine.abort("again")
    engine.step()
    assert [[arrival.num_prompt_tokens for arrival in record.arrived] for record in records] == [[1], [2], [3]]
    assert [record.aborted for record in records] == [["again"], ["again"], []]


def test_completions_have_different_random_streams():
    seeds = {stream_seed(seed, completion) for seed in (0, 1, 2**64 - 1) for completion in range(3)}
    assert len(seeds) == 9
    assert max(seeds) < 2**128  # the range of a Philox key
    assert stream_seed(5, 0) == 5


def test_a_cache_of_another_model_is_refused(models):
    """The forward pass refuses a cache for other layers, which it would read out of bounds.

    The engine refuses a cache with other windows.
    """
    transformer = models[1].transformer
    for other in (models[0], models[6], models[8]):
        cache = KVCache.contiguous(other.transformer.config, 4)
        with pytest.raises(ValueError, match="was made for a different model, not for Transformer"):
            transformer.forward(Batch.from_chunks([Chunk([1], 0, cache.full_tables())], 4, cache.num_groups), cache)
    cache = KVCache(models[3].transformer.config, 4)
    with pytest.raises(ValueError, match=r"cache for \(3,\), but the model's are \(None,\)"):
        Engine(transformer, cache, EngineConfig().scheduler(cache))
    cache = KVCache(models[6].transformer.config, 4)
    with pytest.raises(
        ValueError, match=r"for 1 KV-cache groups, but the cache has 2: create the batch with num_groups=kv"
    ):
        models[6].transformer.forward(Batch.from_chunks([Chunk([1], 0, [[0]])], 16), cache)


def test_a_scheduler_whose_blocks_do_not_match_the_cache_is_refused(models):
    cache = KVCache(models[0].transformer.config, 4)
    scheduler = EngineConfig().scheduler(KVCache(models[0].transformer.config, 7))
    with pytest.raises(ValueError, match=r"scheduler's BlockAllocator.* of 7 blocks of 16.* does not match KVCache"):
        Engine(models[0].transformer, cache, scheduler)
