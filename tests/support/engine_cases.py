"""Tiny models for tests of the engine: the answers expected of them, and the answers that an engine records."""

from collections import defaultdict
from dataclasses import replace

from minillm import Engine, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.engine import stream_seed
from minillm.engine.detokenizing import IncrementalDetokenizer
from minillm.engine.sampling import sample
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import CacheShape, KVCache
from minillm.model.transformer import Transformer
from minillm.ops import backend

CONTEXT = 64

# Storage type -> the sizes of a tiny Llama: with and without grouped-query attention; one, two or seven layers.
SIZES = {
    "F32": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
    "Q8_0": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "BF16": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 7},
}

# The storage type, the number of leading layers that have a window, and the window of each KV-cache group.
MODELS = [
    *(("F32", 0, [None]), ("Q8_0", 0, [None])),
    *(("F32", 1, [3]), ("Q8_0", 2, [3]), ("F32", 1, [12]), ("Q8_0", 2, [12])),
    *(("Q8_0", 1, [3, None]), ("Q8_0", 1, [12, None])),
    ("BF16", 5, [5, 5, 5, None]),  # leaves a layer slot unused
]


class ServedModel:
    """A transformer with its tokenizer, and the answers that any engine must generate with it."""

    def __init__(self, path, num_windowed, windows):
        checkpoint = open_checkpoint(path)
        self.tokenizer = checkpoint.tokenizer
        config = replace(checkpoint.config, sliding_window=windows[0], window_layers=tuple(range(num_windowed)))
        assert CacheShape.from_config(config).windows == tuple(windows)
        self.transformer = Transformer(config, lambda name: checkpoint.tensors[name].read(), backend("numba"))

    def engine(self, config):
        cache = KVCache(self.transformer.config, config.num_blocks, config.block_size, config.kv_dtype)
        cache.keys[:], cache.values[:] = 6e4, -6e4  # reading a slot that was never written changes the results
        scheduler = config.scheduler(cache)
        return Engine(self.transformer, cache, scheduler, tokenizer=self.tokenizer, context_length=CONTEXT)

    def expected_answer(self, prompt, params, completion=0, kv_dtype="float32"):
        """Generate without an engine: in a contiguous cache, with one pass over the prompt and one pass per token.

        Return the tokens, their logprobs, the text and the finish reason.
        """
        cache = KVCache.contiguous(self.transformer.config, CONTEXT, dtype=kv_dtype)
        detokenizer, tables = IncrementalDetokenizer(self.tokenizer, params), cache.full_tables()
        tokens, logprobs, texts, reason = list(prompt), [], [], None
        start, seed = 0, stream_seed(params.seed, completion)
        while reason is None:
            batch = Batch.from_chunks([Chunk(tokens[start:], start, tables)], CONTEXT, cache.num_groups)
            logits = self.transformer.forward(batch, cache)
            start = len(tokens)
            chosen = sample(logits[0], params, seed, start - len(prompt), tokens)
            tokens.append(chosen.token_id)
            logprobs.append(chosen.logprob)
            text, reason = detokenizer.push(chosen.token_id)
            texts.append(text)
        return tokens[len(prompt) :], logprobs, "".join(texts), reason


class RecordedAnswers:
    """The answers in an engine's step records, by request id and completion."""

    def __init__(self):
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.texts, self.reasons, self.exceptions = defaultdict(str), {}, {}
        self.last_record = None

    def push(self, record):
        """Add the tokens and the finish reasons of one step, unless the engine repeats the step's record."""
        if record is self.last_record:
            return
        self.last_record = record
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
        """Return the tokens, their logprobs, the text, and the finish reason or None."""
        key = request_id, completion
        return self.tokens[key], self.logprobs[key], self.texts[key], self.reasons.get(key)


def finish_all(engine):
    """Run the engine until no request is left; return the answers."""
    answers = RecordedAnswers()
    engine.listeners.append(answers.push)
    while engine.has_unfinished:
        engine.step()
    return answers


def overwrite_unused_blocks(engine):
    """Overwrite all blocks that are neither in a block table nor in the prefix index."""
    blocks, cache = engine.scheduler.blocks, engine.kv_cache
    for block, count in enumerate(blocks.references):
        if not count and block not in blocks.prefixes:
            cache.keys[block], cache.values[block] = 6e4, -6e4


PARAMS = SamplingParams(max_tokens=12, temperature=1, seed=1, logprobs=True, ignore_eos=True)
