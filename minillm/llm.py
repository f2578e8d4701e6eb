"""LLM: the front door. A model, its tokenizer, its KV cache, and the loop that makes text.

prompt -> token ids -> prefill -> sample -> decode -> sample -> decode -> ... -> text
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import numpy as np

from minillm import catalog
from minillm.batch import Batch, Chunk
from minillm.catalog import Report
from minillm.checkpoints import Checkpoint, open_checkpoint
from minillm.checks import check_integer
from minillm.errors import CapacityError, CheckpointError, RequestError
from minillm.kv_cache import KVCache
from minillm.ops import backend as find_backend
from minillm.quantization import QuantizedMatrix, quantize
from minillm.sampling import SamplingParams, sample
from minillm.sequence import Sequence, common_prefix
from minillm.stopping import StopMatcher
from minillm.tokenizer import Tokenizer
from minillm.transformer import Transformer

Prompt = str | SequenceOf[int]  # text, or token ids as they are
Message = Mapping[str, str]  # {"role": "user", "content": "..."}

# A prompt is computed in pieces of at most so many tokens. It bounds the memory for intermediate results;
# the result's bits are the same for any number.
PREFILL_CHUNK = 512

WEIGHTS = {None: None, "int8": 8, "int4": 4}  # what LLM's `weights` may be: bits that float matrices are rounded to

# Positions the KV cache has room for unless told otherwise: a model made for 131,072 would ask for gigabytes.
DEFAULT_CONTEXT_LENGTH = 8192


@dataclass
class Metrics:
    """What one request took. Times are in seconds and leave out what the caller did between tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose keys and values were still in the cache
    num_generated_tokens: int = 0
    time_to_first_token: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_bytes: int = 0  # held in the KV cache at the end

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed (not those found in the cache) a second."""
        return (self.num_prompt_tokens - self.num_cached_tokens) / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second after the first, which is the prefill's; 0 if there was only that one."""
        return (self.num_generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Delta:
    """One step of an answer. Its text is empty while a character or a possible stop string is incomplete."""

    text: str
    token_id: int
    logprob: float | None
    finish_reason: str | None  # "stop" or "length" on the last one
    metrics: Metrics  # up to now


@dataclass
class RequestOutput:
    """A finished answer."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # one a token, if asked for
    finish_reason: str | None = None  # "stop": an end token or stop string; "length": max_tokens
    metrics: Metrics | None = None


class LLM:
    """A model ready to answer, one request at a time.

    Parameters
    ----------
    model : path of a `.gguf` file or of a folder in Hugging Face layout, a catalog name, or a hub id (extra `hub`).
        None is the default model, SmolLM2-135M-Instruct, fetched once.
    backend : "numba" (compiled, the default) or "numpy" (also called "reference").
    threads : cores to use; None for all. Never changes a result. Only for "numba".
    weights : "int8" or "int4" rounds matrices that the file holds as floats to so many bits as they are loaded; None
        leaves all weights as they are.
    context_length : positions to have room for; None for the model's own, at most DEFAULT_CONTEXT_LENGTH.
    block_size : positions a block of the KV cache holds.
    report : where progress is told (fetching, compiling); None for stderr.

    Attributes
    ----------
    path : the model's file or folder.
    config : ModelConfig.
    tokenizer : Tokenizer, or None if the model came without one.
    transformer : the forward pass and its weights.
    kv_cache : the memory it reads and writes.
    context_length : positions there is room for.

    Raises
    ------
    CatalogError, CheckpointError, UnsupportedError, TokenizerError
        The model cannot be found, is damaged, or asks for what is not supported.
    CapacityError
        The KV cache does not fit into memory.
    ValueError
        Another argument is out of range.

    Warns
    -----
    SlowThreadsWarning
        This machine has neither OpenMP nor TBB, so that decoding takes several times as long as it need.

    Notes
    -----
    One thread at a time may use an LLM; a second is refused. Processes are to be started with "spawn", not forked.
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        backend: str = "numba",
        threads: int | None = None,
        weights: str | None = None,
        context_length: int | None = None,
        block_size: int = 16,
        report: Report | None = None,
    ):
        if weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}; it can be {', '.join(map(repr, WEIGHTS))}")
        report = report or Report()
        self.ops = find_backend(backend)
        self.threads = None if threads is None else check_integer("threads", threads, 1)
        self.ops.set_num_threads(self.threads)
        self.ops.check_threads()
        self.path = catalog.resolve(model, report=report)
        checkpoint = open_checkpoint(self.path)
        self.config = checkpoint.config
        self.tokenizer: Tokenizer | None = checkpoint.tokenizer
        if context_length is None:
            context_length = min(self.config.context_length, DEFAULT_CONTEXT_LENGTH)
        self.context_length = check_integer("context_length", context_length, 1, self.config.context_length)
        block_size = min(check_integer("block_size", block_size, 1), self.context_length)
        self._sequence = Sequence([], 0)  # the latest request: the next one may continue it
        self._in_use = threading.Lock()
        self._process = os.getpid()
        with self.ops.announcing_compilation(report.line):
            self.transformer = Transformer(self.config, partial(_load, checkpoint, WEIGHTS[weights]), self.ops)
            self.kv_cache = self._make_cache(block_size)
            self._warm_up()

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer every prompt; the outputs come in the prompts' order.

        Raises
        ------
        RequestError
            A prompt is empty, holds ids that are not the model's, or leaves no room for `max_tokens`.
        """
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise RequestError(f"prompts are {type(prompts).__name__}; generate takes a prompt or a list of prompts")
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        params = _check_params(params)
        requests = [self._request(prompt, params) for prompt in prompts]
        return [self._collect(token_ids, params) for token_ids in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt, token by token. Raises as `generate` does, before the first token."""
        params = _check_params(params)
        return self._run(self._request(prompt, params), params)

    def chat(self, messages: SequenceOf[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, `[{"role": "user", "content": "Hi"}, ...]`, through the model's chat template.

        A conversation that continues the one before finds its keys and values still in the cache.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def stream_chat(self, messages: SequenceOf[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """As `chat`, token by token."""
        return self.stream(self.encode_chat(messages), params)

    def logits(self, token_ids: SequenceOf[int]) -> np.ndarray:
        """The model's scores for the next token after each token: float32 [T, V]."""
        token_ids = self.encode(token_ids)
        if len(token_ids) > self.context_length:
            raise RequestError(f"{len(token_ids)} tokens do not fit the context of {self.context_length}")
        with self._sequence_for(token_ids, reuse=False) as sequence:
            rows = []
            while sequence.num_computed < len(token_ids):
                rows.append(self._advance(sequence, every_token=True))
            return np.concatenate(rows)

    def reset_cache(self) -> None:
        """Forget the latest request, so that the next one computes all of its prompt."""
        with self._sequence_for([], reuse=False):
            pass

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, checked; ids pass through as they are.

        Raises
        ------
        RequestError
            The prompt is empty, is text but the model has no tokenizer, or holds something other than its token ids.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model came without a tokenizer; give token ids instead of text")
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple | np.ndarray):
            token_ids = list(prompt)
        else:
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        if not token_ids:
            raise RequestError("the prompt is empty; a model continues what is there, so give it at least one token")
        most = self.config.vocab_size - 1
        return [check_integer(f"prompt token {n}", token_id, 0, most) for n, token_id in enumerate(token_ids)]

    @property
    def can_chat(self) -> bool:
        """Whether the model came with a chat template."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    def encode_chat(self, messages: SequenceOf[Message]) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins."""
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer, so without a chat template; give token ids")
        text = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them already

    # --- one request --------------------------------------------------------------------------------------------

    def _run(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """The loop: prefill, then sample and decode by turns until something ends the answer."""
        started = perf_counter()
        seed = secrets.randbits(64) if params.seed is None else params.seed
        with self._sequence_for(prompt_ids) as sequence:
            metrics = Metrics(num_prompt_tokens=len(prompt_ids), num_cached_tokens=sequence.num_computed)
            text = _AnswerText(self.tokenizer, params)
            while sequence.num_computed < len(prompt_ids):
                logits = self._advance(sequence)
            metrics.prefill_seconds = perf_counter() - started
            finish_reason = None
            while finish_reason is None:
                if sequence.num_generated:
                    started = perf_counter()
                    logits = self._advance(sequence)
                chosen = sample(logits[-1], params, seed, sequence.num_generated, sequence.token_ids)
                sequence.token_ids.append(chosen.token_id)
                finish_reason = self._finish_reason(chosen.token_id, sequence.num_generated, params)
                shown = text.push(chosen.token_id)
                if text.stopped:
                    finish_reason = "stop"
                elif finish_reason:
                    shown += text.finish()
                    finish_reason = "stop" if text.stopped else finish_reason
                metrics.num_generated_tokens = sequence.num_generated
                metrics.kv_bytes = self.kv_cache.num_bytes_held
                if sequence.num_generated == 1:
                    metrics.time_to_first_token = perf_counter() - started
                else:
                    metrics.decode_seconds += perf_counter() - started
                yield Delta(shown, chosen.token_id, chosen.logprob, finish_reason, replace(metrics))

    def _collect(self, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        output = RequestOutput(prompt_ids, logprobs=[] if params.logprobs else None)
        pieces = []
        for delta in self._run(prompt_ids, params):
            pieces.append(delta.text)
            output.token_ids.append(delta.token_id)
            if output.logprobs is not None:
                output.logprobs.append(delta.logprob)
        output.text, output.finish_reason, output.metrics = "".join(pieces), delta.finish_reason, delta.metrics
        return output

    def _advance(self, sequence: Sequence, every_token: bool = False) -> np.ndarray:
        """Compute the next tokens that are known but not computed: all of them, at most PREFILL_CHUNK."""
        start = sequence.num_computed
        token_ids = sequence.token_ids[start : start + PREFILL_CHUNK]
        self.kv_cache.blocks.extend(sequence.block_table, start + len(token_ids))
        batch = Batch.from_chunks([Chunk(token_ids, start, sequence.block_table)], self.kv_cache.block_size)
        self.ops.set_num_threads(self.threads)
        logits = self.transformer.forward(batch, self.kv_cache, every_token=every_token)
        sequence.num_computed = start + len(token_ids)
        return logits

    @contextmanager
    def _sequence_for(self, token_ids: list[int], reuse: bool = True) -> Iterator[Sequence]:
        """The cache, for one request. Where the latest one began with the same tokens, their keys still stand.

        The prompt's last token is always computed: its logits choose the first new token.
        """
        if os.getpid() != self._process:
            raise RequestError(
                "this LLM was made before a fork(), and OpenMP's threads do not survive one: start processes with "
                'multiprocessing.get_context("spawn"), and make the LLM in the new process'
            )
        if not self._in_use.acquire(blocking=False):
            raise RequestError("another request is being streamed; finish its loop, or close() it, before the next")
        latest = self._sequence
        kept = common_prefix(latest.token_ids[: latest.num_computed], token_ids[:-1]) if reuse else 0
        self.kv_cache.blocks.shrink(latest.block_table, kept)
        self._sequence = Sequence(list(token_ids), len(token_ids), kept, latest.block_table)
        try:
            yield self._sequence
        finally:
            self._in_use.release()

    def _finish_reason(self, token_id: int, num_generated: int, params: SamplingParams) -> str | None:
        ends = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        if token_id in ends or token_id in params.stop_token_ids:
            return "stop"
        return "length" if num_generated == params.max_tokens else None

    def _request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids, once it is sure that the request can be served."""
        token_ids = self.encode(prompt)
        needed = len(token_ids) + params.max_tokens
        if needed > self.context_length:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens and max_tokens of {params.max_tokens} come to {needed}, but "
                f"the context holds {self.context_length}: shorten one, or give LLM a larger context_length if the "
                "model allows it"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("this model came without a tokenizer, so its answers are no text to find `stop` in")
        for token_id in params.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, self.config.vocab_size - 1)
        return token_ids

    def _make_cache(self, block_size: int) -> KVCache:
        try:
            return KVCache(self.config, -(-self.context_length // block_size), block_size)
        except MemoryError as error:
            raise CapacityError(
                f"a KV cache of {self.context_length:,} positions does not fit this machine's memory ({error}); "
                "give LLM a smaller context_length"
            ) from error

    def _warm_up(self) -> None:
        """Run two tokens and then one through a cache of their own, so that every kernel is compiled or loaded."""
        cache = KVCache.contiguous(self.config, length=3)
        for start, token_ids in (0, [0, 0]), (2, [0]):
            self.transformer.forward(Batch.from_chunks([Chunk(token_ids, start, [0])], cache.block_size), cache)

    def __repr__(self):
        return f"LLM({self.transformer!r}, {self.kv_cache!r})"


class _AnswerText:
    """Token ids in, text that may be shown out: whole characters only, nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._decoder = tokenizer and tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been reached."""
        return self._matcher.matched is not None

    def push(self, token_id: int) -> str:
        """What can be shown now that `token_id` has come."""
        return self._matcher.push(self._decoder.push(token_id)) if self._decoder else ""

    def finish(self) -> str:
        """What was waiting for more, now that no more comes."""
        if self._decoder is None:
            return ""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()


def _load(checkpoint: Checkpoint, bits: int | None, name: str) -> np.ndarray | QuantizedMatrix:
    """A tensor of the checkpoint, checked; a float matrix is rounded to `bits`, if asked for."""
    stored = checkpoint.tensors[name]
    tensor = stored.read()
    try:
        if isinstance(tensor, QuantizedMatrix):
            tensor.check_scales()
        elif bits is not None and tensor.ndim == 2:
            tensor = quantize(tensor, bits)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: tensor {stored.name!r} cannot be used: {error}") from error
    return tensor


def _check_params(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params are {type(params).__name__}; they must be SamplingParams")
    return params or SamplingParams()
