"""The engine: under every policy and in any pool, a request gets the same bits as when it runs alone.

MINILLM_EXAMPLES=5000 runs more examples than the default few hundred. This takes minutes.
"""

import os
import random
import signal
import sys
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf

from minillm import BusyError, Engine, EngineConfig, NumericError, RequestError, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.engine import stream_seed
from minillm.engine.detokenizing import IncrementalDetokenizer
from minillm.engine.sampling import sample
from minillm.engine.scheduler import POLICIES
from minillm.engine.waiting_queue import ADMISSIONS
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import CacheShape, KVCache
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.trace import StepRecord, Trace, from_json, request_metrics, run_metrics, to_json

CONTEXT = 64
SIZES = {  # of tiny Llamas: heads alone and heads in groups; one, two, and seven layers
    "F32": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
    "Q8_0": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "BF16": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 7},
}
MODELS = [  # stored as; how many of its layers, from the first on, have a window; the windows of its groups of layers
    *(("F32", 0, [None]), ("Q8_0", 0, [None])),
    *(("F32", 1, [3]), ("Q8_0", 2, [3]), ("F32", 1, [12]), ("Q8_0", 2, [12])),
    *(("Q8_0", 1, [3, None]), ("Q8_0", 1, [12, None]), ("BF16", 5, [5, 5, 5, None])),  # the last leaves a place empty
]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "


class Model:
    """A transformer and its tokenizer, and the answer of a request that runs alone."""

    def __init__(self, path, num_windowed, windows):
        checkpoint = open_checkpoint(path)
        self.tokenizer = checkpoint.tokenizer
        config = replace(checkpoint.config, sliding_window=windows[0], window_layers=tuple(range(num_windowed)))
        assert CacheShape.from_config(config).windows == tuple(windows)
        self.transformer = Transformer(config, lambda name: checkpoint.tensors[name].read(), backend("numba"))

    def engine(self, config):
        cache = KVCache(self.transformer.config, config.num_blocks, config.block_size, config.kv_dtype)
        cache.keys[:], cache.values[:] = 6e4, -6e4  # a read of memory that was never written changes the results
        scheduler = config.scheduler(cache)
        return Engine(self.transformer, cache, scheduler, tokenizer=self.tokenizer, context_length=CONTEXT)

    def alone(self, prompt, params, completion=0, kv_dtype="float32"):
        """Generate without an engine: one contiguous cache, the whole prompt in one pass, then token by token."""
        cache = KVCache.contiguous(self.transformer.config, CONTEXT, dtype=kv_dtype)
        answer, tables = IncrementalDetokenizer(self.tokenizer, params), cache.full_tables()
        tokens, logprobs, texts, reason = list(prompt), [], [], None
        start, seed = 0, stream_seed(params.seed, completion)
        while reason is None:
            batch = Batch.from_chunks([Chunk(tokens[start:], start, tables)], CONTEXT, cache.num_groups)
            logits = self.transformer.forward(batch, cache)
            start = len(tokens)
            chosen = sample(logits[0], params, seed, start - len(prompt), tokens)
            tokens.append(chosen.token_id)
            logprobs.append(chosen.logprob)
            text, reason = answer.push(chosen.token_id)
            texts.append(text)
        return tokens[len(prompt) :], logprobs, "".join(texts), reason


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models, with float and quantized weights, and with windows in no layer, all layers or some."""
    folder = tmp_path_factory.mktemp("models")
    paths = {
        storage: write_gguf(
            folder / f"{storage}.gguf",
            random_llama(seed, **size, vocab_size=262, intermediate_size=32),
            storage,
            with_tokenizer=True,
        )
        for seed, (storage, size) in enumerate(SIZES.items())
    }
    return [Model(paths[storage], *windows) for storage, *windows in MODELS]


class Answers:
    """The output of an engine, collected by request and completion."""

    def __init__(self):
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.texts, self.reasons, self.exceptions = defaultdict(str), {}, {}

    def push(self, record):
        for chunk in record.chunks:
            for token in chunk.sampled:
                key = chunk.request_id, token.completion
                assert key not in self.reasons
                self.tokens[key].append(token.token_id)
                self.logprobs[key].append(token.logprob)
                self.texts[key] += token.text
        for finish in record.finished:
            key = finish.request_id, finish.completion
            assert key not in self.reasons
            self.reasons[key], self.exceptions[key] = finish.reason, finish.exception

    def of(self, request_id, completion):
        key = request_id, completion
        return self.tokens[key], self.logprobs[key], self.texts[key], self.reasons.get(key)


tails = st.lists(st.integers(3, 6), max_size=6)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 3),
    stop=st.sampled_from([(), tuple(LETTERS[:20]), ("ab", *LETTERS[20:40])]),
    stop_token_ids=st.sampled_from([(), tuple(range(100, 120))]),
    ignore_eos=st.booleans(),
    logprobs=st.just(True),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)


@st.composite
def workloads(draw):
    """A model; requests, many of which begin alike; when they come, and who is aborted when; an engine for each."""
    which = draw(st.integers(0, len(MODELS) - 1))
    beginnings = draw(st.lists(st.lists(st.integers(3, 6), max_size=20), min_size=1, max_size=2))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        beginning = draw(st.sampled_from(beginnings))
        prompt = beginning[: draw(st.integers(0, len(beginning)))] + draw(tails)
        requests.append((prompt or [3], draw(sampling), draw(st.integers(0, 2))))
    coming = [draw(st.integers(0, 8)) for _ in requests]  # before which step
    aborts = draw(st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 12), max_size=2))
    block_size = draw(st.integers(1, 9))
    longest = max(len(prompt) + params.max_tokens - 1 for prompt, params, _ in requests)
    rows, max_batch_tokens = -(-longest // block_size), draw(st.integers(1, 40))
    at_once = [
        rows if window is None else 1 - (2 - window - max_batch_tokens) // block_size for window in MODELS[which][2]
    ]
    least = sum(min(rows, own) for own in at_once)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICIES)),
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, 6)),
        max_batch_tokens=max_batch_tokens,
        max_sequences=draw(st.integers(max(params.n for _, params, _ in requests), 6)),
        prefix_caching=draw(st.booleans()),
        admission=draw(st.sampled_from(ADMISSIONS)),
        watermark=draw(st.sampled_from([0.0, 0.3])),
        kv_dtype=draw(st.sampled_from(["float32", "float16"])),
    )
    return which, requests, coming, aborts, config


def spoil(engine):
    """Overwrite all blocks that no table lists and no prefix can find."""
    blocks, cache = engine.scheduler.blocks, engine.kv_cache
    for block, count in enumerate(blocks.references):
        if not count and block not in blocks.prefixes:
            cache.keys[block], cache.values[block] = 6e4, -6e4


def serve(engine, requests, coming, aborts):
    """All the records, and who was aborted."""
    records, aborted, step = [], set(), 0
    while step <= max(coming) or engine.has_unfinished:
        for number, (prompt, params, priority) in enumerate(requests):
            if coming[number] == step:
                engine.add_request(prompt, params, request_id=str(number), priority=priority)
        for number, at in aborts.items():
            if at == step and engine.scheduler.is_unfinished(str(number)):
                engine.abort(str(number))
                aborted.add(number)
        records.append(engine.step())
        spoil(engine)
        step += 1
        assert step < 2000
    records.append(engine.step())  # tells of whoever was aborted last
    return records, aborted


def check_metrics(trace, requests, answers):
    """They agree with what came out, and with each other."""
    run, metrics = run_metrics(trace), request_metrics(trace)
    assert sorted(metrics) == sorted(str(number) for number in range(len(requests)))
    assert run.num_generated_tokens == sum(map(len, answers.tokens.values()))
    assert run.peak_blocks <= trace.facts.num_blocks
    assert 0 <= run.hit_rate < 1
    assert 0 < run.batch_occupancy <= 1 or not run.num_steps
    assert trace.facts.prefix_caching or run.hit_rate == 0
    for number, (prompt, _, _) in enumerate(requests):
        fared = metrics[str(number)]
        assert fared.num_cached_tokens < fared.num_prompt_tokens == len(prompt)
        assert fared.num_recomputed_tokens == 0 or fared.num_preemptions
        times = [fared.queue_time, fared.ttft, fared.end_to_end]
        known = [time for time in times if time is not None]
        assert known == sorted(known)
        assert fared.finish_reason in ("stop", "length", "abort")


def short(**more):
    return SamplingParams(max_tokens=1, temperature=0, seed=0, logprobs=True, **more)


@settings(max_examples=int(os.environ.get("MINILLM_EXAMPLES", "200")))
@given(workload=workloads())
@example(  # aborted before its completions had parted
    workload=(
        0,
        [([3], short(), 0), ([3], short(n=2), 0)],
        [0, 0],
        {1: 0},
        EngineConfig(num_blocks=1, max_sequences=2),
    )
)
def test_every_answer_has_the_bits_of_being_alone(models, workload):
    which, requests, coming, aborts, config = workload
    model = models[which]
    engine, answers = model.engine(config), Answers()
    engine.listeners.append(answers.push)
    records, aborted = serve(engine, requests, coming, aborts)
    for number, (prompt, params, _) in enumerate(requests):
        for completion in range(params.n):
            expected = model.alone(prompt, params, completion, config.kv_dtype)
            tokens, logprobs, text, reason = answers.of(str(number), completion)
            if reason == "abort":
                assert number in aborted
                assert tokens == expected[0][: len(tokens)]
                assert logprobs == expected[1][: len(tokens)]
                assert expected[2].startswith(text)
            else:
                assert (tokens, logprobs, text, reason) == expected
    blocks = engine.scheduler.blocks
    assert blocks.num_held == 0
    assert not engine._requests
    check_metrics(Trace(engine.facts, records), requests, answers)
    for record in records:
        assert from_json(StepRecord, to_json(record), "line 1") == record
        pool = record.pool
        tables = [
            block for sequence in record.running for table in sequence.block_tables for block in table if block >= 0
        ]
        assert pool.references == [tables.count(block) for block in range(config.num_blocks)]
        assert pool.num_held + pool.num_cached + pool.num_free == config.num_blocks
        assert record.num_tokens <= config.max_batch_tokens
        assert {(c.request_id, c.completion) for c in record.chunks} <= {
            (s.request_id, s.completion) for s in record.running
        }


def test_hundreds_of_preemptions_lose_nothing_and_keep_nothing(models):
    """Twice a hundred requests through a pool that holds a few of them; after each, nothing of them is left."""
    model, drawn = models[1], random.Random(0)
    engine = model.engine(EngineConfig(num_blocks=24, block_size=2, max_sequences=32, max_batch_tokens=24, watermark=0))
    requests, answers = {}, Answers()
    for half in ("a", "b"):
        for number in range(100):
            prompt = [3, 4, 5, 6][: drawn.randint(0, 4)] + drawn.choices(range(3, 7), k=drawn.randint(1, 8))
            params = SamplingParams(max_tokens=drawn.randint(8, 24), temperature=1, seed=number, logprobs=True)
            requests[f"{half}{number}"] = prompt, params
            engine.add_request(prompt, params, request_id=f"{half}{number}")
        num_preempted = 0
        while engine.has_unfinished:
            record = engine.step()
            answers.push(record)
            num_preempted += len(record.preempted)
        assert num_preempted > 100
        assert engine.scheduler.blocks.num_held == 0
        assert len(engine.scheduler.blocks.prefixes) == engine.scheduler.blocks.num_cached
        assert not engine._requests
        assert not engine.scheduler.waiting._heap
    for request_id, (prompt, params) in requests.items():
        assert answers.of(request_id, 0) == model.alone(prompt, params)


@pytest.mark.parametrize("prompt_length", [1, 40])
def test_behind_a_window_texts_pass_that_are_many_times_the_pool(models, prompt_length):
    """Eight times as long as all blocks are together; a model that looks at all of it would be refused."""
    model, config = models[3], EngineConfig(block_size=2, num_blocks=4, max_batch_tokens=4, max_sequences=2)
    params = SamplingParams(max_tokens=64 - prompt_length, temperature=1, seed=1, logprobs=True, ignore_eos=True)
    prompt, answers = [3, 4, 5, 6, 4, 4, 3] * 6, Answers()
    engine = model.engine(config)
    engine.listeners.append(answers.push)
    engine.add_request(prompt[:prompt_length], params, request_id="long")
    most = 0
    while engine.has_unfinished:
        record = engine.step()
        spoil(engine)
        most = max(most, record.pool.num_held)
    assert most <= 4
    (table,) = record.running[0].block_tables
    assert [block for block in table if block >= 0] == table[-2:]
    assert answers.of("long", 0) == model.alone(prompt[:prompt_length], params)
    with pytest.raises(
        RequestError, match="fill 63 positions, which takes 32 blocks of 2, but the pool has 4: shorten"
    ):
        models[1].engine(config).add_request(prompt[:prompt_length], params)
    wider = "takes 8 blocks of 2 at once, with a window of 12 and max_batch_tokens of 4, .* 4: lower max_batch_tokens"
    with pytest.raises(RequestError, match=wider):
        models[5].engine(config).add_request(prompt[:prompt_length], params)


def test_a_cache_of_another_model_is_refused(models):
    """One of other layers by the pass itself, for it would read what is not there; of other windows by the engine."""
    ours, others = models[1].transformer, [models[0], models[6], models[8]]
    for other in others:
        cache = KVCache.contiguous(other.transformer.config, 4)
        with pytest.raises(ValueError, match="was made for a different model, not for Transformer"):
            ours.forward(Batch.from_chunks([Chunk([1], 0, cache.full_tables())], 4, cache.num_groups), cache)
    cache = KVCache(models[3].transformer.config, 4)
    with pytest.raises(ValueError, match=r"cache for \(3,\), but the model's are \(None,\)"):
        Engine(ours, cache, EngineConfig().scheduler(cache))
    cache = KVCache(models[6].transformer.config, 4)
    with pytest.raises(
        ValueError, match=r"for 1 KV-cache groups, but the cache has 2: make the batch with num_groups=kv"
    ):
        models[6].transformer.forward(Batch.from_chunks([Chunk([1], 0, [[0]])], 16), cache)


def test_a_scheduler_over_other_blocks_than_the_cache_s_is_refused(models):
    cache = KVCache(models[0].transformer.config, 4)
    scheduler = EngineConfig().scheduler(KVCache(models[0].transformer.config, 7))
    with pytest.raises(ValueError, match=r"scheduler's BlockAllocator.* of 7 blocks of 16.* does not match KVCache"):
        Engine(models[0].transformer, cache, scheduler)


# --- one request's failure, and everybody's ------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=12, temperature=1, seed=1, logprobs=True, ignore_eos=True)


def finish_all(engine):
    answers = Answers()
    engine.listeners.append(answers.push)
    while engine.has_unfinished:
        engine.step()
    return answers


@pytest.mark.parametrize("where", ["sample", "push"])
def test_one_requests_failure_ends_that_request_alone(models, monkeypatch, where):
    """Whether its token cannot be chosen or cannot be turned into text: here the third of its second completion."""
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    bad = SamplingParams(max_tokens=12, temperature=1, seed=77, n=2, ignore_eos=True)
    for request_id, params in (("good", LONG), ("bad", bad), ("other", LONG)):
        engine.add_request([3, 4, 5], params, request_id=request_id)
    victims = engine._requests["bad"].detokenizers

    def failing_sample(logits, params, seed, index, context):
        if params is bad and seed == stream_seed(77, 1) and index == 2:
            raise ZeroDivisionError("a logits processor's mistake")
        return sample(logits, params, seed, index, context)

    push, tokens = victims[1].push, iter(range(99))

    def failing_push(token_id):
        if next(tokens) == 2:
            raise ZeroDivisionError("a logits processor's mistake")
        return push(token_id)

    if where == "sample":
        monkeypatch.setattr("minillm.engine.engine.sample", failing_sample)
    else:
        victims[1].push = failing_push
    answers = finish_all(engine)
    for request_id in ("good", "other"):
        assert answers.of(request_id, 0) == model.alone([3, 4, 5], LONG)
    for completion in (0, 1):
        assert answers.reasons["bad", completion] == "error"
        assert isinstance(answers.exceptions["bad", completion], ZeroDivisionError)
    assert len(answers.tokens["bad", 1]) == 2
    assert engine.scheduler.blocks.num_held == 0


def test_scores_that_are_no_numbers_are_that_requests_failure(models, monkeypatch):
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    engine.add_request([3], LONG, request_id="good")
    engine.add_request([4], LONG, request_id="bad")
    forward = model.transformer.forward

    def damaged(batch, cache, **more):
        logits = forward(batch, cache)
        logits[batch.token_ids[batch.query_starts[1:] - 1] == 4] = np.nan
        return logits

    monkeypatch.setattr(model.transformer, "forward", damaged)
    answers = finish_all(engine)
    assert isinstance(answers.exceptions["bad", 0], NumericError)
    monkeypatch.undo()
    assert answers.of("good", 0) == model.alone([3], LONG)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_fails_as_a_whole_can_be_taken_again(models, monkeypatch, error):
    """Half of it may have been computed; and its copies of shared blocks may or may not have been made."""
    model = models[1]
    engine = model.engine(EngineConfig(num_blocks=40, block_size=4))
    requests = {"a": LONG, "b": SamplingParams(max_tokens=9, temperature=1, seed=2, n=3, logprobs=True)}
    for request_id, params in requests.items():
        engine.add_request([3, 4, 5], params, request_id=request_id)
    forward, copy_block, answers = model.transformer.forward, engine.kv_cache.copy_block, Answers()
    engine.listeners.append(answers.push)

    def failing(batch, cache, **more):
        forward(batch, cache)
        cache.keys[batch.slots // 4, ..., batch.slots % 4] = 1e9
        raise error

    def failing_copy(source, target):
        monkeypatch.setattr(engine.kv_cache, "copy_block", copy_block)
        raise error

    monkeypatch.setattr(engine.kv_cache, "copy_block", failing_copy)
    turn = failures = 0
    while engine.has_unfinished:
        monkeypatch.setattr(model.transformer, "forward", failing if turn % 3 == 2 else forward)
        try:
            engine.step()
        except error:
            failures += 1
        turn += 1
    for request_id, params in requests.items():
        for completion in range(params.n):
            assert answers.of(request_id, completion) == model.alone([3, 4, 5], params, completion)
    assert failures > 3
    assert engine.scheduler.blocks.num_held == 0


# --- bad input -----------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_served_are_refused_when_they_come(models):
    engine = models[0].engine(EngineConfig(num_blocks=4, block_size=4, max_sequences=2))
    engine.add_request([3], LONG, request_id="first")
    for prompt, params, more, message in (
        ([], LONG, {}, "the prompt is empty"),
        ([999], LONG, {}, "prompt token 0 is 999; it must be a whole number, from 0 to 261"),
        ("text", LONG, {}, "a prompt is text or a list of token ids, not str"),
        ([3] * 60, LONG, {}, "prompt of 60 tokens and max_tokens of 12 need 72 positions, but the context has 64"),
        ([3] * 20, LONG, {}, "fill 31 positions, which takes 8 blocks of 4, but the pool has 4"),
        ([3], LONG, {"request_id": "first"}, "request 'first' is still unfinished"),
        ([3], LONG, {"priority": 0.5}, "priority is 0.5"),
        ([3], SamplingParams(max_tokens=2, n=3), {}, "3 completions needs them to run at once, but max_sequences is 2"),
        ([3], SamplingParams(max_tokens=2, stop_token_ids=[262]), {}, "stop_token_ids is 262"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, params, **more)
    for n in (0, 1.5, "2"):
        with pytest.raises(RequestError, match=f"n is {n!r}; it must be a whole number, 1 or more"):
            SamplingParams(n=n)
    for request_id in ("unknown", None):
        with pytest.raises(RequestError, match=r"no unfinished request .*: it has finished, or was never added"):
            engine.abort(request_id)
    answers = finish_all(engine)
    assert answers.of("first", 0) == models[0].alone([3], LONG)
    with pytest.raises(RequestError, match="no unfinished request 'first'"):
        engine.abort("first")
    assert "Engine(Transformer(" in repr(engine)


def test_numbered_requests_keep_clear_of_named_ones(models):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3], LONG, request_id="1")
    assert [engine.add_request([3], LONG) for _ in range(3)] == ["0", "2", "3"]


def test_a_step_with_nothing_to_do_tells_what_was_done_between(models):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3, 4], LONG, request_id="a", text="hi", priority=2)
    engine.abort("a")
    record = engine.step()
    (arrival,), (finish,) = record.arrived, record.finished
    assert (arrival.request_id, arrival.num_prompt_tokens, arrival.prompt, arrival.priority) == ("a", 2, "hi", 2)
    assert arrival.params == {"max_tokens": 12, "seed": 1, "ignore_eos": True, "logprobs": True}
    assert (record.aborted, finish.reason, record.chunks) == (["a"], "abort", [])
    assert "0 waiting; 0 of 40 blocks held" in repr(record)
    assert engine.step().arrived == []


def test_calls_from_another_thread_or_from_inside_a_step_are_refused(models, monkeypatch):
    engine = models[0].engine(EngineConfig(num_blocks=40))
    engine.add_request([3], LONG, request_id="a")
    forward, refused = models[0].transformer.forward, []

    def meddle():
        for call in (
            engine.step,
            lambda: engine.add_request([4]),
            lambda: engine.abort("a"),
            engine.reset_prefix_cache,
        ):
            with pytest.raises(BusyError, match="the engine is inside another call"):
                call()
            refused.append(call)

    def meddled(batch, cache, **more):
        meddle()
        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()
        return forward(batch, cache)

    monkeypatch.setattr(models[0].transformer, "forward", meddled)
    engine.step()
    assert len(refused) == 8
    monkeypatch.undo()
    answers = Answers()
    while engine.has_unfinished:
        answers.push(engine.step())
    assert answers.of("a", 0)[0] == models[0].alone([3], LONG)[0][1:]


def test_completions_draw_from_streams_of_their_own():
    seeds = {stream_seed(seed, completion) for seed in (0, 1, 2**64 - 1) for completion in range(3)}
    assert len(seeds) == 9
    assert max(seeds) < 2**128  # what Philox takes
    assert stream_seed(5, 0) == 5


def test_ctrl_c_waits_for_the_step_to_end(models):
    """Pressed at any point of a step, it is raised after it, and the next answers have the bits of being alone."""
    params, prompt = SamplingParams(max_tokens=6, temperature=0, seed=0, logprobs=True, ignore_eos=True), [3, 4, 5]
    expected = models[0].alone(prompt, params)
    for at in range(0, 2000, 37):
        engine, answers, left = models[0].engine(EngineConfig(num_blocks=4, block_size=4)), Answers(), [at]
        engine.listeners.append(answers.push)

        def press(frame, event, argument, left=left):
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

        engine.add_request(prompt, params, request_id="0")
        interrupted = 0
        while engine.has_unfinished:
            try:
                sys.setprofile(press)
                engine.step()
                sys.setprofile(None)  # the last call at which it can be pressed, and in here
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.setprofile(None)
        assert interrupted == (left[0] <= 0 < at)
        assert answers.of("0", 0) == expected
        assert engine.scheduler.blocks.num_held == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": 3}, "params are int"),
        ({"request_id": 3}, "request_id is 3; it must be a string"),
        ({"text": 3}, "text is 3; it must be a string"),
        ({"priority": "high"}, "priority is 'high'"),
    ],
)
def test_arguments_of_another_type_are_refused_and_leave_nothing_behind(models, arguments, message):
    engine = models[0].engine(EngineConfig(num_blocks=40, block_size=4))
    with pytest.raises(RequestError, match=message):
        engine.add_request([3], **{"params": SamplingParams(max_tokens=1)} | arguments)
    with pytest.raises(RequestError, match=r"no unfinished request \[3\]"):
        engine.abort([3])
    assert not engine.has_unfinished
    assert engine.step().arrived == []


def test_a_listener_that_raises_keeps_the_record_from_nobody(models):
    engine, seen = models[0].engine(EngineConfig(num_blocks=8, block_size=4)), []

    def refuse(record):
        raise OSError("the disk is full")

    engine.listeners += [refuse, seen.append]
    engine.add_request([3], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    while engine.has_unfinished:
        with pytest.raises(OSError, match="the disk is full"):
            engine.step()
    assert [record.step for record in seen] == [0, 1]
    assert len(seen[-1].finished) == 1
