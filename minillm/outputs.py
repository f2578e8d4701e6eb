"""Outputs: the deltas of a request while it runs, its answer at the end, and its metrics.

The engine produces one record per step. `OutputCollector` listens to the records and sorts their tokens by request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from minillm.engine.block_table import FREED
from minillm.engine.exclusive import Turn
from minillm.engine.sampling import SamplingParams
from minillm.errors import RequestError
from minillm.trace import Finish, ScheduledChunk, StepRecord


@dataclass
class Metrics:
    """What one completion took. Times are in seconds and count steps only, not the caller's time between them.

    Attributes
    ----------
    num_prompt_tokens : tokens of the prompt.
    num_cached_tokens : prompt tokens whose keys and values were still in the cache.
    num_generated_tokens : tokens of the completion.
    time_to_first_token : duration of all steps from the request's arrival to its first token, queueing included (TTFT).
    prefill_seconds : duration of the steps that computed the prompt, without sampling.
    decode_seconds : duration of all steps after the first token.
    kv_bytes : bytes of the KV-cache blocks that the completion held last.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    time_to_first_token: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed per second, not counting cached ones."""
        return (self.num_prompt_tokens - self.num_cached_tokens) / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after the first, which belongs to the prefill; 0 if there was only one."""
        return (self.num_generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Delta:
    """The part of an answer that one step added.

    Attributes
    ----------
    text : new text; empty while a character or a possible stop string is incomplete.
    token_id : the sampled token; None if the request was aborted, which adds no token.
    logprob : its log-probability, if requested.
    finish_reason : "stop", "length" or "abort" on the last delta of a completion.
    metrics : Metrics so far.
    completion : number of the completion that the delta belongs to.
    """

    text: str
    token_id: int | None
    logprob: float | None
    finish_reason: str | None
    metrics: Metrics
    completion: int = 0


@dataclass
class CompletionOutput:
    """A finished completion of a prompt.

    Attributes
    ----------
    text, token_ids : the answer.
    logprobs : the log-probability of each token, if requested.
    finish_reason : "stop" (an end token or a stop string), "length" (`max_tokens` reached), "abort", or "error" (the
        request failed; see `RequestOutput.error`).
    metrics : Metrics of the whole completion.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    metrics: Metrics | None = None


@dataclass(repr=False)
class RequestOutput:
    """A finished request: its `n` completions. The properties give direct access to the first one.

    Attributes
    ----------
    prompt_token_ids : the prompt.
    completions : CompletionOutput of each completion.
    error : the exception that ended the request, if it failed. The completions are then what it had generated.
    """

    prompt_token_ids: list[int]
    completions: list[CompletionOutput]
    error: BaseException | None = None

    def __repr__(self) -> str:
        failure = f", error={self.error!r}" if self.error else ""
        return f"RequestOutput({self.text!r}{failure}, {self.completions}, prompt_token_ids={self.prompt_token_ids})"

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the first completion's tokens, if requested."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first completion."""
        return self.completions[0].finish_reason

    @property
    def metrics(self) -> Metrics | None:
        """Metrics of the first completion."""
        return self.completions[0].metrics


class RequestStream:
    """The outputs of an unfinished request, as they arrive.

    Attributes
    ----------
    request_id, prompt_token_ids, params : the request.
    deltas : deltas that the caller has not taken yet.
    error : the exception that ended the request, if it failed.
    first_step : number of the first step that can compute a part of the request.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams):
        self.request_id, self.prompt_token_ids, self.params = request_id, prompt_token_ids, params
        self.deltas: deque[Delta] = deque()
        self.error: BaseException | None = None
        self.first_step, self._added_at = 0, 0.0
        self._metrics = [Metrics(len(prompt_token_ids)) for _ in range(params.n)]
        self._first_token_at = [0.0] * params.n
        self._finish_reasons: list[str | None] = [None] * params.n

    @property
    def is_finished(self) -> bool:
        """Whether no more deltas will arrive."""
        return None not in self._finish_reasons

    def output(self) -> RequestOutput:
        """Join all deltas into the finished answer."""
        completions = [
            CompletionOutput(logprobs=[] if self.params.logprobs else None, finish_reason=reason, metrics=metrics)
            for reason, metrics in zip(self._finish_reasons, self._metrics, strict=True)
        ]
        for delta in self.deltas:
            if delta.token_id is None:
                continue
            completion = completions[delta.completion]
            completion.text += delta.text
            completion.token_ids.append(delta.token_id)
            if completion.logprobs is not None and delta.logprob is not None:
                completion.logprobs.append(delta.logprob)
        return RequestOutput(self.prompt_token_ids, completions, self.error)

    def added(self, step: int, busy_seconds: float) -> None:
        """Note the number of the next step, and the duration of all steps before it."""
        self.first_step = step
        self._added_at, self._first_token_at = busy_seconds, [busy_seconds] * self.params.n

    def admitted(self, num_cached_tokens: int) -> None:
        """Note how much of the prompt was found in the cache."""
        for metrics in self._metrics:
            metrics.num_cached_tokens = num_cached_tokens

    def advanced(self, chunk: ScheduledChunk, seconds: float, busy_seconds: float, kv_bytes: int) -> None:
        """Add the tokens that a step sampled after a chunk of this request.

        Parameters
        ----------
        chunk : the chunk.
        seconds : duration of the step up to sampling.
        busy_seconds : duration of all steps so far, this one included.
        kv_bytes : bytes of the blocks that the sequence holds.
        """
        for metrics in self._metrics:
            if chunk.is_prefill and not metrics.num_generated_tokens:
                metrics.prefill_seconds += seconds
        for token in chunk.sampled:
            metrics = self._metrics[token.completion]
            if metrics.num_generated_tokens == 0:
                metrics.time_to_first_token = busy_seconds - self._added_at
                self._first_token_at[token.completion] = busy_seconds
            metrics.num_generated_tokens += 1
            metrics.decode_seconds = busy_seconds - self._first_token_at[token.completion]
            metrics.kv_bytes = kv_bytes
            self.deltas.append(
                Delta(token.text, token.token_id, token.logprob, None, replace(metrics), token.completion)
            )

    def finished(self, finish: Finish) -> None:
        """Note that a completion ended. Its last delta gets the finish reason; an abort adds one without a token."""
        self._finish_reasons[finish.completion] = finish.reason
        self.error = finish.exception or self.error
        if finish.reason in ("stop", "length"):
            last = next(delta for delta in reversed(self.deltas) if delta.completion == finish.completion)
            last.finish_reason = finish.reason
        elif finish.reason == "abort":
            metrics = replace(self._metrics[finish.completion])
            self.deltas.append(Delta("", None, None, "abort", metrics, finish.completion))

    def failed(self, error: BaseException) -> None:
        """End all completions that have not ended, because of `error`."""
        self.error = error
        self._finish_reasons = [reason or "error" for reason in self._finish_reasons]


class OutputCollector:
    """Sorts the tokens in an engine's records by request. Any thread may call its methods.

    Parameters
    ----------
    bytes_per_block : bytes of a block of the KV cache.
    """

    def __init__(self, bytes_per_block: int):
        self._bytes_per_block = bytes_per_block
        self._streams: dict[str, RequestStream] = {}
        self._busy_seconds = 0.0  # duration of all steps so far
        self._num_records = 0
        self._begun = 0  # records that `push` has begun to process
        self._turn = Turn()

    def follow(self, stream: RequestStream, step: int) -> None:
        """Fill a stream from now on. Its request is added to the engine next, before the step with this number."""
        stream.added(step, self._busy_seconds)
        self._streams[stream.request_id] = stream

    def is_followed(self, stream: RequestStream) -> bool:
        """Return whether the stream is being filled."""
        return self._streams.get(stream.request_id) is stream

    def drop(self, stream: RequestStream) -> None:
        """Stop following a request."""
        if self.is_followed(stream):
            del self._streams[stream.request_id]

    def take(self, stream: RequestStream) -> tuple[list[Delta], bool]:
        """Return the deltas that the caller has not taken yet, and whether they are the last."""
        with self._turn.taken():
            deltas, stream.deltas = stream.deltas, deque()
            return list(deltas), stream.is_finished

    def push(self, record: StepRecord) -> None:
        """Process the record of a step.

        If an exception has kept this method from processing an earlier record completely, the streams that were open
        then lack tokens. They fail.
        """
        with self._turn.taken():
            if record.step < self._num_records:  # the engine calls a listener again if it was interrupted
                return
            if record.step != self._num_records or self._begun > self._num_records:
                self._fail_before(record.step)
            self._begun = record.step + 1
            self._process(record)
            self._num_records = record.step + 1

    def _fail_before(self, step: int) -> None:
        """End the streams that were open before a step, because of the record that is missing."""
        for stream in [stream for stream in self._streams.values() if stream.first_step < step]:
            stream.failed(
                RequestError("an exception interrupted the engine, and tokens of this request were lost: repeat it")
            )

    def _process(self, record: StepRecord) -> None:
        self._busy_seconds += record.end - record.time
        seconds = sum(record.milliseconds[stage] for stage in ("schedule", "batch", "forward")) / 1000
        for admission in record.admitted:
            if admission.request_id in self._streams and not admission.after_preemption:
                self._streams[admission.request_id].admitted(admission.num_cached_tokens)
        for chunk in record.chunks:
            if chunk.request_id in self._streams:
                num_blocks = sum(len(table) - table.count(FREED) for table in chunk.block_tables)
                kv_bytes = num_blocks * self._bytes_per_block
                self._streams[chunk.request_id].advanced(chunk, seconds, self._busy_seconds, kv_bytes)
        for finish in record.finished:
            if finish.request_id in self._streams:
                self._streams[finish.request_id].finished(finish)
