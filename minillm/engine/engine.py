"""Engine: the loop. It joins the scheduler, which has never seen a model, to the model, which has never seen a request.

A step is five lines, in `Engine.step`: schedule, batch, forward, sample, commit. They run one after another on the
thread that called, so a breakpoint in any of them shows everything.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from minillm.checks import check_integer
from minillm.engine.detokenizing import Answer
from minillm.engine.interrupts import interrupts_deferred
from minillm.engine.recording import Stopwatch, changed_params, record_of
from minillm.engine.sampling import Sample, SamplingParams, sample
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import Finished, Sampled, StepPlan
from minillm.errors import BusyError, RequestError
from minillm.model.batch import Batch
from minillm.model.kv_cache import KVCache
from minillm.model.probe import Probe, no_probe
from minillm.model.transformer import Transformer
from minillm.tokenizer import Tokenizer
from minillm.trace import Arrival, Finish, RunFacts, SampledToken, StepRecord
from minillm.trace.roofline import ModelCosts


@dataclass
class _Request:
    """What the engine remembers of an unfinished request; its tokens are the scheduler's."""

    params: SamplingParams
    seed: int
    answers: list[Answer]  # one a completion


@dataclass
class _Between:
    """What has happened since the last step, for the next one's record."""

    arrived: list[Arrival] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)


class Engine:
    """Serves any number of requests with one model, a step at a time.

    Parameters
    ----------
    transformer : Transformer
    kv_cache : KVCache
    scheduler : Scheduler over `kv_cache.blocks`.
    tokenizer : turns answers into text and knows the end tokens; None: answers are token ids only.
    context_length : positions a request may fill, prompt and answer; None for the model's own.
    threads : cores to use; None for all. Never changes a result.
    model : the model's name, for records.

    Attributes
    ----------
    listeners : callables that are given every StepRecord once its step is over, such as a Trace's `append`.
    probe : is shown every intermediate of every forward pass, as long as it is set; see `minillm.model.probe`.

    Notes
    -----
    One thread at a time: a call made while another thread is inside one raises BusyError and changes nothing.

    Raises
    ------
    ValueError
        The scheduler hands out other blocks than the cache's, or the cache is for a model of other windows.
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
        if scheduler.blocks is not kv_cache.blocks:
            raise ValueError(f"the scheduler is over {scheduler.blocks!r}; make it over kv_cache.blocks")
        if kv_cache.blocks.windows != transformer.config.group_windows:
            raise ValueError(
                f"the cache gives back what windows of {kv_cache.blocks.windows} hide, but the model's are "
                f"{transformer.config.group_windows}: make it with the model's config"
            )
        self.transformer, self.kv_cache, self.scheduler = transformer, kv_cache, scheduler
        self.tokenizer, self.threads, self.model = tokenizer, threads, model
        self.context_length = context_length or transformer.config.context_length
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.probe: Probe = no_probe
        self._requests: dict[str, _Request] = {}
        self._between = _Between()
        self._num_steps = self._num_requests = 0
        self._made = perf_counter()
        self._lock = threading.Lock()

    # --- the five lines -----------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Advance whom the scheduler chooses. With nothing to do, the record only tells what has happened between.

        Raises
        ------
        BusyError
            Another thread is inside a call.
        Exception
            Whatever the forward pass raised: the requests of this step then start over with the next one. Or whatever
            a listener raised, after all have been called: the step then stands.
        """
        with interrupts_deferred():
            record = self._step()
            failures = []
            for listener in self.listeners:  # all of them: what one fails to take in, the next may wait for
                try:
                    listener(record)
                except Exception as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return record

    def _step(self) -> StepRecord:
        with self._alone():
            watch = Stopwatch(self.clock)
            time = self.clock()
            plan = self.scheduler.schedule()
            watch.lap("schedule")
            record = record_of(plan, self.scheduler, self._num_steps, time)
            try:
                batch = self._batch(plan)
                watch.lap("batch")
                logits = self._forward(batch)
                watch.lap("forward")
                choices = self._sample(logits, plan)
                watch.lap("sample")
                self._commit(plan, choices, record)
            except BaseException:
                self.scheduler.abandon(plan)
                raise
            watch.lap("commit")
            self._complete(record, watch)
        return record

    def _batch(self, plan: StepPlan) -> Batch | None:
        """Shared blocks that will be written are copied first."""
        for source, target in plan.copies:
            self.kv_cache.copy_block(source, target)
        cache = self.kv_cache
        return Batch.from_plan(plan, cache.block_size, cache.num_groups) if plan.chunks else None

    def _forward(self, batch: Batch | None) -> np.ndarray | None:
        if batch is None:
            return None
        self.transformer.ops.set_num_threads(self.threads)
        return self.transformer.forward(batch, self.kv_cache, probe=self.probe)

    def _sample(self, logits: np.ndarray | None, plan: StepPlan) -> list[list[Sample | Exception]]:
        """For each chunk its `num_samples` choices. A choice that cannot be made is its request's failure alone."""
        choices: list[list[Sample | Exception]] = []
        for row, chunk in enumerate(plan.chunks):
            sequence, request = chunk.sequence, self._requests[chunk.sequence.request_id]
            choices.append([])
            for completion in sequence.completions[: chunk.num_samples]:
                seed = stream_seed(request.seed, completion)
                try:
                    choice = sample(logits[row], request.params, seed, sequence.num_generated, sequence.token_ids)
                except Exception as error:
                    choice = error
                choices[row].append(choice)
        return choices

    def _commit(self, plan: StepPlan, choices: list[list[Sample | Exception]], record: StepRecord) -> None:
        """Turn choices to text, see who is through, and let the scheduler take them over."""
        sampled: list[list[Sampled]] = []
        failures: dict[str, Exception] = {}
        for known, row in zip(record.chunks, choices, strict=True):
            answers = self._requests[known.request_id].answers
            sampled.append([])
            for completion, choice in enumerate(row, start=known.completion):
                try:
                    if isinstance(choice, Exception):
                        raise choice
                    text, finish_reason = answers[completion].push(choice.token_id)
                except Exception as error:
                    failures[known.request_id] = error
                    sampled[-1].append(Sampled(None))
                    continue
                shown = self._token_texts([choice.token_id])
                known.sampled.append(
                    SampledToken(completion, choice.token_id, text, choice.logprob, shown and shown[0])
                )
                sampled[-1].append(Sampled(choice.token_id, finish_reason))
        self.scheduler.commit(plan, sampled)
        record.finished = _finishes(plan.finished)
        for request_id, error in failures.items():
            record.finished += _finishes(self.scheduler.end(request_id, "error"), error)

    def _complete(self, record: StepRecord, watch: Stopwatch) -> None:
        """What came before the step and what it took."""
        record.arrived, record.aborted = self._between.arrived, self._between.aborted
        record.finished = self._between.finished + record.finished
        record.milliseconds = watch.milliseconds
        self._between = _Between()
        self._num_steps += 1
        for request_id in {finish.request_id for finish in record.finished}:
            if not self.scheduler.is_unfinished(request_id):
                self._requests.pop(request_id, None)

    # --- requests -----------------------------------------------------------------------------------------------

    def check(self, prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
        """The prompt's token ids, once it is sure that the request could be served.

        Raises
        ------
        RequestError
            The prompt is empty, holds other than token ids of the model, or leaves no room for `max_tokens` in the
            context or in the whole pool; or a parameter asks for what is not there.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params are {type(params).__name__}; they must be SamplingParams")
        token_ids = check_token_ids(prompt, self.transformer.config.vocab_size)
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
            check_integer("stop_token_ids", token_id, 0, self.transformer.config.vocab_size - 1)
        self.scheduler.check(Sequence.of("", token_ids, params.max_tokens, num_forks=params.n))
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
        """Let a request wait its turn; returns its id.

        Parameters
        ----------
        prompt : token ids
        params : SamplingParams; None for the default ones.
        request_id : its name in all records; None to have it numbered.
        priority : smaller goes first, if the admission order is "priority".
        text : the prompt as text, for records.

        Raises
        ------
        RequestError
            As `check` does; or another request of the same id is under way.
        BusyError
            Another thread is inside a call.
        """
        with self._alone():
            params = SamplingParams() if params is None else params
            token_ids = self.check(prompt, params)
            if request_id is None:
                request_id = self._next_id()
            for name, value in ("request_id", request_id), ("text", text):
                if not isinstance(value, str | None):
                    raise RequestError(f"{name} is {value!r}; it must be a string")
            priority = check_integer("priority", priority, -(2**31), 2**31)
            sequence = Sequence.of(request_id, token_ids, params.max_tokens, num_forks=params.n, priority=priority)
            seed = secrets.randbits(64) if params.seed is None else params.seed
            request = _Request(params, seed, [Answer(self.tokenizer, params) for _ in range(params.n)])
            token_texts = self._token_texts(token_ids)
            self.scheduler.add(sequence)
            self._requests[request_id] = request
            self._between.arrived.append(
                Arrival(
                    request_id,
                    self.clock(),
                    len(token_ids),
                    text,
                    changed_params(params),
                    params.n,
                    params.max_tokens,
                    priority,
                    token_texts,
                )
            )
            return request_id

    def abort(self, request_id: str) -> None:
        """End a request now, whether it waits or runs; its blocks are available at once.

        Raises
        ------
        RequestError
            No request of this id is under way.
        BusyError
            Another thread is inside a call.
        """
        with self._alone():
            self._between.finished += _finishes(self.scheduler.end(request_id, "abort"))
            self._between.aborted.append(request_id)
            del self._requests[request_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed so far be found by new requests."""
        with self._alone():
            self.kv_cache.blocks.reset_prefix_cache()

    def clock(self) -> float:
        """Seconds since the engine was made."""
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

    def _token_texts(self, token_ids: SequenceOf[int]) -> list[str] | None:
        """Each token as people read it, for the records."""
        return None if self.tokenizer is None else [self.tokenizer.token_text(token_id) for token_id in token_ids]

    def _next_id(self) -> str:
        """A number that no unfinished request is named by."""
        while self.scheduler.is_unfinished(str(self._num_requests)):
            self._num_requests += 1
        self._num_requests += 1
        return str(self._num_requests - 1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with interrupts_deferred():
            if not self._lock.acquire(blocking=False):
                raise BusyError(
                    "the engine is inside another call: use it from one thread at a time, and not from inside a step"
                )
            try:
                yield
            finally:
                self._lock.release()

    def __repr__(self):
        return f"Engine({self.transformer!r}, {self.scheduler!r})"


def stream_seed(seed: int, completion: int) -> int:
    """Which stream of random numbers a completion draws from: the request's own for the first, and one of 2^64 others,
    which no request of another seed draws from, for each further one."""
    return seed + (completion << 64)


def check_token_ids(prompt: SequenceOf[int], vocab_size: int) -> list[int]:
    """The prompt as a list of plain ints.

    Raises
    ------
    RequestError
        It is empty, or no sequence of ids from 0 to `vocab_size` - 1.
    """
    if not isinstance(prompt, list | tuple | np.ndarray):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    if len(prompt) == 0:
        raise RequestError("the prompt is empty; a model continues what is there, so give it at least one token")
    return [check_integer(f"prompt token {n}", token_id, 0, vocab_size - 1) for n, token_id in enumerate(prompt)]


def _finishes(ended: list[Finished], error: Exception | None = None) -> list[Finish]:
    """Records of who has ended: each completion, also those that had not parted yet."""
    message = None if error is None else f"{type(error).__name__}: {error}"
    return [
        Finish(finished.sequence.request_id, completion, finished.reason, message, error)
        for finished in ended
        for completion in finished.sequence.completions
    ]
