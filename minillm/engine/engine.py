"""Engine: the loop. It connects the scheduler, which uses no model, and the model, which handles no requests.

A step is the five lines of `Engine.step`: schedule, batch, forward, sample, commit. They run one after another on the
calling thread, so a breakpoint in any of them shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from minillm.checks import check_integer
from minillm.engine.exclusive import ExclusiveAccess, interrupts_deferred
from minillm.engine.recording import RecordedStep, StepRecorder, json_params
from minillm.engine.request import Request, check_token_ids, stream_seed
from minillm.engine.sampling import SamplingParams, sample
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.errors import RequestError
from minillm.model.batch import Batch
from minillm.model.kv_cache import KVCache
from minillm.model.probe import Probe, no_probe
from minillm.model.transformer import Transformer
from minillm.tokenizer import Tokenizer
from minillm.trace import Arrival, Finish, RunFacts, SampledToken, ScheduledChunk, StepRecord
from minillm.trace.roofline import ModelCosts


class Engine:
    """Serves any number of requests with one model, one step at a time.

    Parameters
    ----------
    transformer : Transformer
    kv_cache : KVCache
    scheduler : Scheduler over the cache's blocks; see `EngineConfig.scheduler`.
    tokenizer : turns tokens into text and has the end tokens; None: answers are token ids only.
    context_length : maximum length of a request, prompt and answer, in tokens; None for the model's own.
    threads : cores to use; None for all. Never changes a result.
    model : the model's name, for records.

    Attributes
    ----------
    listeners : callables that receive every StepRecord after its step, such as a Trace's `append`.
    probe : receives every intermediate result of every forward pass; see `minillm.model.probe`.

    Notes
    -----
    The engine serves one thread at a time. A call that is made while another one runs raises BusyError and changes
    nothing.

    Raises
    ------
    RequestError
        `context_length` is not an integer from 1 to the model's own.
    ValueError
        The scheduler's blocks do not match the cache, or the cache was created for a model with different windows.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv_cache: KVCache,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        context_length: int | None = None,
        threads: int | None = None,
        model: str = "",
    ):
        blocks = scheduler.blocks
        if (blocks.num_blocks, blocks.block_size) != (kv_cache.num_blocks, kv_cache.block_size):
            raise ValueError(f"the scheduler's {blocks!r} does not match {kv_cache!r}: make one for this cache")
        if not blocks.windows == kv_cache.windows == transformer.cache_shape.windows:
            raise ValueError(
                f"the scheduler is made for windows {blocks.windows} and the cache for {kv_cache.windows}, but the "
                f"model's are {transformer.cache_shape.windows}: make both with the model's config"
            )
        self.transformer, self.kv_cache, self.scheduler = transformer, kv_cache, scheduler
        self.tokenizer, self.threads, self.model = tokenizer, threads, model
        longest = transformer.config.context_length
        self.context_length = (
            longest if context_length is None else check_integer("context_length", context_length, 1, longest)
        )
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.probe: Probe = no_probe
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._made = perf_counter()
        self._recorder = StepRecorder(self.clock)
        self._access = ExclusiveAccess()

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Run one step. If nothing is scheduled, the record holds only the events since the last step.

        Raises
        ------
        BusyError
            Another call is under way.
        Exception
            The forward pass failed: the requests of this step keep their tokens and are computed again. Or a listener
            failed: the step is complete, and the other listeners have been called.
        """
        with self._recorded_step() as recorded:
            plan = self._schedule()
            batch = self._batch(plan)
            logits = self._forward(batch)
            tokens = self._sample(logits, plan)
            self._commit(plan, tokens)
        return recorded.record

    def _schedule(self) -> StepPlan:
        """Decide which sequences advance, and by how many tokens."""
        with self._recorder.stage("schedule"):
            plan = self.scheduler.schedule()
        self._recorder.scheduled(plan, self.scheduler)
        return plan

    def _batch(self, plan: StepPlan) -> Batch | None:
        """Lay the plan's chunks end to end. Shared blocks that will be written are copied first."""
        with self._recorder.stage("batch"):
            for copy in plan.copies:
                self.kv_cache.copy_block(copy.source, copy.target)
            if not plan.chunks:
                return None
            return Batch.from_plan(plan, self.kv_cache.block_size, self.kv_cache.num_groups)

    def _forward(self, batch: Batch | None) -> np.ndarray | None:
        """Compute the logits after each chunk, float32 [S, V]."""
        with self._recorder.stage("forward"):
            if batch is None:
                return None
            self.transformer.ops.set_num_threads(self.threads)
            return self.transformer.forward(batch, self.kv_cache, probe=self.probe)

    def _sample(self, logits: np.ndarray | None, plan: StepPlan) -> list[list[SampledToken | Exception]]:
        """Sample after each chunk that ends with its sequence's last known token; the other chunks get no token.

        If sampling fails, only the chunk's own request fails.
        """
        with self._recorder.stage("sample"):
            if logits is None:
                return []
            return [self._sample_after(chunk, row) for chunk, row in zip(plan.chunks, logits, strict=True)]

    def _commit(self, plan: StepPlan, tokens: list[list[SampledToken | Exception]]) -> None:
        """Detokenize the tokens, let the scheduler append them, and end what is finished."""
        with self._recorder.stage("commit"):
            failures: dict[str, Exception] = {}
            sampled = [
                [self._detokenize(chunk.request_id, token, failures) for token in row]
                for chunk, row in zip(plan.chunks, tokens, strict=True)
            ]
            for chunk, row in zip(plan.chunks, sampled, strict=True):  # the record lists only sampled tokens
                chunk.sampled = [token for token in row if token is not None]
            self.scheduler.commit(plan, sampled)
            for request_id, error in failures.items():
                plan.finished += self._fail(request_id, error)
            for finish in plan.finished:
                if not self.scheduler.is_unfinished(finish.request_id):
                    self._requests.pop(finish.request_id, None)
        self._recorder.complete(plan.finished)

    @contextmanager
    def _recorded_step(self) -> Iterator[RecordedStep]:
        """Run a step alone, undo it if it fails, and hand its record to the listeners."""
        with interrupts_deferred():  # `held` does this too, but it ends before the listeners are called
            recorded = RecordedStep()
            with self._access.held():
                self._recorder.begin()
                try:
                    yield recorded
                except BaseException:
                    self.scheduler.abandon()
                    raise
                recorded.record = self._recorder.record
            self._notify(recorded.record)  # by now another thread, or a listener, may have started the next step

    def _notify(self, record: StepRecord) -> None:
        """Call every listener, then raise the first exception that one of them raised."""
        failures = []
        for listener in self.listeners:
            try:
                listener(record)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _sample_after(self, chunk: ScheduledChunk, logits: np.ndarray) -> list[SampledToken | Exception]:
        """Sample one token for each completion of the chunk's sequence: several, if they fork after this chunk."""
        if not chunk.num_samples:
            return []
        sequence, request = self.scheduler.sequence(chunk), self._requests[chunk.request_id]
        tokens: list[SampledToken | Exception] = []
        for completion in sequence.completions:
            seed = stream_seed(request.seed, completion)
            try:
                token = sample(logits, request.params, seed, sequence.num_generated, sequence.token_ids)
                token.completion = completion
                tokens.append(token)
            except Exception as error:
                tokens.append(error)
        return tokens

    def _detokenize(
        self, request_id: str, token: SampledToken | Exception, failures: dict[str, Exception]
    ) -> SampledToken | None:
        """Fill in the token's text and finish reason. If that or the sampling failed, note the failure instead."""
        try:
            if isinstance(token, Exception):
                raise token
            detokenizer = self._requests[request_id].detokenizers[token.completion]
            token.text, token.finish_reason = detokenizer.push(token.token_id)
            if self.tokenizer is not None:
                token.token_text = self.tokenizer.token_text(token.token_id)
        except Exception as error:
            failures[request_id] = error
            return None
        return token

    def _fail(self, request_id: str, error: Exception) -> list[Finish]:
        finished = self.scheduler.end(request_id, "error")
        for finish in finished:
            finish.error, finish.exception = f"{type(error).__name__}: {error}", error
        return finished

    # --- requests -----------------------------------------------------------------------------------------------

    def check(self, prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
        """Check that a request can be served; return its prompt as a list of plain ints.

        Raises
        ------
        RequestError
            The prompt is empty, has an id outside the vocabulary, or leaves no room for `max_tokens` in the context or
            in the whole pool; or a parameter does not apply to this model.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params are {type(params).__name__}; they must be SamplingParams")
        token_ids = check_token_ids(prompt, self.transformer.config.vocab_size)
        length = len(token_ids) + params.max_tokens
        if length > self.context_length:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens and max_tokens of {params.max_tokens} need a context of {length} "
                f"tokens, but it has {self.context_length}: shorten one, or give LLM a larger context_length if the "
                "model allows it"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so its answers have no text in which to find `stop`")
        for token_id in params.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, self.transformer.config.vocab_size - 1)
        self.scheduler.check(Sequence.from_prompt("", token_ids, params.max_tokens, num_completions=params.n))
        return token_ids

    def add_request(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        text: str | None = None,
    ) -> str:
        """Put a request into the waiting queue; return its id.

        Parameters
        ----------
        prompt : token ids
        params : SamplingParams; None for the defaults.
        request_id : its name in all records; None for a number.
        priority : smaller is admitted first, under the "priority" admission order.
        text : the prompt as text, for records.

        Raises
        ------
        RequestError
            The request fails `check`, or an unfinished request has the same id.
        BusyError
            Another call is under way.
        """
        with self._access.held():
            params = SamplingParams() if params is None else params
            token_ids = self.check(prompt, params)
            if request_id is None:
                request_id = self._next_id()
            for name, value in ("request_id", request_id), ("text", text):
                if not isinstance(value, str | None):
                    raise RequestError(f"{name} is {value!r}; it must be a string")
            priority = check_integer("priority", priority, -(2**31), 2**31)
            sequence = Sequence.from_prompt(
                request_id, token_ids, params.max_tokens, num_completions=params.n, priority=priority
            )
            request = Request.new(params, self.tokenizer)
            arrival = Arrival(
                request_id,
                self.clock(),
                len(token_ids),
                text,
                json_params(params),
                params.n,
                params.max_tokens,
                priority,
                None if self.tokenizer is None else [self.tokenizer.token_text(token_id) for token_id in token_ids],
            )
            self.scheduler.add(sequence)
            self._requests[request_id] = request
            self._recorder.arrived.append(arrival)
            return request_id

    def abort(self, request_id: str) -> None:
        """End a waiting or running request. Its blocks are available immediately.

        Raises
        ------
        RequestError
            There is no unfinished request with this id.
        BusyError
            Another call is under way.
        """
        with self._access.held():
            self._recorder.finished += self.scheduler.end(request_id, "abort")
            self._recorder.aborted.append(request_id)
            del self._requests[request_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_unfinished

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that new requests compute all of their prompts."""
        with self._access.held():
            self.scheduler.blocks.reset_prefix_cache()

    def clock(self) -> float:
        """Return the time since the engine was created, in seconds."""
        return perf_counter() - self._made

    @property
    def facts(self) -> RunFacts:
        """What all records of this engine have in common: the header of a trace."""
        scheduler = self.scheduler
        return RunFacts(
            model=self.model,
            policy=scheduler.policy,
            admission=scheduler.waiting.admission,
            block_size=self.kv_cache.block_size,
            num_blocks=self.kv_cache.num_blocks,
            max_batch_tokens=scheduler.max_batch_tokens,
            max_sequences=scheduler.max_sequences,
            watermark=scheduler.watermark,
            prefix_caching=scheduler.prefix_caching,
            costs=ModelCosts.of(self.transformer.config, self.transformer.weight_bytes, self.kv_cache.bytes_per_token),
            windows=list(scheduler.blocks.windows),
        )

    def _next_id(self) -> str:
        """Return a number that is not the id of an unfinished request."""
        while self.scheduler.is_unfinished(str(self._num_requests)):
            self._num_requests += 1
        self._num_requests += 1
        return str(self._num_requests - 1)

    def __repr__(self) -> str:
        return f"Engine({self.transformer!r}, {self.scheduler!r})"
