"""Engine: the loop. It connects the scheduler, which uses no model, and the model, which handles no requests.

A step is the five lines of `Engine.step`: schedule, batch, forward, sample, commit. They run one after another on the
calling thread, so a breakpoint in any of them shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import numpy as np

from minillm.checks import check_integer
from minillm.engine.delivery import Deliveries, Delivery
from minillm.engine.exclusive import ExclusiveAccess
from minillm.engine.recording import Abort, PendingEvents, RecordedStep, StepRecorder, json_params
from minillm.engine.request import Request, check_stop_strings, check_token_ids, stream_seed
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
    Any thread may use the engine. Calls of several threads run one after another. A call from inside a step, such as
    from a signal handler or a probe, raises BusyError and changes nothing.

    An exception can interrupt a call anywhere: Ctrl-C, a timeout raised by a signal handler, or a MemoryError. The call
    has then taken effect as a whole or not at all. A step that has not is computed again by the next one, and its
    random numbers depend only on seed and position, so it samples the same tokens.

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
        self._deliveries = Deliveries()
        self._access = ExclusiveAccess(self._repair)

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Run one step. If nothing is scheduled, the record holds only the events since the last step.

        Raises
        ------
        BusyError
            The call comes from inside another one.
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
        self._recorder.complete(plan.finished)

    @contextmanager
    def _recorded_step(self) -> Iterator[RecordedStep]:
        """Run a step alone, undo it if it fails, and hand its record to the listeners."""
        with self._access.turn():
            with self._access.change():
                self._recorder.begin()
                recorded = RecordedStep()
                yield recorded
                recorded.record = self._settle()
            self._deliveries.deliver()

    def _settle(self) -> StepRecord:
        """Make the step final, in a single statement, so that an exception comes before all of it or after all."""
        record, plan, no_events = self._recorder.record, StepPlan(), PendingEvents(self._recorder.pending.step + 1)
        due = [*self._deliveries.due, Delivery(record, list(self.listeners))]
        self.scheduler.plan, self._recorder.pending, self._deliveries.due = plan, no_events, due
        for finish in record.finished:
            if not self.scheduler.is_unfinished(finish.request_id):
                self._requests.pop(finish.request_id, None)
        return record

    def _record_events(self) -> None:
        """Hand the pending events to the listeners in a record of their own, in which nothing is computed."""
        with self._recorded_step():
            self._recorder.scheduled(StepPlan(), self.scheduler)
            self._recorder.complete([])

    def _repair(self) -> None:
        """Return to a consistent state after a call was interrupted: undo it, or complete an abort that has begun."""
        scheduler, pending = self.scheduler, self._recorder.pending
        scheduler.abandon()
        for abort in pending.aborts:
            self._requests.pop(abort.request_id, None)
        for request_id in scheduler.request_ids:  # a request exists if both the engine and the scheduler know it
            if request_id not in self._requests:
                scheduler.end(request_id, "abort")
        for request_id in [id for id in self._requests if not scheduler.is_unfinished(id)]:
            del self._requests[request_id]
        recorded = {abort.request_id for abort in pending.aborts} | self._requests.keys()
        pending.arrived = [arrival for arrival in pending.arrived if arrival.request_id in recorded]
        for request_id in {chunk.request_id for chunk in scheduler.plan.chunks} & self._requests.keys():
            for sequence in scheduler.sequences(request_id):
                self._requests[request_id].detokenize_again(sequence, self.tokenizer)
        scheduler.plan = StepPlan()

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
        if self.tokenizer is not None and params.skip_special_tokens:
            check_stop_strings(params.stop, self.tokenizer)
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
            The call comes from inside a step.
        """
        params = SamplingParams() if params is None else params
        token_ids = self.check(prompt, params)
        for name, value in ("request_id", request_id), ("text", text):
            if not isinstance(value, str | None):
                raise RequestError(f"{name} is {value!r}; it must be a string")
        priority = check_integer("priority", priority, -(2**31), 2**31)
        request = Request.new(params, self.tokenizer)
        texts = None if self.tokenizer is None else [self.tokenizer.token_text(token_id) for token_id in token_ids]
        with self._access.turn():
            request_id = self.next_id() if request_id is None else request_id
            self.scheduler.check_id(request_id)
            if self._recorder.pending.must_be_recorded_before(request_id):
                self._record_events()
            with self._access.change():
                sequence = Sequence.from_prompt(
                    request_id, token_ids, params.max_tokens, num_completions=params.n, priority=priority
                )
                arrival = Arrival(
                    request_id,
                    self.clock(),
                    len(token_ids),
                    text,
                    json_params(params),
                    params.n,
                    params.max_tokens,
                    priority,
                    texts,
                )
                try:
                    self._requests[request_id] = request
                    self._recorder.pending.arrived.append(arrival)
                    self.scheduler.add(sequence)
                    return request_id
                except BaseException:
                    self._requests.pop(request_id, None)  # so that `_repair` removes the rest
                    raise

    def abort(self, request_id: str) -> None:
        """End a waiting or running request. Its blocks are available immediately.

        Raises
        ------
        RequestError
            There is no unfinished request with this id.
        BusyError
            The call comes from inside a step.
        """
        with self._access.turn():
            sequences = self.scheduler.sequences(request_id)
            if self._recorder.pending.must_be_recorded_before(request_id):
                self._record_events()
            with self._access.change():
                finished = [finish for sequence in sequences for finish in sequence.finish("abort")]
                self._recorder.pending.aborts.append(Abort(request_id, finished))  # from here on, it is aborted
                del self._requests[request_id]
                self.scheduler.end(request_id, "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_unfinished

    @property
    def num_steps(self) -> int:
        """How many steps have been completed, counting records without a step."""
        return self._recorder.pending.step

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that new requests compute all of their prompts."""
        with self._access.change():
            self.scheduler.reset_prefix_cache()

    def turn(self) -> AbstractContextManager[None]:
        """Keep other threads from using the engine during a `with` block.

        Raises
        ------
        RequestError
            This process was created by `os.fork` after the engine.
        """
        return self._access.turn()

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

    def next_id(self) -> str:
        """Return a number that no request has had as its id, and that is not the id of an unfinished request."""
        while self.scheduler.is_unfinished(str(self._num_requests)):
            self._num_requests += 1
        self._num_requests += 1
        return str(self._num_requests - 1)

    def __repr__(self) -> str:
        return f"Engine({self.transformer!r}, {self.scheduler!r})"
