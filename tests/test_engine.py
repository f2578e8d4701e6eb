"""The engine: whoever shares its steps, under whatever policy, in however small a pool, gets the bits of being alone.

MINILLM_EXAMPLES=5000 looks at more of the examples than the few hundred of a usual run; that takes minutes.
"""

import os
from collections import defaultdict

import pytest
from builders import random_llama, write_gguf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minillm import Engine, EngineConfig, SamplingParams
from minillm.batch import Batch, Chunk
from minillm.checkpoints import open_checkpoint
from minillm.engine import stream_seed
from minillm.engine.answer import Answer
from minillm.kv_cache import KVCache
from minillm.ops import backend
from minillm.sampling import sample
from minillm.scheduler import ADMISSIONS, POLICIES
from minillm.trace import from_json, to_json
from minillm.trace.records import StepRecord
from minillm.transformer import Transformer

CONTEXT = 64
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "


class Model:
    """A transformer and its tokenizer, and what each request answers that has them to itself."""

    def __init__(self, path):
        checkpoint = open_checkpoint(path)
        self.tokenizer = checkpoint.tokenizer
        self.transformer = Transformer(
            checkpoint.config, lambda name: checkpoint.tensors[name].read(), backend("numba")
        )

    def engine(self, config):
        cache = KVCache(self.transformer.config, config.num_blocks, config.block_size)
        cache.keys[:], cache.values[:] = 1e9, -1e9  # whoever reads what nobody wrote, shows
        scheduler = config.scheduler(cache.blocks)
        return Engine(self.transformer, cache, scheduler, tokenizer=self.tokenizer, context_length=CONTEXT)

    def alone(self, prompt, params, completion=0):
        """The loop without an engine: one unbroken cache, the whole prompt at once, then token by token."""
        cache, answer = KVCache.contiguous(self.transformer.config, CONTEXT), Answer(self.tokenizer, params)
        tokens, logprobs, texts, reason = list(prompt), [], [], None
        start, seed = 0, stream_seed(params.seed, completion)
        while reason is None:
            batch = Batch.from_chunks([Chunk(tokens[start:], start, [0])], CONTEXT)
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
    """Two tiny ones: floats and quantized, heads alone and heads in groups."""
    folder = tmp_path_factory.mktemp("models")
    return [
        Model(write_gguf(folder / f"{storage}.gguf", random_llama(seed, **size), storage, with_tokenizer=True))
        for seed, (storage, size) in enumerate(
            [
                (
                    "F32",
                    {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
                ),
                ("Q8_0", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
            ]
        )
        if size.update(vocab_size=262, intermediate_size=32) is None
    ]


class Answers:
    """What comes out of an engine, put together by request and completion."""

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
    """Requests, of which many begin alike; when they come, who is aborted when; and an engine that can hold each."""
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
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICIES)),
        block_size=block_size,
        num_blocks=-(-longest // block_size) + draw(st.integers(0, 6)),
        max_batch_tokens=draw(st.integers(1, 40)),
        max_sequences=draw(st.integers(max(params.n for _, params, _ in requests), 6)),
        prefix_caching=draw(st.booleans()),
        admission=draw(st.sampled_from(ADMISSIONS)),
        watermark=draw(st.sampled_from([0.0, 0.3])),
    )
    return requests, coming, aborts, config


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
        step += 1
        assert step < 2000
    records.append(engine.step())  # tells of whoever was aborted last
    return records, aborted


def short(**more):
    return SamplingParams(max_tokens=1, temperature=0, seed=0, logprobs=True, **more)


@settings(max_examples=int(os.environ.get("MINILLM_EXAMPLES", "400")))
@given(which=st.integers(0, 1), workload=workloads())
@example(  # aborted before its completions had parted
    which=0,
    workload=([([3], short(), 0), ([3], short(n=2), 0)], [0, 0], {1: 0}, EngineConfig(num_blocks=1, max_sequences=2)),
)
def test_every_answer_has_the_bits_of_being_alone(models, which, workload):
    model, (requests, coming, aborts, config) = models[which], workload
    engine, answers = model.engine(config), Answers()
    engine.listeners.append(answers.push)
    records, aborted = serve(engine, requests, coming, aborts)
    for number, (prompt, params, _) in enumerate(requests):
        for completion in range(params.n):
            expected = model.alone(prompt, params, completion)
            tokens, logprobs, text, reason = answers.of(str(number), completion)
            if reason == "abort":
                assert number in aborted
                assert tokens == expected[0][: len(tokens)]
                assert logprobs == expected[1][: len(tokens)]
                assert expected[2].startswith(text)
            else:
                assert (tokens, logprobs, text, reason) == expected
    blocks = engine.kv_cache.blocks
    assert blocks.num_held == 0
    assert not engine._requests
    for record in records:
        assert from_json(StepRecord, to_json(record), "line 1") == record
        pool = record.pool
        tables = [block for sequence in record.running for block in sequence.block_table]
        assert pool.references == [tables.count(block) for block in range(config.num_blocks)]
        assert pool.num_held + pool.num_cached + pool.num_free == config.num_blocks
        assert record.num_tokens <= config.max_batch_tokens
        assert {(c.request_id, c.completion) for c in record.chunks} <= {
            (s.request_id, s.completion) for s in record.running
        }
