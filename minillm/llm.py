"""LLM: the front door. A model, its tokenizer, and an engine that serves requests with them.

prompt -> token ids -> Engine.step, repeated -> text
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

import numpy as np

from minillm import catalog
from minillm.catalog import Report
from minillm.checkpoints import Checkpoint, open_checkpoint
from minillm.checks import check_flag, check_integer
from minillm.engine import Engine, EngineConfig, check_token_ids
from minillm.engine.sampling import SamplingParams
from minillm.errors import BusyError, CapacityError, CheckpointError, RequestError
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache, kv_groups
from minillm.model.transformer import Transformer
from minillm.ops import backend as find_backend
from minillm.outputs import Delta, OutputCollector, RequestOutput, RequestStream
from minillm.quantization import QuantizedMatrix, quantize
from minillm.tokenizer import Tokenizer

Prompt = str | SequenceOf[int]  # text or token ids
Message = Mapping[str, str]  # {"role": "user", "content": "..."}

# `LLM.logits` computes a text in chunks of at most this many tokens, to limit the memory for intermediate results. The
# bits of the result are the same for any chunk size.
PREFILL_CHUNK = 512

WEIGHTS = {
    None: None,
    "int8": 8,
    "int4": 4,
}  # values of LLM's `weights`, and the bits that they round float matrices to

# Default number of positions in the KV cache, at most: a model made for 131,072 would need gigabytes.
DEFAULT_CONTEXT_LENGTH = 8192


class LLM:
    """A model that is ready to answer any number of requests together.

    Parameters
    ----------
    model : path of a `.gguf` file or of a folder in Hugging Face layout, a catalog name, or a hub id (extra `hub`).
        None is the default model, SmolLM2-135M-Instruct, which is fetched once.
    backend : "numba" (compiled, the default), "numpy" (also called "reference"), or "cupy" (on a GPU; extra `gpu`).
    threads : cores to use; None for all. Never changes a result. Only for "numba".
    weights : "int8" or "int4" rounds the matrices that the file stores as floats to that many bits while loading; None
        leaves all weights unchanged.
    context_length : maximum length of a request, prompt and answer, in tokens; None for the model's own, at most
        DEFAULT_CONTEXT_LENGTH.
    engine : EngineConfig, how requests are scheduled and how much memory they get; None for the defaults.
    fused : whether the backend may run all layers as one compiled call. With False, they run one by one, as written in
        `minillm/model/transformer.py`; this also happens whenever a debugger is attached. Never changes a result.
    report : where progress (fetching, compiling) is reported; None for stderr.

    Attributes
    ----------
    path : the model's file or folder.
    config : ModelConfig.
    tokenizer : Tokenizer, or None if the model has none.
    transformer : the forward pass and its weights.
    kv_cache : the memory that it reads and writes.
    engine : Engine, the loop that serves all requests.
    context_length : maximum length of a request, prompt and answer, in tokens.
    default_params : SamplingParams of requests that specify none: the recommendation in the model's files, or of the
        makers of a model in the catalog, if there is one.

    Raises
    ------
    CatalogError, CheckpointError, UnsupportedError, TokenizerError
        The model cannot be found, is damaged, or needs something that is not supported.
    CapacityError
        The KV cache does not fit into memory.
    BackendError
        The backend cannot run on this machine.
    ValueError
        Another argument is out of range.

    Warns
    -----
    SlowThreadsWarning
        This machine has neither OpenMP nor TBB, so decoding takes several times as long as with them.

    Notes
    -----
    Any thread may use an LLM. Requests of several threads share the engine's steps, so they are computed in the same
    batches. Start processes with "spawn" instead of "fork".
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        backend: str = "numba",
        threads: int | None = None,
        weights: str | None = None,
        context_length: int | None = None,
        engine: EngineConfig | None = None,
        fused: bool = True,
        report: Report | None = None,
    ):
        if not isinstance(weights, str | None) or weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}; it can be {', '.join(map(repr, WEIGHTS))}")
        if not isinstance(report, Report | None):
            raise ValueError(f"report is {report!r}; it must be a minillm.catalog.Report")
        report = report or Report()
        self.ops = find_backend(backend)
        self.threads = None if threads is None else check_integer("threads", threads, 1)
        self.ops.set_num_threads(self.threads)
        self.ops.check_threads()
        self.path = catalog.resolve(model, report=report)
        checkpoint = open_checkpoint(self.path)
        self.config = checkpoint.config
        self.tokenizer: Tokenizer | None = checkpoint.tokenizer
        self.default_params = _recommended(checkpoint, catalog.recommended_sampling(self.path))
        if context_length is None:
            context_length = min(self.config.context_length, DEFAULT_CONTEXT_LENGTH)
        self.context_length = check_integer("context_length", context_length, 1, self.config.context_length)
        config = EngineConfig() if engine is None else engine
        if not isinstance(config, EngineConfig):
            raise ValueError(f"engine is {engine!r}; it must be an EngineConfig")
        self._block_size = min(check_integer("block_size", config.block_size, 1), self.context_length)
        if config.num_blocks is None:
            num_blocks = KVCache.num_blocks_for(self.config, self.context_length, self._block_size)
        else:
            num_blocks = check_integer("num_blocks", config.num_blocks, 1)
        self._kv_dtype = config.kv_dtype
        self.kv_cache = self._make_cache(num_blocks)
        scheduler = config.scheduler(self.kv_cache)
        with self.ops.announcing_compilation(report.line):
            load = partial(_load, checkpoint, WEIGHTS[weights])
            try:
                self.transformer = Transformer(self.config, load, self.ops, fused=check_flag("fused", fused))
            except MemoryError as error:
                raise CapacityError(
                    f"the weights of {self.path} do not fit into memory ({error}); close other programs, or choose a "
                    'smaller model, a quantized file, or weights="int8" or "int4"'
                ) from error
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
        self._outputs = OutputCollector(self.kv_cache.bytes_per_block)
        self.engine.listeners.append(self._outputs.push)
        self._dropped: list[RequestStream] = []  # of requests whose caller has stopped reading

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts together; return the outputs in the order of the prompts.

        Parameters
        ----------
        prompts : one prompt, or a list of them.
        params : SamplingParams for all prompts, or a list with one per prompt; None for `default_params`.

        Raises
        ------
        RequestError
            A prompt is empty, has an id outside the vocabulary, or leaves no room for `max_tokens`. No request starts.
        NumericError
            The logits after a prompt contain NaN or infinity. The error is raised after the other prompts have
            finished. Its attribute `outputs` is the list that would have been returned; in the output of a failed
            prompt, `error` is set.
        """
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise RequestError(f"prompts are {type(prompts).__name__}; generate takes a prompt or a list of prompts")
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        params_per_prompt: list[SamplingParams | None]
        if isinstance(params, list | tuple):
            params_per_prompt = list(params)
        else:
            params_per_prompt = [cast("SamplingParams | None", params)] * len(prompts)  # checked in `_prepare`
        if len(params_per_prompt) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(params_per_prompt)} params; give one for all, or one per prompt"
            )
        requests = [self._prepare(*request) for request in zip(prompts, params_per_prompt, strict=True)]
        with self._serving(requests) as streams:
            while not all(stream.is_finished for stream in streams):
                self._step()
        outputs = [stream.output() for stream in streams]
        for output in outputs:
            if output.error is not None:
                output.error.outputs = outputs  # type: ignore[attr-defined]
                raise output.error
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Answer one prompt, token by token. Raises the errors of `generate`, before the first token.

        The caller can start other requests, and read other streams, between two tokens: they share the engine's steps.
        """
        return self._run(*self._prepare(prompt, params))

    def chat(self, messages: SequenceOf[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, `[{"role": "user", "content": "Hi"}, ...]`, through the model's chat template.

        When a conversation continues an earlier one, the earlier keys and values are found in the prefix cache.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def stream_chat(
        self, messages: SequenceOf[Message], params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Like `chat`, but token by token."""
        return self.stream(self.encode_chat(messages), params)

    def logits(self, token_ids: SequenceOf[int]) -> np.ndarray:
        """Return the model's scores for the next token after each token, float32 [T, V]."""
        token_ids = self._fitting(token_ids)
        with self.engine.turn():
            cache = self._own_cache(len(token_ids))
            rows = []
            for start in range(0, len(token_ids), PREFILL_CHUNK):
                chunk = Chunk(token_ids[start : start + PREFILL_CHUNK], start, cache.full_tables())
                batch = Batch.from_chunks([chunk], cache.block_size, cache.num_groups)
                rows.append(self.transformer.forward(batch, cache, every_token=True))
            return np.concatenate(rows)

    def probe(self, prompt: Prompt, names: str = "*") -> dict[str, np.ndarray]:
        """Return the intermediate results of one pass by name: `llm.probe("Hi")["layers.3.attention.weights"]`.

        Parameters
        ----------
        prompt : computed as one chunk, with every token scored. Running requests are not affected.
        names : pattern of the names to keep, such as "layers.3.*" or "*.weights"; `minillm.model.probe` lists them all.
            For T tokens, scores and weights together take 8 * L * H * T * T bytes.

        Raises
        ------
        RequestError
            The prompt is rejected by `encode`, or is longer than the context.
        """
        token_ids = self._fitting(prompt)
        seen: dict[str, np.ndarray] = {}

        def keep(name: str, value: np.ndarray) -> None:
            if fnmatchcase(name, names):
                seen[name] = value

        with self.engine.turn():
            cache = self._own_cache(len(token_ids))
            batch = Batch.from_chunks([Chunk(token_ids, 0, cache.full_tables())], cache.block_size, cache.num_groups)
            self.transformer.forward(batch, cache, every_token=True, probe=keep)
        return seen

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that the next request computes all of its prompt."""
        self.engine.reset_prefix_cache()

    def encode(self, prompt: Prompt) -> list[int]:
        """Check a prompt and return its token ids. A prompt of token ids is returned unchanged.

        Raises
        ------
        RequestError
            The prompt is empty, is text although the model has no tokenizer, or contains anything but token ids of the
            model.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give token ids instead of text")
            prompt = self.tokenizer.encode(prompt)
        return check_token_ids(prompt, self.config.vocab_size)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    def encode_chat(self, messages: SequenceOf[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the model's answer."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, and so no chat template; give token ids")
        text = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has added them already

    # --- running requests ---------------------------------------------------------------------------------------

    def _run(self, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> Generator[Delta, None, None]:
        """Step the engine until the request has finished, and yield its deltas. Other requests advance meanwhile."""
        with self._serving([(prompt, token_ids, params)]) as (stream,):
            is_finished = False
            while not is_finished:
                deltas, is_finished = self._outputs.take(stream)
                yield from deltas
                if not is_finished:
                    self._step()
        if stream.error:
            raise stream.error

    @contextmanager
    def _serving(self, requests: SequenceOf[tuple[Prompt, list[int], SamplingParams]]) -> Iterator[list[RequestStream]]:
        """Add the requests to the engine; abort the unfinished ones at the end of the `with` block."""
        streams: list[RequestStream] = []
        try:
            try:
                for prompt, token_ids, params in requests:
                    with self.engine.turn():  # so that no other thread takes the id
                        stream = RequestStream(self.engine.next_id(), token_ids, params)
                        streams.append(stream)
                        self._outputs.follow(stream, self.engine.num_steps)
                        text = prompt if isinstance(prompt, str) else None
                        self.engine.add_request(token_ids, params, request_id=stream.request_id, text=text)
                yield streams
            finally:
                self._drop(streams)
        finally:
            self._drop(streams)  # again, because an exception can interrupt the first

    def _step(self) -> None:
        self._abort_dropped()
        self.engine.step()

    def _drop(self, streams: SequenceOf[RequestStream]) -> None:
        """Stop filling the streams and abort those of their requests that have not finished."""
        self._dropped += [stream for stream in streams if self._outputs.is_followed(stream)]
        self._abort_dropped()

    def _abort_dropped(self) -> None:
        """Abort the requests whose caller has stopped reading.

        Python's garbage collector can close a stream in the middle of a step. The engine is then busy, and the request
        is aborted before the next step.
        """
        with self.engine.turn():
            for stream in list(self._dropped):
                try:
                    if self._outputs.is_followed(stream) and self.engine.scheduler.is_unfinished(stream.request_id):
                        self.engine.abort(stream.request_id)
                except BusyError:
                    return
                self._outputs.drop(stream)
                self._dropped.remove(stream)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Prompt, list[int], SamplingParams]:
        """Check that a request can be served; return it with token ids and parameters filled in."""
        params = self.default_params if params is None else params
        return prompt, self.engine.check(self.encode(prompt), params), params

    def _fitting(self, prompt: Prompt) -> list[int]:
        token_ids = self.encode(prompt)
        if len(token_ids) > self.context_length:
            raise RequestError(f"{len(token_ids)} tokens do not fit the context of {self.context_length}")
        return token_ids

    def _own_cache(self, num_tokens: int) -> KVCache:
        """Return a cache for one pass outside the engine."""
        self.ops.set_num_threads(self.threads)
        return self._make_cache(KVCache.num_blocks_for(self.config, num_tokens, self._block_size))

    def _make_cache(self, num_blocks: int) -> KVCache:
        try:
            return KVCache(self.config, num_blocks, self._block_size, self._kv_dtype, self.ops.array_library())
        except MemoryError as error:
            num_positions = self._block_size * num_blocks // len(kv_groups(self.config))
            raise CapacityError(
                f"a KV cache of {num_positions:,} positions does not fit into memory ({error}); give LLM a smaller "
                "context_length, or its engine fewer num_blocks"
            ) from error

    def _warm_up(self) -> None:
        """Compute two tokens and then one in a cache of their own, so that every kernel is compiled or loaded."""
        cache = KVCache.contiguous(self.config, length=3, dtype=self._kv_dtype, xp=self.ops.array_library())
        for start, token_ids in (0, [0, 0]), (2, [0]):
            chunk = Chunk(token_ids, start, cache.full_tables())
            self.transformer.forward(Batch.from_chunks([chunk], cache.block_size, cache.num_groups), cache)

    def __repr__(self) -> str:
        return f"LLM({self.transformer!r}, {self.kv_cache!r})"


def _recommended(checkpoint: Checkpoint, by_catalog: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters that a checkpoint or else the catalog recommends, checked."""
    try:
        return SamplingParams(**checkpoint.recommended_sampling or by_catalog)
    except RequestError as error:
        raise CheckpointError(f"{checkpoint.path}: its recommended sampling parameters are invalid: {error}") from error


def _load(checkpoint: Checkpoint, bits: int | None, name: str) -> np.ndarray | QuantizedMatrix:
    """Read and check a tensor of the checkpoint. Round a float matrix to `bits`, if given."""
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
