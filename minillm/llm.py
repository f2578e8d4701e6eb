"""LLM: the front door. A model, its tokenizer, and an engine that serves requests with them.

prompt -> token ids -> Engine.step, again and again -> text
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np

from minillm import catalog
from minillm.catalog import Report
from minillm.checkpoints import Checkpoint, open_checkpoint
from minillm.checks import check_integer
from minillm.engine import Engine, EngineConfig, check_token_ids
from minillm.engine.sampling import SamplingParams
from minillm.errors import BusyError, CapacityError, CheckpointError, RequestError
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache
from minillm.model.transformer import Transformer
from minillm.ops import backend as find_backend
from minillm.outputs import Answers, Delta, Followed, RequestOutput
from minillm.quantization import QuantizedMatrix, quantize
from minillm.tokenizer import Tokenizer

Prompt = str | SequenceOf[int]  # text, or token ids as they are
Message = Mapping[str, str]  # {"role": "user", "content": "..."}

# `LLM.logits` computes a text in pieces of at most so many tokens. It bounds the memory for intermediate results;
# the result's bits are the same for any number.
PREFILL_CHUNK = 512

WEIGHTS = {None: None, "int8": 8, "int4": 4}  # what LLM's `weights` may be: bits that float matrices are rounded to

# Positions the KV cache has room for unless told otherwise: a model made for 131,072 would ask for gigabytes.
DEFAULT_CONTEXT_LENGTH = 8192


class LLM:
    """A model ready to answer, any number of requests together.

    Parameters
    ----------
    model : path of a `.gguf` file or of a folder in Hugging Face layout, a catalog name, or a hub id (extra `hub`).
        None is the default model, SmolLM2-135M-Instruct, fetched once.
    backend : "numba" (compiled, the default), "numpy" (also called "reference"), or "cupy" (on a GPU; extra `gpu`).
    threads : cores to use; None for all. Never changes a result. Only for "numba".
    weights : "int8" or "int4" rounds matrices that the file holds as floats to so many bits as they are loaded; None
        leaves all weights as they are.
    context_length : positions to have room for; None for the model's own, at most DEFAULT_CONTEXT_LENGTH.
    block_size : positions a block of the KV cache holds; None for what `engine` says.
    engine : EngineConfig, how requests are scheduled and how much memory they get; None for the default one.
    report : where progress is told (fetching, compiling); None for stderr.

    Attributes
    ----------
    path : the model's file or folder.
    config : ModelConfig.
    tokenizer : Tokenizer, or None if the model came without one.
    transformer : the forward pass and its weights.
    kv_cache : the memory it reads and writes.
    engine : Engine, the loop that serves all requests.
    context_length : positions there is room for.
    default_params : SamplingParams of requests that bring none: what the model's makers recommend, if its files say so.

    Raises
    ------
    CatalogError, CheckpointError, UnsupportedError, TokenizerError
        The model cannot be found, is damaged, or asks for what is not supported.
    CapacityError
        The KV cache does not fit into memory.
    BackendError
        The backend cannot compute on this machine.
    ValueError
        Another argument is out of range.

    Warns
    -----
    SlowThreadsWarning
        This machine has neither OpenMP nor TBB, so that decoding takes several times as long as it need.

    Notes
    -----
    One thread at a time may use an LLM: while its requests are under way, any other is refused. Processes are to be
    started with "spawn", not forked.
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        backend: str = "numba",
        threads: int | None = None,
        weights: str | None = None,
        context_length: int | None = None,
        block_size: int | None = None,
        engine: EngineConfig | None = None,
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
        self.default_params = _recommended(checkpoint)
        if context_length is None:
            context_length = min(self.config.context_length, DEFAULT_CONTEXT_LENGTH)
        self.context_length = check_integer("context_length", context_length, 1, self.config.context_length)
        config = EngineConfig() if engine is None else engine
        if not isinstance(config, EngineConfig):
            raise ValueError(f"engine is {engine!r}; it must be an EngineConfig")
        if block_size is not None:
            config = replace(config, block_size=block_size)
        self._block_size = min(check_integer("block_size", config.block_size, 1), self.context_length)
        if config.num_blocks is None:
            num_blocks = KVCache.blocks_for(self.config, self.context_length, self._block_size)
            config = replace(config, num_blocks=num_blocks)
        self._kv_dtype = config.kv_dtype
        self.kv_cache = self._make_cache(check_integer("num_blocks", config.num_blocks, 1))
        scheduler = config.scheduler(self.kv_cache.blocks)
        with self.ops.announcing_compilation(report.line):
            self.transformer = Transformer(self.config, partial(_load, checkpoint, WEIGHTS[weights]), self.ops)
            self._warm_up()
        self.engine = Engine(
            self.transformer,
            self.kv_cache,
            scheduler,
            tokenizer=self.tokenizer,
            context_length=self.context_length,
            threads=self.threads,
            model=self.path.name,
        )
        self._answers = Answers(self.kv_cache.bytes_per_block)
        self.engine.listeners.append(self._answers.push)
        self._dropped: list[str] = []  # requests nobody waits for any more
        self._guard = threading.RLock()
        self._user, self._users = 0, 0  # the thread whose requests are under way, and how many calls it is inside
        self._process = os.getpid()

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer every prompt, together; the outputs come in the prompts' order.

        Parameters
        ----------
        prompts : one or several.
        params : for all of them, or a list with one for each; None for `default_params`.

        Raises
        ------
        RequestError
            A prompt is empty, holds ids that are not the model's, or leaves no room for `max_tokens`. Nothing starts.
        NumericError
            The model's scores for one of them were no numbers. The others are answered to their end before.
        """
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise RequestError(f"prompts are {type(prompts).__name__}; generate takes a prompt or a list of prompts")
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        if not isinstance(params, list | tuple):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(params)} params; give one for all, or one each")
        requests = [self._prepare(*request) for request in zip(prompts, params, strict=True)]
        with self._serving(requests) as followed:
            while not all(request.is_finished for request in followed):
                self._step()
        for request in followed:
            if request.error:
                raise request.error
        return [request.output() for request in followed]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt, token by token. Raises as `generate` does, before the first token.

        Other requests may be made, and streams read, between two tokens: they share the engine's steps.
        """
        return self._run(*self._prepare(prompt, params))

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
        token_ids = self._fitting(token_ids)
        with self._in_use():
            cache, table = self._own_cache(len(token_ids))
            rows = []
            for start in range(0, len(token_ids), PREFILL_CHUNK):
                chunk = Chunk(token_ids[start : start + PREFILL_CHUNK], start, table)
                batch = Batch.from_chunks([chunk], cache.block_size, cache.num_groups)
                rows.append(self.transformer.forward(batch, cache, every_token=True))
            return np.concatenate(rows)

    def probe(self, prompt: Prompt, names: str = "*") -> dict[str, np.ndarray]:
        """Every intermediate of one pass over a prompt, by name: `llm.probe("Hi")["layers.3.attention.weights"]`.

        Parameters
        ----------
        prompt : computed as one chunk, every token scored. Requests under way are not touched.
        names : a pattern that says which to keep, such as "layers.3.*" or "*.weights"; `minillm.model.probe` has all names.
            Of T tokens, scores and weights together take 8 * L * H * T * T bytes.

        Raises
        ------
        RequestError
            As `encode` does; or the prompt is longer than the context.
        """
        token_ids = self._fitting(prompt)
        seen: dict[str, np.ndarray] = {}

        def keep(name: str, value: np.ndarray) -> None:
            if fnmatchcase(name, names):
                seen[name] = value

        with self._in_use():
            cache, table = self._own_cache(len(token_ids))
            batch = Batch.from_chunks([Chunk(token_ids, 0, table)], cache.block_size, cache.num_groups)
            self.transformer.forward(batch, cache, every_token=True, probe=keep)
        return seen

    def reset_prefix_cache(self) -> None:
        """Forget what was computed so far, so that the next request computes all of its prompt."""
        with self._in_use():
            self.engine.reset_prefix_cache()

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
        else:
            token_ids = prompt
        return check_token_ids(token_ids, self.config.vocab_size)

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

    # --- requests under way -------------------------------------------------------------------------------------

    def _run(self, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Step the engine until the request has ended, and hand on what comes. Other requests go on all the while."""
        with self._serving([(prompt, token_ids, params)]) as (followed,):
            while True:
                while followed.deltas:
                    yield followed.deltas.popleft()
                if followed.is_finished:
                    break
                self._step()
        if followed.error:
            raise followed.error

    @contextmanager
    def _serving(self, requests: SequenceOf[tuple[Prompt, list[int], SamplingParams]]) -> Iterator[list[Followed]]:
        """The requests, under way; whatever of them is unfinished at the end is aborted."""
        with self._in_use():
            followed: list[Followed] = []
            try:
                for prompt, token_ids, params in requests:
                    text = prompt if isinstance(prompt, str) else None
                    request_id = self.engine.add_request(token_ids, params, text=text)
                    followed.append(self._answers.follow(request_id, token_ids, params))
                yield followed
            finally:
                for request in followed:
                    self._answers.drop(request)
                self._dropped += [request.request_id for request in followed if not request.is_finished]
                self._abort_dropped()

    def _step(self) -> None:
        self._abort_dropped()
        self.engine.step()

    def _abort_dropped(self) -> None:
        """Let go of requests nobody waits for.

        Python's garbage collector may throw a stream away in the middle of a step; its request ends before the next.
        """
        while self._dropped:
            request_id = self._dropped[-1]
            try:
                if self.engine.scheduler.is_unfinished(request_id):
                    self.engine.abort(request_id)
            except BusyError:
                return
            self._dropped.remove(request_id)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """One thread at a time, from a request's first step to its last."""
        if os.getpid() != self._process:
            raise RequestError(
                "this LLM was made before a fork(), and OpenMP's threads do not survive one: start processes with "
                'multiprocessing.get_context("spawn"), and make the LLM in the new process'
            )
        with self._guard:
            if self._users and self._user != threading.get_ident():
                raise BusyError(
                    "another thread's request is under way; finish its loop, or close() its stream, before the next"
                )
            self._user, self._users = threading.get_ident(), self._users + 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1

    def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Prompt, list[int], SamplingParams]:
        """A request, once it is sure that it can be served."""
        params = self.default_params if params is None else params
        return prompt, self.engine.check(self.encode(prompt), params), params

    def _fitting(self, prompt: Prompt) -> list[int]:
        token_ids = self.encode(prompt)
        if len(token_ids) > self.context_length:
            raise RequestError(f"{len(token_ids)} tokens do not fit the context of {self.context_length}")
        return token_ids

    def _own_cache(self, num_tokens: int) -> tuple[KVCache, list[int]]:
        """A cache for one pass outside the engine, and a block table over all of it."""
        cache, table = self._make_cache(KVCache.blocks_for(self.config, num_tokens, self._block_size)), []
        cache.blocks.extend(table, num_tokens)
        self.ops.set_num_threads(self.threads)
        return cache, table

    def _make_cache(self, num_blocks: int) -> KVCache:
        try:
            return KVCache(self.config, num_blocks, self._block_size, self._kv_dtype, self.ops.array_library())
        except MemoryError as error:
            groups = len(self.config.layer_groups)
            raise CapacityError(
                f"a KV cache of {self._block_size * num_blocks // groups:,} positions does not fit the memory there is "
                f"({error}); give LLM a smaller context_length, or its engine fewer num_blocks"
            ) from error

    def _warm_up(self) -> None:
        """Run two tokens and then one through a cache of their own, so that every kernel is compiled or loaded."""
        cache = KVCache.contiguous(self.config, length=3, dtype=self._kv_dtype, xp=self.ops.array_library())
        table = list(range(cache.num_blocks))
        for start, token_ids in (0, [0, 0]), (2, [0]):
            batch = Batch.from_chunks([Chunk(token_ids, start, table)], cache.block_size, cache.num_groups)
            self.transformer.forward(batch, cache)

    def __repr__(self):
        return f"LLM({self.transformer!r}, {self.kv_cache!r})"


def _recommended(checkpoint: Checkpoint) -> SamplingParams:
    """What a checkpoint recommends, checked."""
    try:
        return SamplingParams(**checkpoint.recommended)
    except RequestError as error:
        raise CheckpointError(f"{checkpoint.path}: how it says to sample cannot be: {error}") from error


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
